"""`make bench`: runs the benchmarks named by ONLY (all if none), prints a table and writes `build/bench.json`."""

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from rich.console import Console
from rich.table import Table as Shown

from benchmarks.load import Load
from pipelines.broker import LocalBroker
from pipelines.job import ResolveJob
from pipelines.session import spark_session
from pipelines.sinks import BatchReport
from pipelines.topics import create_topics
from schemas.outcomes import Count
from schemas.settings import Settings, load_settings

Figures = dict[str, Any]
PARTITIONS = 4
_WARM_UP = 5
"""Batches until the JVM has compiled most of what is hot."""
_WARM_UP_S = 240
"""The same for small batches, of which each compiles less."""
_BUCKETS = 16


@dataclass
class Batches:
    """Listens to a job: when each batch ended, what it did, and how much memory was in use."""

    reports: list[BatchReport] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    memory_mib: list[dict[str, int]] = field(default_factory=list)

    def __call__(self, report: BatchReport) -> None:
        """Take a batch down."""
        self.reports.append(report)
        self.ended.append(time.monotonic())
        self.memory_mib.append(memory_mib())

    def events(self, number: int) -> int:
        """Return how many halves and ops a batch had."""
        counts = self.reports[number].counts
        return counts[Count.HALVES] + counts[Count.OPS]


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


def run_in_background(job: ResolveJob, spark: SparkSession) -> threading.Thread:
    """Run a job in a thread of its own."""
    thread = threading.Thread(target=job.run, args=(lambda: spark,), daemon=True)
    thread.start()
    return thread


def wait_for(condition: Callable[[], bool], limit_s: float) -> None:
    """Wait until something holds.

    Raises:
        TimeoutError: if it does not within the limit.
    """
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit_s} s")
        time.sleep(0.1)


def drain(spark: SparkSession, settings: Settings, scale: float) -> Figures:
    """A backlog in Kafka until all of it is in Delta, in batches of 400,000 events; the first five batches warm the JVM up."""
    load = Load(settings.kafka)
    load.send(int(2_100_000 * scale))
    batches = Batches()
    started = time.monotonic()
    ResolveJob(settings.model_copy(update={"trigger": settings.trigger.model_copy(update={"available_now": True})}), on_batch=batches).run(
        lambda: spark
    )
    starts = [started, *batches.ended]
    rates = [batches.events(n) / (batches.ended[n] - starts[n]) for n in range(len(batches.ended))]
    warm = [rate for n, rate in enumerate(rates) if n >= _WARM_UP and batches.events(n) > 300_000] or rates[-1:]
    rows = count_rows(settings)
    return {
        "events": load.sent.events,
        "right": rows == load.sent.committed,
        "committed": rows,
        "events_per_s": round(statistics.median(warm)),
        "tx_per_s": round(
            statistics.median(warm) * (load.sent.committed + load.sent.rolled_back + load.sent.unanswered) / load.sent.events
        ),
        "events_per_s_by_batch": [round(rate) for rate in rates],
        "memory_mib_by_batch": batches.memory_mib,
    }


def pending(spark: SparkSession, settings: Settings, scale: float) -> Figures:
    """Idle batches with 100,000 pending, and what the state takes for each."""
    load = Load(settings.kafka)
    load.send(int(100_000 * scale), answered=False)
    batches = Batches()
    job = ResolveJob(settings, on_batch=batches)
    thread = run_in_background(job, spark)
    wait_for(lambda: sum(report.counts[Count.HALVES] for report in list(batches.reports)) >= load.sent.unanswered, 300)
    read = len(batches.reports)
    wait_for(lambda: len(batches.reports) >= read + 25, 300)
    job.stop()
    thread.join()
    idle = [report.seconds for report in batches.reports[read + 5 :]]
    progress = spark.read.format("statestore").load(settings.storage.checkpoint)
    state_bytes = progress.agg(F.sum(F.length("value.groupState.payload"))).collect()[0][0]
    return {
        "pending": load.sent.unanswered,
        "idle_batch_s": {"median": round(statistics.median(idle), 3), "max": round(max(idle), 3)},
        "state_bytes_each": round(state_bytes / load.sent.unanswered, 1),
        "memory_mib": batches.memory_mib[-1],
    }


def latency(spark: SparkSession, settings: Settings, scale: float) -> Figures:
    """From a half's record timestamp to the Delta commit that makes its message readable, at 500 transactions/s; after a warm-up."""
    batches = Batches()
    job = ResolveJob(settings, on_batch=batches)
    thread = run_in_background(job, spark)
    wait_for(lambda: len(batches.reports) >= 5, 120)
    Load(settings.kafka, seed=2).send_paced(500, _WARM_UP_S * scale)
    warm_ms = time.time() * 1000
    Load(settings.kafka, seed=3).send_paced(500, 60 * scale)
    ended = len(batches.reports)
    wait_for(lambda: len(batches.reports) >= ended + 3, 60)
    job.stop()
    thread.join()
    ms = latencies_ms(settings, warm_ms)
    quantiles = statistics.quantiles(ms, n=100)
    return {"messages": len(ms), "p50_ms": round(quantiles[49]), "p99_ms": round(quantiles[98]), "max_ms": round(max(ms))}


def latencies_ms(settings: Settings, since_ms: float) -> list[float]:
    """Return for each message of a half since `since_ms` the ms to the commit that it is in, by the commit file's time."""
    path = Path(settings.storage.warehouse) / "messages"
    readable_ms: dict[str, float] = {}
    for commit in sorted((path / "_delta_log").glob("*.json")):
        for line in commit.read_text().splitlines():
            added = json.loads(line).get("add")
            if added:
                readable_ms[added["path"]] = commit.stat().st_mtime * 1000
    found = []
    for name, at_ms in readable_ms.items():
        halves = pyarrow.parquet.read_table(path / name, columns=["half_at"])["half_at"]
        times = halves.cast(pyarrow.timestamp("ms", "UTC")).cast(pyarrow.int64()).to_pylist()
        found.extend(at_ms - half_ms for half_ms in times if half_ms >= since_ms)
    return found


def count_rows(settings: Settings) -> int:
    """Count the messages with a reader other than Spark."""
    table = DeltaTable(f"{settings.storage.warehouse}/messages")
    query = "SELECT count(*) AS n, count(DISTINCT transaction_id) AS d FROM messages"
    row = pyarrow.table(QueryBuilder().register("messages", table).execute(query).read_all()).to_pylist()[0]
    return int(row["n"]) if row["n"] == row["d"] else -1


BENCHMARKS = {"drain": drain, "pending": pending, "latency": latency}


def main() -> None:
    """Run what was asked for, each on topics and tables of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help=f"comma-separated, of {', '.join(BENCHMARKS)}")
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the usual amount")
    arguments = parser.parse_args()
    names = [name for name in arguments.only.split(",") if name] or list(BENCHMARKS)
    results: Figures = {"machine": {"cores": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}}
    with tempfile.TemporaryDirectory() as folder:
        broker = LocalBroker(Path(folder) / "broker")
        broker.start()
        try:
            spark = spark_session(load_settings(environ={}, overrides={"state.shuffle_partitions": 2}))
            for name in names:
                settings = settings_for(name, Path(folder), broker)
                create_topics(settings, PARTITIONS)
                results[name] = BENCHMARKS[name](spark, settings, arguments.scale)
            spark.stop()
        finally:
            broker.stop()
    Path("build").mkdir(exist_ok=True)
    Path("build/bench.json").write_text(json.dumps(results, indent=2))
    shown = Shown("benchmark", "figure", "value")
    for name in names:
        for figure, value in results[name].items():
            shown.add_row(name, figure, str(value))
    Console().print(shown)


def settings_for(name: str, folder: Path, broker: LocalBroker) -> Settings:
    """Return settings for one benchmark: nothing falls due while it runs."""
    overrides = {
        "kafka.bootstrap_servers": broker.status()["bootstrap_servers"],
        "kafka.half_topic": f"{name}.half",
        "kafka.op_topic": f"{name}.op",
        "kafka.check_topic": f"{name}.check",
        "storage.warehouse": str(folder / name / "warehouse"),
        "storage.checkpoint": str(folder / name / "checkpoint"),
        "state.buckets": _BUCKETS,
        "state.shuffle_partitions": 2,
        "resolution.transactionTimeOut": "12h",
    }
    return load_settings(environ={}, overrides=overrides)


if __name__ == "__main__":
    main()
