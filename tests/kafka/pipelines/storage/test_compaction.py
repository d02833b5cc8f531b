"""`halfway optimize` beside a running job: no append fails, and each commit stays exactly one row."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from halfway.conf.loader import load_settings
from halfway.pipelines.resolve.job import ResolveJob
from halfway.pipelines.resolve.report import BatchReport
from halfway.pipelines.storage.compaction import Compaction, compact_tables, vacuum_at_once
from halfway.pipelines.storage.delta_tables import append_once, claim_tables, read_table, table_name
from halfway.schemas.errors import SetupError
from halfway.schemas.tables import TABLE_SCHEMAS, Table
from tests.support.commands import run_halfway
from tests.support.job_world import MakeWorld
from tests.support.waiting import until


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_the_job_goes_on_during_a_compaction(world: MakeWorld, spark: SparkSession) -> None:
    w = world(**{"trigger.available_now": False, "trigger.interval": 0})
    reports: list[BatchReport] = []
    failures: list[BaseException] = []
    job = ResolveJob(w.settings, on_batch=reports.append)

    def run() -> None:
        try:
            job.run(lambda: spark)
        except BaseException as error:
            failures.append(error)

    def send(number: int) -> None:
        w.half(f"t{number}", number)
        w.op(f"t{number}", b"COMMIT", number)
        w.tick(number)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        send(0)
        until(lambda: bool(failures or reports), "the first batch")
        stop = threading.Event()
        compactions: list[list[Compaction]] = []

        def compact() -> None:
            try:
                while not stop.is_set():
                    compactions.append(compact_tables(spark, w.settings.storage))
            except BaseException as error:
                failures.append(error)

        compactor = threading.Thread(target=compact)
        compactor.start()
        number = 0
        while not failures and (number < 10 or len(compactions) < 2):
            number += 1
            before = len(reports)
            send(number)
            until(lambda before=before: bool(failures) or len(reports) > before, "a batch")  # type: ignore[misc]
        stop.set()
        compactor.join()
    finally:
        job.stop()
        thread.join()
    assert not failures, failures[0]
    w.resolve(w.settings.model_copy(update={"trigger": w.settings.trigger.model_copy(update={"available_now": True})}))
    assert sorted(w.by_id(Table.MESSAGES)) == sorted(f"t{n}" for n in range(number + 1))
    history = spark.sql(f"DESCRIBE HISTORY {table_name(w.settings.storage, Table.MESSAGES)}").orderBy("version").collect()
    done = [row["operation"] for row in history if row["operation"] in ("WRITE", "OPTIMIZE")]
    assert "OPTIMIZE" in done[: len(done) - done[::-1].index("WRITE")], "no compaction came between two appends"


@pytest.mark.timeout(200)
@pytest.mark.long
def test_the_command_prints_its_figures(spark: SparkSession, tmp_path: Path) -> None:
    warehouse = str(tmp_path / "warehouse")
    claim_tables(spark, load_settings(environ={}, overrides={"storage.warehouse": warehouse}).storage, "query")
    done = run_halfway("optimize", "--set", f"storage.warehouse={warehouse}", "--json", limit_s=150)
    assert done.returncode == 0, done.stderr[-2000:]
    nothing = {"files_removed": 0, "files_added": 0, "files": 0, "bytes": 0, "log_files_removed": 0}
    assert json.loads(done.stdout) == [{"table": str(table), **nothing} for table in Table]


@pytest.mark.long
def test_a_vacuum_prints_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """Delta prints a line for each table, on the console of the JVM."""
    storage = load_settings(environ={}, overrides={"storage.warehouse": str(tmp_path)}).storage
    claim_tables(spark, storage, "query")
    jvm: Any = spark._jvm
    printed = jvm.java.io.ByteArrayOutputStream()
    console = getattr(getattr(jvm.scala, "Console$"), "MODULE$")
    before = console.out()
    console.setOutDirect(jvm.java.io.PrintStream(printed))
    try:
        compact_tables(spark, storage)
        vacuum_at_once(spark, storage, Table.MESSAGES)
        assert printed.toString() == ""
        spark.sql(f"VACUUM {table_name(storage, Table.MESSAGES)}")
        assert "Deleted 0 files" in printed.toString(), "what is silenced, and that it is silenced no more"
    finally:
        console.setOutDirect(before)


@pytest.mark.long
@pytest.mark.parametrize(("kept", "first"), [("6 hours", 0), ("interval 0 seconds", 10)])
def test_old_log_files_are_deleted_and_the_table_stays_whole(spark: SparkSession, tmp_path: Path, kept: str, first: int) -> None:
    storage = load_settings(environ={}, overrides={"storage.warehouse": str(tmp_path)}).storage
    claim_tables(spark, storage, "query")
    name = table_name(storage, Table.DISCARDED)
    both = ", ".join(f"'delta.{what}RetentionDuration' = '{kept}'" for what in ("log", "deletedFile"))
    spark.sql(f"ALTER TABLE {name} SET TBLPROPERTIES ('delta.checkpointInterval' = '10', {both})")
    for batch_id in range(12):
        append_once(spark.createDataFrame([], TABLE_SCHEMAS[Table.DISCARDED]), storage, Table.DISCARDED, "a", batch_id)
    log = tmp_path / "discarded" / "_delta_log"
    [compaction] = [done for done in compact_tables(spark, storage) if done.table == Table.DISCARDED]
    last = DeltaTable(str(tmp_path / "discarded")).version()
    assert compaction.log_files_removed > 10
    assert sorted(int(path.stem) for path in log.glob("*.json")) == list(range(first, last + 1))
    assert {int(path.name[:20]) for path in log.glob("[0-9]*.crc")} == set(range(10, last + 1))
    DeltaLog = spark.sparkContext._jvm.org.apache.spark.sql.delta.DeltaLog  # noqa: N806  # a class of Delta's
    DeltaLog.clearCache()
    assert read_table(spark, storage, Table.DISCARDED).count() == 0
    append_once(spark.createDataFrame([], TABLE_SCHEMAS[Table.DISCARDED]), storage, Table.DISCARDED, "a", 11)
    assert DeltaTable(str(tmp_path / "discarded")).version() == last, "the log still knows its last batch"


def test_without_tables_the_error_names_the_folder(spark: SparkSession, tmp_path: Path) -> None:
    storage = load_settings(environ={}, overrides={"storage.warehouse": str(tmp_path)}).storage
    with pytest.raises(SetupError, match=f"no tables in {tmp_path}: `halfway resolve` creates them"):
        compact_tables(spark, storage)
