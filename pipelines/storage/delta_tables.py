"""The Delta tables: made at the first start, owned by one query, appended to exactly once (design §1.5, §1.6)."""

import fcntl
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from halfway.pipelines.storage.file_systems import on_local_disk
from halfway.schemas.errors import SetupError
from halfway.schemas.settings import StorageSettings
from halfway.schemas.tables import SEARCHED_COLUMNS, TABLE_SCHEMAS, Table

log = logging.getLogger(__name__)

OWNER_PROPERTY = "halfway.query_id"
_PROPERTIES = {
    # Append only, and readable by any Delta reader.
    "delta.enableDeletionVectors": "false",
    "delta.appendOnly": "true",
    # 30 days and 7 by default: with a commit a second the log would hold 2.6 million commits, all listed by each append, and each of its
    # checkpoints 600,000 names of files that a compaction took away (docs/tables.md).
    "delta.logRetentionDuration": "interval 6 hours",
    "delta.deletedFileRetentionDuration": "interval 6 hours",
    # 10 by default: a checkpoint of the log takes a few tenths of a second, and what is read instead is small files of one line each.
    "delta.checkpointInterval": "100",
}


def table_path(storage: StorageSettings, table: Table) -> str:
    """Return the folder that a table is.

    Raises:
        SetupError: if it is a catalog's table, whose folder is the catalog's business.
    """
    if storage.catalog_schema:
        raise SetupError(
            f"the tables are in the catalog, in {storage.catalog_schema}, and this reads them as folders: read them with Spark, or set "
            "storage.warehouse instead of storage.catalog_schema"
        )
    return f"{storage.warehouse.rstrip('/')}/{table}"


def table_name(storage: StorageSettings, table: Table) -> str:
    """Return how SQL calls a table, whether it is a folder or a catalog's."""
    if storage.catalog_schema:
        return ".".join(f"`{part}`" for part in (*storage.catalog_schema.split("."), table))
    return f"delta.`{table_path(storage, table)}`"


def table_exists(spark: SparkSession, storage: StorageSettings, table: Table) -> bool:
    """Whether the table has been made."""
    if storage.catalog_schema:
        return spark.catalog.tableExists(table_name(storage, table))
    return DeltaTable.isDeltaTable(spark, table_path(storage, table))


def read_table(spark: SparkSession, storage: StorageSettings, table: Table) -> DataFrame:
    """Return a table as it is now."""
    if storage.catalog_schema:
        return spark.table(table_name(storage, table))
    return spark.read.format("delta").load(table_path(storage, table))


def ends_of_halves(spark: SparkSession, storage: StorageSettings) -> dict[int, int]:
    """Return by partition of the half topic the offset after the last half that `messages` or `discarded` holds."""
    ends: dict[int, int] = {}
    for table in (Table.MESSAGES, Table.DISCARDED):
        if table_exists(spark, storage, table):
            for partition, last in read_table(spark, storage, table).groupBy("half_partition").agg(F.max("half_offset")).collect():
                ends[partition] = max(ends.get(partition, 0), last + 1)
    return ends


def owner_of(spark: SparkSession, storage: StorageSettings, table: Table) -> str | None:
    """Return the id of the query that the table belongs to, None if it is not there or nobody's."""
    if not table_exists(spark, storage, table):
        return None
    return properties_of(spark, storage, table).get(OWNER_PROPERTY)


def properties_of(spark: SparkSession, storage: StorageSettings, table: Table) -> dict[str, str]:
    """Return the properties of a table that is there."""
    # Not DESCRIBE DETAIL: that counts the table's files, which took half of the time of a start.
    return {str(name): str(value) for name, value in spark.sql(f"SHOW TBLPROPERTIES {table_name(storage, table)}").collect()}


def create_tables(spark: SparkSession, storage: StorageSettings, query_id: str) -> None:
    """Make the tables that are missing, and write down in all of them that they are this query's."""
    for table, schema in TABLE_SCHEMAS.items():
        name = table_name(storage, table)
        if table_exists(spark, storage, table):
            if owner_of(spark, storage, table) != query_id:
                spark.sql(f"ALTER TABLE {name} SET TBLPROPERTIES ({_sql_map({OWNER_PROPERTY: query_id})})")
            continue
        # SQL, because the builder of DeltaTable knows no names of three parts.
        columns = ", ".join(f"`{field.name}` {field.dataType.simpleString()}" for field in schema)
        properties = {**_PROPERTIES, OWNER_PROPERTY: query_id, "delta.dataSkippingStatsColumns": ",".join(SEARCHED_COLUMNS[table])}
        spark.sql(f"CREATE TABLE IF NOT EXISTS {name} ({columns}) USING delta TBLPROPERTIES ({_sql_map(properties)})")


def append_once(rows: DataFrame, storage: StorageSettings, table: Table, app_id: str, batch_id: int) -> None:
    """Append rows; a second append of the same application and batch is passed over by Delta."""
    writer = rows.write.format("delta").mode("append").options(txnAppId=app_id, txnVersion=str(batch_id))
    if storage.catalog_schema:
        writer.saveAsTable(table_name(storage, table))
        return
    with sole_committer(rows.sparkSession, storage, table):
        writer.save(table_path(storage, table))


def read_log_ahead(spark: SparkSession, storage: StorageSettings, table: Table) -> None:
    """Have Delta work out what the table's log says as a whole, so that the next append need not.

    To look whether its batch is in the table an append reads all of the log, in three stages: 0.25 to 0.5 s in which it does nothing else.
    Delta keeps what it found for as long as nobody commits; of the public statements this one asks for it.
    """
    spark.sql(f"DESCRIBE DETAIL {table_name(storage, table)}").collect()


def local_warehouse(spark: SparkSession, storage: StorageSettings) -> Path | None:
    """Return the folder on this machine's disk that the tables are in, None if they are elsewhere."""
    return None if storage.catalog_schema else on_local_disk(spark, storage.warehouse)


@contextmanager
def sole_committer(spark: SparkSession, storage: StorageSettings, table: Table) -> Iterator[None]:
    """Wait until no other process of ours commits to a table on this machine's disk, and keep it so.

    A commit is a file that must not be there before: object stores and HDFS refuse the second of two, and a local disk, where Delta looks
    and then renames, would let it take the first one's place, rows and all. Kept by the kernel until the process ends, however it does.
    """
    folder = local_warehouse(spark, storage)
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{table}.lock").open("a") as lock:
        try:
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("event=table_in_use table=%s effect=waiting", table)
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
        yield


def _sql_map(properties: Mapping[str, str]) -> str:
    return ", ".join(f"'{key}' = '{value}'" for key, value in properties.items())
