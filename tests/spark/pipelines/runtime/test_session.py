"""The local Spark session: its class archive, and the Python workers that start before they are needed."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from halfway.pipelines.resolve.warm_up import start_workers
from halfway.pipelines.runtime.jars import class_archive, use_archive
from halfway.pipelines.runtime.java import find_java
from halfway.pipelines.runtime.session import spark_errors
from halfway.schemas.errors import SparkFailedError
from halfway.schemas.tables import Table
from tests.support.paths import ROOT
from tests.support.waiting import until

START = """
from halfway.conf.loader import load_settings
from halfway.pipelines.runtime.session import spark_session
from halfway.pipelines.runtime.signals import ended_by_signals
with ended_by_signals():
    spark_session(load_settings(environ={}), small=True)
"""

INTERRUPTED = """
import os, signal, sys, threading
import pyspark.sql
from pyspark import SparkContext
from halfway.__main__ import main
from halfway.pipelines.resolve.job import ResolveJob

ResolveJob.run = lambda self, session: session()
made, after = sys.argv.pop(1), {"context": SparkContext, "session": pyspark.sql.SparkSession}
init = after[made].__init__

def interrupted(self, *args, **kwargs):
    init(self, *args, **kwargs)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    SparkContext._jvm.java.lang.Thread.sleep(30_000)

after[made].__init__ = interrupted
main()
"""
"""A command whose Ctrl-C comes while Python waits for an answer of the JVM, after the context or session was made."""


def in_session_of(process: "subprocess.Popen[bytes] | subprocess.Popen[str]") -> list[str]:
    listed = subprocess.run(["ps", "-eo", "sid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    found = [line.split(None, 2) for line in listed.splitlines()]
    return [command for session, state, command in found if int(session) == process.pid and not state.startswith("Z")]


def test_a_launch_that_is_interrupted_leaves_no_jvm() -> None:
    """PySpark itself leaves one for ever: it removes the folder in which the JVM is to write its port."""
    process = subprocess.Popen([sys.executable, "-c", START], stderr=subprocess.DEVNULL, start_new_session=True)
    until(lambda: len(in_session_of(process)) > 1, "the launch")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    until(lambda: in_session_of(process) == [], "the end of the JVM", 60)


@pytest.mark.parametrize("made", ["context", "session"])
@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("optimize", -signal.SIGINT, ["starting Spark to compact the tables ..."]),
        ("resolve", 130, ["event=spark_starting", "ended while it started"]),
    ],
)
def test_ctrl_c_after_the_launch_is_the_commands_own(made: str, command: str, code: int, said: list[str], tmp_path: Path) -> None:
    places = [part for name in ("warehouse", "checkpoint") for part in ("--set", f"storage.{name}={tmp_path / name}")]
    (tmp_path / "warehouse" / Table.MESSAGES / "_delta_log").mkdir(parents=True)  # `optimize` asks for it before it starts
    arguments = [made, command, *places, "--set", "kafka.bootstrap_servers=127.0.0.1:1"]
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED, *arguments], stderr=subprocess.PIPE, start_new_session=True, text=True)
    told = process.communicate(timeout=120)[1]
    assert process.returncode == code, told
    lines = [line for line in told.splitlines() if "incubator" not in line]
    assert [re.sub(r"^.* level=INFO |:.*", "", line) for line in lines] == said
    until(lambda: in_session_of(process) == [], "the end of the JVM", 60)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_the_jvm_starts_from_the_class_archive(spark: SparkSession) -> None:
    archive = class_archive(find_java())
    assert archive.is_file(), "run `make jars`"
    jvm = spark.sparkContext._gateway.proc.pid
    assert archive.name in Path(f"/proc/{jvm}/maps").read_text()


def test_a_class_archive_that_does_not_fit_is_ignored_silently(tmp_path: Path) -> None:
    java = find_java()
    broken = tmp_path / "classes.jsa"
    broken.write_bytes(b"no archive")
    options = use_archive(broken)
    plain, with_archive = (
        subprocess.run([str(java), *more, "-version"], capture_output=True, text=True, timeout=60, check=True) for more in ([], options)
    )
    assert f"-XX:SharedArchiveFile={broken}" in options
    told = with_archive.stdout + with_archive.stderr
    assert re.sub(r", sharing\)", ")", told) == re.sub(r", sharing\)", ")", plain.stdout + plain.stderr)


def test_spark_says_little_at_its_start_and_in_the_form_of_the_job(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(
        "from halfway.conf.loader import load_settings\n"
        "from halfway.pipelines.runtime.session import spark_session\n"
        "spark = spark_session(load_settings(environ={}), small=True)\n"
        "log4j = spark._jvm.org.apache.logging.log4j.LogManager\n"
        "for name in ('org.apache.spark.Any', 'org.apache.spark.sql.execution.streaming.runtime.ProcessingTimeExecutor'):\n"
        "    log4j.getLogger(name).warn('a warning')\n"
        "log4j.getLogger('org.apache.spark.Any').warn('Stage 1 contains a task of very large size (1 KiB)')\n"
        "log4j.getLogger('org.apache.spark.Any').warn('Reading snapshot ...Note that this is normal for the first batch of a query.')\n"
        "for _ in range(50):\n"
        "    log4j.getLogger('org.apache.kafka.clients.NetworkClient').warn('away')\n"
        "spark.stop()\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=True, cwd=ROOT)
    # The JVM itself says that Spark's launcher asks for an incubator module.
    lines = [line for line in done.stderr.splitlines() if "incubator" not in line]
    assert [line.partition(" level=")[2] for line in lines] == ["WARNING logger=Any a warning", *["WARNING logger=NetworkClient away"] * 2]
    assert done.stdout == ""


def test_the_driver_answers_nobody_without_its_secret(spark: SparkSession) -> None:
    """It listens on loopback, where other users of the machine can connect."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    manager = jvm.org.apache.spark.SparkEnv.get().securityManager()
    assert manager.isAuthenticationEnabled()
    assert len(manager.getSecretKey()) >= 32
    assert "spark.authenticate.secret" not in dict(spark.sparkContext.getConf().getAll())


def test_started_workers_have_imported_what_the_job_needs(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    # Another environment has workers of its own: those of the tests before have imported what they needed.
    monkeypatch.setitem(spark.sparkContext.environment, "HALFWAY_TEST_WORKERS", "new")
    start_workers(spark)
    found = spark.range(0, 1, 1, 1).mapInArrow(_imported, "name string").collect()
    assert {row[0] for row in found} >= {"pandas", "halfway.pipelines.resolve.read_back", "halfway.transforms.operator"}


def _imported(batches):  # type: ignore[no-untyped-def]  # cloudpickled: an annotation would make the workers import its module
    import pyarrow as pa

    del batches
    names = [name for name in ("pandas", "halfway.pipelines.resolve.read_back", "halfway.transforms.operator") if name in sys.modules]
    yield pa.RecordBatch.from_arrays([pa.array(names)], names=["name"])


def test_an_error_of_a_store_is_one_line_and_a_defect_keeps_what_spark_says(spark: SparkSession) -> None:
    """Without `spark_errors`, and after the JVM has ended, it would be pages of Java or nothing at all."""
    with pytest.raises(SparkFailedError, match=r"^Spark has failed: .*nowhere[^\n]*$"), spark_errors():
        spark.read.format("delta").load("nowhere://bucket/table").collect()
    with pytest.raises(AnalysisException), spark_errors():
        spark.range(1).select("no_such_column")
