"""What all benchmarks use: a broker, topics and tables for each, and the job in this process or as a command."""

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pyarrow
import pyarrow.parquet
from pyspark.sql import SparkSession

from benchmarks.cpu import core_seconds
from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.pipelines.local.broker import LocalBroker
from halfway.pipelines.local.processes import end_process
from halfway.pipelines.resolve.job import ResolveJob
from halfway.pipelines.resolve.report import BatchReport
from halfway.pipelines.runtime.session import spark_session
from halfway.pipelines.storage.manifest import STATUS_FILE
from halfway.schemas.outcomes import Count
from halfway.schemas.settings import Settings
from tests.support.commands import as_options
from tests.support.delta_rows import delta_rows
from tests.support.waiting import until

Figures = dict[str, Any]
PARTITIONS = 4
LONG_S = 600.0
"""The time limit for what a benchmark waits for."""
_STOP_S = 120.0
"""The time that a benchmark or the job has to stop its own processes, before it is killed."""
ROOT = Path(__file__).parents[1]
_SETTINGS: dict[str, object] = {
    "state.buckets": 16,
    "state.shuffle_partitions": int(os.environ.get("HALFWAY_BENCH_TASKS", "2")),
    # Checks do not disturb a benchmark, except those of `checkback`.
    "resolution.transactionTimeOut": "12h",
}


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    began_s = time.monotonic()
    action()
    return time.monotonic() - began_s


@dataclass
class Batches:
    """The batches of a job: what each did, when it ended, and how much memory and core-seconds were used by then."""

    broker_pid: int
    reports: list[BatchReport] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    memory_mib: list[dict[str, int]] = field(default_factory=list)
    core_s: list[dict[str, float]] = field(default_factory=list)
    """One more than batches: the first is from before them."""

    def __post_init__(self) -> None:
        """Record the core-seconds before the first batch."""
        self._record_core_s()

    def _record_core_s(self) -> None:
        broker = core_seconds(self.broker_pid)
        # The broker is a child of this process, which runs the job.
        self.core_s.append({"broker": broker, "job": core_seconds(os.getpid()) - broker})

    def __call__(self, report: BatchReport) -> None:
        """Record a batch."""
        self.reports.append(report)
        self.ended.append(time.monotonic())
        self.memory_mib.append(memory_mib())
        self._record_core_s()

    def events(self, number: int) -> int:
        """Return the number of halves and ops of a batch."""
        counts = self.reports[number].counts
        return counts[Count.HALVES] + counts[Count.OPS]

    def count(self, what: Count) -> int:
        """Return the sum of a count over all batches."""
        return sum(report.counts[what] for report in list(self.reports))

    def reach(self, what: Count, wanted: int) -> None:
        """Wait until the sum of a count over all batches reaches `wanted`."""
        until(lambda: self.count(what) >= wanted, f"{wanted} {what}", LONG_S)


class Rig:
    """A broker, and a Spark session that starts at its first use; `with` ends both."""

    def __init__(self, folder: Path, scale: float) -> None:
        """Keep everything in `folder`; `scale` is the fraction of the usual amounts."""
        self.folder, self.scale = folder, scale
        self._broker = LocalBroker(folder / "broker")
        self._spark: SparkSession | None = None
        self._made = 0
        self.ui = False
        """Set to True before the first use of Spark, to serve its UI with the stages."""

    def __enter__(self) -> Self:
        """Start the broker."""
        self._broker.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop what was started."""
        try:
            if self._spark is not None:
                self._spark.stop()
        finally:
            self._broker.stop()

    @property
    def broker_pid(self) -> int:
        """Return the id of the broker's process."""
        pid = self._broker.pid()
        if pid is None:
            raise RuntimeError("the broker is not running")
        return pid

    @property
    def spark(self) -> SparkSession:
        """Return the Spark session of this process, and start it at the first use."""
        if self._spark is None:
            self._spark = spark_session(load_settings(environ={}, overrides=_SETTINGS), ui=self.ui)
        return self._spark

    def settings(self, name: str, overrides: Mapping[str, object] | None = None, partitions: int = PARTITIONS) -> Settings:
        """Create topics of `partitions` each, and return settings with them and with new tables."""
        self._made += 1
        name = f"{name}{self._made}"
        settings = load_settings(environ={}, overrides={**self._own(name), **_SETTINGS, **(overrides or {})})
        create_topics(settings, partitions)
        return settings

    def _own(self, name: str) -> dict[str, object]:
        return {
            "kafka.bootstrap_servers": self._broker.status()["bootstrap_servers"],
            **{f"kafka.{kind}_topic": f"{name}.{kind}" for kind in ("half", "op", "check")},
            "storage.warehouse": str(self.folder / name / "warehouse"),
            "storage.checkpoint": str(self.folder / name / "checkpoint"),
        }

    def amount(self, usual: int) -> int:
        """Return the usual amount at this run's scale."""
        return max(100, int(usual * self.scale))

    def seconds(self, usual: float) -> float:
        """Return the usual time of traffic at this run's scale."""
        return max(1.0, usual * self.scale)

    def drain(self, settings: Settings) -> tuple[Batches, list[float]]:
        """Run the job until the backlog is done. Return its batches, and the seconds of each."""
        batches, started = Batches(self.broker_pid), time.monotonic()
        trigger = settings.trigger.model_copy(update={"available_now": True})
        ResolveJob(settings.model_copy(update={"trigger": trigger}), on_batch=batches).run(lambda: self.spark)
        starts = [started, *batches.ended]
        return batches, [end - start for start, end in zip(starts, batches.ended, strict=False)]

    @contextmanager
    def job(self, settings: Settings) -> Iterator[Batches]:
        """Run the job in a thread, and yield its batches after the first three.

        If the job fails, its error is raised at the end of the block.
        """
        batches, failures = Batches(self.broker_pid), []
        job = ResolveJob(settings, on_batch=batches)

        def run() -> None:
            try:
                job.run(lambda: self.spark)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            until(lambda: bool(failures) or len(batches.reports) >= 3, "the first batches", LONG_S)
            yield batches
        finally:
            job.stop()
            thread.join()
        if failures:
            raise failures[0]


def options_of(settings: Settings) -> list[str]:
    """Return the settings of a benchmark as options of a command."""
    values = {
        "kafka.bootstrap_servers": settings.kafka.bootstrap_servers,
        **{f"kafka.{kind}_topic": getattr(settings.kafka, f"{kind}_topic") for kind in ("half", "op", "check")},
        "storage.warehouse": settings.storage.warehouse,
        "storage.checkpoint": settings.storage.checkpoint,
        "state.buckets": settings.state.buckets,
        "state.shuffle_partitions": settings.state.shuffle_partitions,
        "resolution.transactionTimeOut": settings.resolution.transactionTimeOut,
    }
    return as_options(values)


def in_own_process(name: str, scale: float, environ: Mapping[str, str] | None = None) -> Figures:
    """Run one benchmark in its own process, so that no benchmark profits from or suffers from an earlier one."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        run_to_end([sys.executable, "-m", "benchmarks.run_one", name, str(scale), str(out)], environ)
        figures: Figures = json.loads(out.read_text())
    return figures


def run_to_end(command: Sequence[str], environ: Mapping[str, str] | None = None, *, captured: bool = False) -> str:
    """Run a command, and return what it printed if that is `captured`. An error or a signal here ends it too.

    Raises:
        RuntimeError: it failed.
    """
    out, err = (subprocess.PIPE, subprocess.STDOUT) if captured else (None, None)
    environ = {**os.environ, **(environ or {})}
    # In its own session Ctrl-C does not reach it, so that it gets one signal only and can stop its own processes.
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environ, start_new_session=True
    ) as process:
        try:
            printed = (process.communicate()[0] or b"").decode()
        finally:
            if process.poll() is None:
                end_process(process.pid, process, _STOP_S)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {printed[-2000:]}")
    return printed


@contextmanager
def command_of_job(settings: Settings, log_file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `halfway resolve` as a user starts it, and yield it after its first batch."""
    status = Path(settings.storage.checkpoint) / STATUS_FILE
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("wb") as log:
        command = [sys.executable, "-m", "halfway", "resolve", *options_of(settings)]
        job = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until(lambda: job.poll() is not None or status.exists(), "the first batch", LONG_S)
        if job.poll() is not None:
            raise RuntimeError(f"the job ended: {log_file.read_text()[-1000:]}")
        yield job
    finally:
        end_process(job.pid, job, _STOP_S)


def memory_mib() -> dict[str, int]:
    """Return the resident memory of the driver's JVM and of the Python workers below it, in MiB (Linux)."""
    used = {"jvm": 0, "python_workers": 0}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            command = (status.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if b"pyspark.daemon" in command:
            used["python_workers"] += int(fields.get("VmRSS", "0 kB").split()[0]) // 1024
        elif int(fields["PPid"]) == os.getpid() and b"SparkSubmit" in command:
            used["jvm"] += int(fields.get("VmRSS", "0 kB").split()[0]) // 1024
    return used


def commits(settings: Settings) -> list[tuple[float, str]]:
    """Return for each file of `messages` the time of its commit in ms and its name, in the order of commits."""
    found = []
    for commit in sorted((Path(settings.storage.warehouse) / "messages" / "_delta_log").glob("*.json")):
        at_ms = commit.stat().st_mtime * 1000
        lines = (json.loads(line) for line in commit.read_text("utf-8").split("\n") if line)
        found += [(at_ms, line["add"]["path"]) for line in lines if "add" in line]
    return found


def latencies_ms(settings: Settings, since_ms: float, before_ms: float = math.inf) -> list[float]:
    """Return the latency of each message whose half has a timestamp of at least `since_ms`, and less than `before_ms`.

    The latency is the time in ms from the half's timestamp to the time of the commit's file.
    """
    found: list[float] = []
    for at_ms, name in commits(settings):
        if at_ms < since_ms:
            continue
        halves = pyarrow.parquet.read_table(Path(settings.storage.warehouse) / "messages" / name, columns=["half_at"])["half_at"]
        times = halves.cast(pyarrow.timestamp("ms", "UTC")).cast(pyarrow.int64()).to_pylist()
        found.extend(at_ms - half_ms for half_ms in times if since_ms <= half_ms < before_ms)
    return found


def count_rows(settings: Settings) -> int:
    """Count the messages without Spark. Return -1 if a transaction has two rows."""
    query = "SELECT count(*) AS n, count(DISTINCT transaction_id) AS d FROM rows"
    for row in delta_rows(f"{settings.storage.warehouse}/messages", query):
        return int(row["n"]) if row["n"] == row["d"] else -1
    return 0
