"""Few large files instead of many small ones, for readers' sake, while the job goes on appending (docs/tables.md)."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pyspark.sql import SparkSession

from halfway.pipelines.storage.delta_tables import local_warehouse, properties_of, table_exists, table_name
from halfway.pipelines.storage.locks import commit_lock
from halfway.schemas.errors import SetupError
from halfway.schemas.settings import StorageSettings
from halfway.schemas.tables import Table

_OF_VERSION = re.compile(r"\.?(\d{20})\.")
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
    log_files_removed: int = 0
    """Of its log, on a local disk."""


def compact_tables(spark: SparkSession, storage: StorageSettings) -> list[Compaction]:
    """Compact each table, and delete what compactions have replaced longer ago than the table keeps it (6 hours), and old files of its log.

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
    with commit_lock(local_warehouse(spark, storage), table):
        [metrics] = spark.sql(f"OPTIMIZE {name}").select("metrics.numFilesRemoved", "metrics.numFilesAdded").collect()
    with commit_lock(local_warehouse(spark, storage), table):
        spark.sql(f"VACUUM {name}")
    [now] = spark.sql(f"DESCRIBE DETAIL {name}").select("numFiles", "sizeInBytes").collect()
    return Compaction(str(table), metrics[0], metrics[1], now[0], now[1], _clean_log(spark, storage, table))


def _clean_log(spark: SparkSession, storage: StorageSettings, table: Table) -> int:
    """Delete what a log on a local disk keeps no longer; return how many files.

    Each append lists the whole log, four files a commit: after a day of commits a second it would take seconds longer. Delta's own
    cleanup goes by whole days. This one follows Delta's protocol ("Metadata Cleanup"): of commits that are older than
    `delta.logRetentionDuration`, what comes before the last checkpoint of that age; and, whatever their age, checksums of versions
    before the last checkpoint, which nobody needs.
    """
    folder = local_warehouse(spark, storage)
    if folder is None:
        return 0
    with commit_lock(local_warehouse(spark, storage), table):
        files = list(_log_files(folder / table / "_delta_log"))
        checkpoints = [file for file in files if file.path.name.endswith(".checkpoint.parquet")]
        keep_since_ms = _kept_since_ms(spark, storage, table)
        last = max((checkpoint.version for checkpoint in checkpoints), default=0)
        first_kept = max((checkpoint.version for checkpoint in checkpoints if checkpoint.at_ms < keep_since_ms), default=0)
        old = [file for file in files if file.version < first_kept or (file.version < last and file.path.suffix == ".crc")]
        for file in old:
            file.path.unlink(missing_ok=True)
    return len(old)


def _kept_since_ms(spark: SparkSession, storage: StorageSettings, table: Table) -> int:
    kept = properties_of(spark, storage, table).get("delta.logRetentionDuration", "interval 30 days")
    [since_ms] = spark.sql(f"SELECT unix_millis(current_timestamp() - {kept})").collect()[0]
    return int(since_ms)


class _LogFile(NamedTuple):
    version: int
    path: Path
    at_ms: int


def _log_files(folder: Path) -> Iterator[_LogFile]:
    """Return the files of a version; Hadoop's checksum of a file is hidden beside it."""
    for entry in os.scandir(folder):
        if found := _OF_VERSION.match(entry.name):
            yield _LogFile(int(found[1]), Path(entry.path), entry.stat().st_mtime_ns // 1_000_000)
