"""Few large files instead of many small ones, for readers' sake, while the job goes on appending (docs/tables.md)."""

from dataclasses import dataclass

from pyspark.sql import SparkSession

from pipelines.tables import sole_committer, table_exists, table_name
from schemas.errors import SetupError
from schemas.settings import StorageSettings
from schemas.tables import Table

_CONF = {
    # VACUUM lists the one folder that a table is in as many tasks as this says: 10,000 by default, 20 s on two cores for nothing.
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "8",
    # A file of this size is left alone: at 1 GiB, the default, each run would write up to 1 GiB anew for the sake of an hour's few MiB.
    "spark.databricks.delta.optimize.maxFileSize": str(256 * 1024 * 1024),
    "spark.databricks.delta.optimize.minFileSize": str(128 * 1024 * 1024),
}


@dataclass(frozen=True)
class Compaction:
    """What was done to one table; `files_removed` are those that the table named before and `files_added` replace."""

    table: str
    files_removed: int
    files_added: int
    files: int
    """How many the table has now."""
    bytes: int


def compact_tables(spark: SparkSession, storage: StorageSettings) -> list[Compaction]:
    """Compact each table, and delete what compactions have replaced longer ago than the table keeps it (a day).

    Safe beside a running job: appends do not conflict with it, and it changes no row. One at a time, though: a second compaction of
    the same table fails and changes nothing.

    Raises:
        SetupError: there is no table.
    """
    tables = [table for table in Table if table_exists(spark, storage, table)]
    if not tables:
        place = storage.catalog_schema or storage.warehouse
        raise SetupError(f"there are no tables in {place}: `halfway resolve` makes them; or is --config another job's?")
    for name, value in _CONF.items():
        spark.conf.set(name, value)
    return [_compact(spark, storage, table) for table in tables]


def _compact(spark: SparkSession, storage: StorageSettings, table: Table) -> Compaction:
    name = table_name(storage, table)
    with sole_committer(spark, storage, table):
        [metrics] = spark.sql(f"OPTIMIZE {name}").select("metrics.numFilesRemoved", "metrics.numFilesAdded").collect()
    with sole_committer(spark, storage, table):
        spark.sql(f"VACUUM {name}")
    [now] = spark.sql(f"DESCRIBE DETAIL {name}").select("numFiles", "sizeInBytes").collect()
    return Compaction(str(table), metrics[0], metrics[1], now[0], now[1])
