"""Compacts the tables' small files while the job keeps appending (docs/tables.md)."""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from halfway.pipelines.storage.delta_tables import local_warehouse, property_ms, table_exists, table_name
from halfway.pipelines.storage.locks import commit_lock
from halfway.schemas.errors import SetupError
from halfway.schemas.settings import StorageSettings
from halfway.schemas.tables import Table

_OF_VERSION = re.compile(r"\.?(\d{20})\.")
_CONF = {
    # VACUUM lists a table's single folder in this many tasks. The default of 10,000 wastes 20 s on two cores.
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "8",
    # OPTIMIZE leaves larger files alone. With the default of 1 GiB, each run would rewrite up to 1 GiB to add an hour's
    # few MiB.
    "spark.databricks.delta.optimize.maxFileSize": str(256 * 1024 * 1024),
    "spark.databricks.delta.optimize.minFileSize": str(128 * 1024 * 1024),
}


@dataclass(frozen=True)
class Compaction:
    """What a compaction did to one table. `files_added` replace `files_removed`."""

    table: str
    files_removed: int
    files_added: int
    files: int
    """The number of files that the table has now."""
    bytes: int
    log_files_removed: int = 0
    """Files deleted from the table's log, on a local disk."""


def compact_tables(spark: SparkSession, storage: StorageSettings, say: Callable[[str], None] = lambda _: None) -> list[Compaction]:
    """Compact each table; delete files that were replaced more than 6 hours ago, and old files of the table's log.

    Safe while the job runs, not on S3 (docs/cluster.md): a compaction does not conflict with appends, and changes no
    row. A second compaction of the same table at the same time waits on a local disk, or fails and changes nothing.

    Args:
        spark: the session.
        storage: where the tables are.
        say: told which table is next: a large one takes minutes.

    Raises:
        SetupError: there is no table.
    """
    tables = [table for table in Table if table_exists(spark, storage, table)]
    if not tables:
        place = storage.catalog_schema or storage.warehouse
        raise SetupError(f"there are no tables in {place}: `halfway resolve` creates them; or is --config another job's?")
    _configure(spark)
    done = []
    for table in tables:
        say(f"compacting {table_name(storage, table)} ...")
        done.append(_compact(spark, storage, table))
    return done


def _configure(spark: SparkSession) -> None:
    for name, value in _CONF.items():
        spark.conf.set(name, value)


def verify_vacuum_possible(spark: SparkSession, storage: StorageSettings) -> None:
    """Refuse to delete replaced files at once where nothing keeps the job from appending meanwhile.

    Raises:
        SetupError: the tables are not on a local disk.
    """
    if local_warehouse(spark, storage) is None:
        raise SetupError(
            "--vacuum needs tables on a local disk, where the job waits: elsewhere it could delete what the job is writing. Leave it out; "
            "`halfway optimize` deletes the files after 6 hours, or stop the job and run VACUUM … RETAIN 0 HOURS yourself"
        )


def vacuum_at_once(spark: SparkSession, storage: StorageSettings, table: Table) -> None:
    """Delete all files of a table on a local disk that are no part of it. Readers that use them fail.

    The lock keeps the job from writing files meanwhile that are no part of the table yet.
    """
    _configure(spark)
    check = "spark.databricks.delta.retentionDurationCheck.enabled"
    with commit_lock(local_warehouse(spark, storage), table), _silent_vacuum(spark):
        spark.conf.set(check, "false")
        try:
            spark.sql(f"VACUUM {table_name(storage, table)} RETAIN 0 HOURS")
        finally:
            spark.conf.unset(check)


@contextmanager
def _silent_vacuum(spark: SparkSession) -> Iterator[None]:
    """Drop what VACUUM prints on the console, and not as a log: how many files it has deleted."""
    jvm: Any = spark._jvm
    console = getattr(getattr(jvm.scala, "Console$"), "MODULE$")
    before = console.out()
    console.setOutDirect(jvm.java.io.PrintStream(jvm.java.io.OutputStream.nullOutputStream()))
    try:
        yield
    finally:
        console.setOutDirect(before)


def _compact(spark: SparkSession, storage: StorageSettings, table: Table) -> Compaction:
    name = table_name(storage, table)
    with commit_lock(local_warehouse(spark, storage), table):
        [metrics] = spark.sql(f"OPTIMIZE {name}").select("metrics.numFilesRemoved", "metrics.numFilesAdded").collect()
    with commit_lock(local_warehouse(spark, storage), table), _silent_vacuum(spark):
        spark.sql(f"VACUUM {name}")
    [now] = spark.sql(f"DESCRIBE DETAIL {name}").select("numFiles", "sizeInBytes").collect()
    return Compaction(str(table), metrics[0], metrics[1], now[0], now[1], _clean_log(spark, storage, table))


def _clean_log(spark: SparkSession, storage: StorageSettings, table: Table) -> int:
    """Delete expired files of a log on a local disk; return their number.

    Each append lists the whole log, four files a commit. After a day with a commit a second this takes seconds. Delta's
    own cleanup goes by whole days. This one follows Delta's protocol ("Metadata Cleanup"): it deletes the commits older
    than `delta.logRetentionDuration` before the last checkpoint of that age, and all checksums of versions before the
    last checkpoint, which no reader needs.
    """
    folder = local_warehouse(spark, storage)
    if folder is None:
        return 0
    with commit_lock(folder, table):
        files = list(_log_files(folder / table / "_delta_log"))
        checkpoints = [file for file in files if file.path.name.endswith(".checkpoint.parquet") and _is_whole(file.path)]
        kept_ms = property_ms(spark, storage, table, "delta.logRetentionDuration", "interval 30 days")
        keep_since_ms = time.time_ns() // 1_000_000 - kept_ms
        last = max((checkpoint.version for checkpoint in checkpoints), default=0)
        first_kept = max((checkpoint.version for checkpoint in checkpoints if checkpoint.at_ms < keep_since_ms), default=0)
        old = [file for file in files if file.version < first_kept or (file.version < last and file.path.suffix == ".crc")]
        for file in old:
            file.path.unlink(missing_ok=True)
    return len(old)


def _is_whole(checkpoint: Path) -> bool:
    """Return True if a checkpoint of the log can be read: a power cut may have torn it."""
    try:
        return bool(pq.read_metadata(checkpoint).num_rows)
    except (OSError, ValueError):
        return False


class _LogFile(NamedTuple):
    version: int
    path: Path
    at_ms: int


def _log_files(folder: Path) -> Iterator[_LogFile]:
    """Yield the files of the log's versions, with Hadoop's hidden checksum files."""
    for entry in os.scandir(folder):
        if found := _OF_VERSION.match(entry.name):
            yield _LogFile(int(found[1]), Path(entry.path), entry.stat().st_mtime_ns // 1_000_000)
