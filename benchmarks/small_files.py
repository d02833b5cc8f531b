"""Benchmark of a table that grows by small batches: `python -m benchmarks.small_files [growth|tombstones ...]`.

The table is made by `claim_tables` and measured with `append_once`, as in the job. To be quick, delta-rs makes the
commits between two measurements, with the same rows in files and commits of the same kind.
"""

import json
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from rich.console import Console

from benchmarks.rig import Figures, timed
from halfway.conf.loader import load_settings
from halfway.pipelines.runtime.session import spark_session
from halfway.pipelines.storage.compaction import compact_tables
from halfway.pipelines.storage.delta_tables import append_once, claim_tables, read_table, table_path
from halfway.schemas.settings import StorageSettings
from halfway.schemas.tables import MESSAGES_SCHEMA, Table

ROWS = 20
"""The number of messages in one batch, of 1 KiB each."""
MARKS = (0, 100, 600, 1_800, 3_600)
MEASURED = 20


def batch(number: int) -> pa.Table:
    """Return the rows of one batch."""
    now = datetime.now(UTC)
    row = {
        "topic": "orders", "queue_id": 0, "tags": "TagA", "keys": "k", "properties": [("trace", "abc")], "producer_group": "bench",
        "born_at": now, "half_at": now, "committed_at": now, "check_times": 0, "incarnation": 0, "half_partition": 0, "epoch": 0,
        "batch_id": number,
    }  # fmt: skip
    rows = [
        {**row, "transaction_id": uuid.uuid4().hex, "body": os.urandom(1024), "half_offset": number * ROWS + offset}
        for offset in range(ROWS)
    ]
    return pa.Table.from_pylist(rows, schema=to_arrow_schema(MESSAGES_SCHEMA, timezone="UTC"))


class SmallBatches:
    """A `messages` table that grows by small batches."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        """Create the tables in `folder`."""
        self.spark = spark
        self.storage: StorageSettings = load_settings(environ={}, overrides={"storage.warehouse": str(folder)}).storage
        claim_tables(spark, self.storage, "bench")
        self.path = table_path(self.storage, Table.MESSAGES)
        self.batches = 0

    def append(self, times: int) -> list[float]:
        """Append batches as the job does. Return the seconds of each."""
        seconds = []
        for _ in range(times):
            frame = self.spark.createDataFrame(batch(self.batches)).coalesce(1)
            seconds.append(timed(partial(append_once, frame, self.storage, Table.MESSAGES, "bench", self.batches)))
            self.batches += 1
        return seconds

    def grow(self, batches: int) -> None:
        """Append with delta-rs until the table has `batches` batches."""
        table = DeltaTable(self.path)
        while self.batches < batches:
            write_deltalake(table, batch(self.batches), mode="append")
            self.batches += 1

    def read(self) -> Figures:
        """Measure a read of the whole table by Spark and by delta-rs, the quicker of two each."""
        query = "SELECT topic, count(*), max(body) FROM messages GROUP BY topic"

        def by_spark() -> None:
            read_table(self.spark, self.storage, Table.MESSAGES).createOrReplaceTempView("messages")
            assert self.spark.sql(query).collect()[0][1] == self.batches * ROWS

        def by_delta_rs() -> None:
            found = QueryBuilder().register("messages", DeltaTable(self.path)).execute(query)
            assert pa.table(found.read_all())[1][0].as_py() == self.batches * ROWS

        return {
            "files": len(DeltaTable(self.path).file_uris()),
            "log_files": len(list(Path(self.path, "_delta_log").glob("*"))),
            "read_spark_s": round(min(timed(by_spark) for _ in range(2)), 2),
            "read_delta_rs_s": round(min(timed(by_delta_rs) for _ in range(2)), 2),
        }


def append_figures(seconds: list[float]) -> Figures:
    """Return the median and the longest time of appends."""
    return {"append_s_median": round(statistics.median(seconds), 3), "append_s_max": round(max(seconds), 3)}


def growth(spark: SparkSession, folder: Path) -> Iterator[Figures]:
    """Measure appends and reads while the table grows to an hour of batches, and after a compaction."""
    table = SmallBatches(spark, folder)
    table.append(MEASURED)  # a warm-up
    for mark in MARKS:
        table.grow(mark)
        yield {"batches": table.batches, **append_figures(table.append(MEASURED)), **table.read()}
    seconds = timed(lambda: compact_tables(spark, table.storage))
    after = {"optimize_s": round(seconds, 1), **append_figures(table.append(MEASURED)), **table.read()}
    yield {"batches": table.batches, **after}


def tombstones(spark: SparkSession, folder: Path) -> Iterator[Figures]:
    """Measure appends to a log with the removed files of a day's compactions, and of a week's.

    The job's tables keep removed files in the log for 6 hours, Delta by default for a week.
    """
    for name, removed in (("none", 0), ("a day", 86_400), ("a week", 604_800)):
        table = SmallBatches(spark, folder / name.replace(" ", "-"))
        table.append(3)
        _add_and_remove(Path(table.path), removed)
        table.append(10)
        yield {"removed_in_log": name, "removed": removed, **append_figures(table.append(MEASURED))}


def _add_and_remove(table: Path, files: int) -> None:
    """Write two commits: one adds `files` files, the other removes them. No reader opens them, so they do not exist."""
    now_ms = time.time_ns() // 1_000_000
    version = DeltaTable(str(table)).version()
    names = [f"part-00000-{uuid.uuid4()}-c000.snappy.parquet" for _ in range(files)]
    place = {"partitionValues": {}, "size": 25_000}
    adds = [{"add": {"path": name, "modificationTime": now_ms, "dataChange": True, **place}} for name in names]
    gone = {"deletionTimestamp": now_ms, "dataChange": False, "extendedFileMetadata": True, **place}
    removes = [{"remove": {"path": name, **gone}} for name in names]
    for number, actions in enumerate((adds, removes), start=1):
        info = {"commitInfo": {"timestamp": now_ms, "operation": "OPTIMIZE", "operationParameters": {}}}
        text = "\n".join(json.dumps(action, separators=(",", ":")) for action in (info, *actions))
        (table / "_delta_log" / f"{version + number:020d}.json").write_text(text)


BENCHMARKS = {"growth": growth, "tombstones": tombstones}


def main(names: list[str]) -> None:
    """Run the named parts, or all, and print a line for each measurement."""
    spark = spark_session(load_settings(environ={}, overrides={"state.shuffle_partitions": 2}))
    console = Console(width=200)
    with tempfile.TemporaryDirectory() as folder:
        for name in names or BENCHMARKS:
            for figures in BENCHMARKS[name](spark, Path(folder) / name):
                console.print(f"{name}: " + " ".join(f"{key}={value}" for key, value in figures.items()))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
