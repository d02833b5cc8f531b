"""`python -m tests.chaos.soak` runs an hour of steady traffic with a fault every five minutes (docs/reliability.md).

The exit code is 1 if anything is lost, twice or wrong, or if batch time, memory, files or pending transactions have
grown since the warm-up. Between two compactions, a table has a file more with each batch.
"""

import argparse
import json
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from rich.console import Console
from rich.table import Table as TextTable

from halfway.schemas.tables import Table
from tests.chaos.faults import BROKER_FAULTS, PROCESS_FAULTS
from tests.chaos.faults_storage import optimize
from tests.chaos.runner import say
from tests.chaos.world import World
from tests.support.kafka_cluster import KafkaCluster
from tests.support.memory import memory_mib
from tests.support.signals import end_at_sigterm

GROUPS = ("alpha", "beta", "gamma", "delta")
SETTINGS: dict[str, object] = {
    "state.buckets": 16,
    "state.shuffle_partitions": 2,
    "resolution.transactionTimeOut": "6s",
    "resolution.transactionCheckInterval": "5s",
    "resolution.transactionCheckMax": 5,
    "resolution.tick_interval": "1s",
    "resolution.resolved_retention": "60s",
    "trigger.interval": "1s",
}
FAULTS = ("python workers killed", "service killed", "broker killed", "broker frozen", "job frozen", "driver killed anywhere")
_SAMPLE_S = 10.0
_BATCH = re.compile(r"event=batch .* seconds=([\d.]+) .* pending=(\d+) .* horizon_lag_ms=(-?\d+)")
_MAY_GROW = {
    "batch_s": (1.3, 0),
    "memory_mib": (1.2, 0),
    # A batch while a compaction runs adds a file, and on a slow machine there are more. Between two come hundreds.
    "files_after_compaction": (1.5, 20),
    "checkpoint_files": (1.3, 0),
    "checkpoint_kib": (1.3, 0),
    "pending": (1.3, 0),
}
"""How far a figure may grow from the first third of the samples to the last: by a factor, and by so much more."""


@dataclass(frozen=True)
class Sample:
    """The figures of one moment. The batch figures are those of the last batch in the job's log."""

    at_s: float
    batch_s: float
    pending: int
    lag_ms: int
    memory_mib: int
    checkpoint_files: int
    checkpoint_kib: int


def sample(world: World, at_s: float) -> Sample | None:
    """Take a sample. Return None if no job is running, or if its log has no batch yet."""
    logged = _BATCH.findall(world.job.log())
    process = world.job.process
    memory = None if process is None or process.poll() is not None else memory_mib(root=process.pid)
    if not logged or memory is None:
        return None
    seconds, pending, lag_ms = logged[-1]
    sizes = [path.stat().st_size for path in world.job.checkpoint.rglob("*") if path.is_file()]
    return Sample(at_s, float(seconds), int(pending), int(lag_ms), memory["all"], len(sizes), sum(sizes) // 1024)


def _named_files(world: World) -> int:
    """Return the number of files of `messages` that a reader has to open."""
    try:
        return len(DeltaTable(str(world.warehouse / Table.MESSAGES)).file_uris())
    except TableNotFoundError:
        return 0


def soak(world: World, minutes: float, fault_every_s: float, optimize_every_s: float) -> tuple[list[Sample], list[int]]:
    """Run traffic with a fault and a compaction at intervals. Return samples, and the files after each compaction."""
    by_name = {fault.name: fault for fault in [*PROCESS_FAULTS, *BROKER_FAULTS]}
    chance = random.Random(world.seed)
    began_s = time.monotonic()
    fault_at_s, optimize_at_s, made = fault_every_s, optimize_every_s / 2, 0
    samples: list[Sample] = []
    compacted: list[int] = []
    while (at_s := time.monotonic() - began_s) < minutes * 60:
        found = sample(world, round(at_s, 1))
        if found is not None:
            samples.append(found)
        if at_s >= fault_at_s:
            fault = by_name[FAULTS[made % len(FAULTS)]]
            fault.make(world, random.Random(chance.random()))
            recovery_s = world.recover()
            made += 1
            fault_at_s += fault_every_s
            say(f"{at_s / 60:5.1f} min  {fault.name}: recovered in {recovery_s:.1f} s; {world.database.count()} transactions")
        elif at_s >= optimize_at_s:
            optimize(world)
            optimize_at_s += optimize_every_s
            compacted.append(_named_files(world))
            say(f"{at_s / 60:5.1f} min  compacted: {compacted[-1]} files")
        else:
            time.sleep(_SAMPLE_S)
    return samples, compacted


def medians(samples: Sequence[Sample], compacted: Sequence[int]) -> dict[str, tuple[float, float]]:
    """Return each figure's median in the first and in the last third. The first tenth is left out as warm-up.

    Of the few compactions, the worst of each third counts.
    """
    first, last = _first_and_last_third(samples[len(samples) // 10 :])
    found = {
        name: (_median(getattr(one, name) for one in first), _median(getattr(one, name) for one in last))
        for name in _MAY_GROW
        if name != "files_after_compaction"
    }
    if compacted:
        files, later_files = _first_and_last_third(compacted)
        found["files_after_compaction"] = float(max(files)), float(max(later_files))
    return found


def _first_and_last_third(all_of_them: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    third = max(1, len(all_of_them) // 3)
    return all_of_them[:third], all_of_them[-third:]


def _median(figures: Iterable[float]) -> float:
    return float(statistics.median(figures))


def grown(figures: dict[str, tuple[float, float]]) -> list[str]:
    """Return the figures that have grown too far."""
    return [name for name, (first, last) in figures.items() if last > first * _MAY_GROW[name][0] + _MAY_GROW[name][1]]


def main() -> int:
    text = "Run steady traffic with faults, and report what grows."
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=text)
    parser.add_argument("--minutes", type=float, default=60, help="length of the run (default 60)")
    parser.add_argument("--rate", type=float, default=200, help="transactions a second of all services together (default 200)")
    parser.add_argument("--fault-every", type=float, default=300, metavar="SECONDS", help="interval of faults (default 300)")
    parser.add_argument("--optimize-every", type=float, default=600, metavar="SECONDS", help="interval of compactions (default 600)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed makes the same faults (default 1)")
    parser.add_argument("--out", type=Path, default=Path("build/soak.json"), help="file for the figures (default build/soak.json)")
    options = parser.parse_args()
    end_at_sigterm()
    folder = Path(tempfile.mkdtemp(prefix="halfway-soak-"))
    kafka = KafkaCluster(folder / "kafka")
    try:
        kafka.start()
        rate = options.rate / len(GROUPS)
        with World(folder / "main", kafka, options.seed, SETTINGS, groups=GROUPS, rate=rate, jvm_options="") as world:
            say(f"{options.minutes:.0f} minutes at {options.rate:.0f} transactions a second, in {folder}")
            began_s, before = time.monotonic(), world.database.count()
            samples, compacted = soak(world, options.minutes, options.fault_every, options.optimize_every)
            per_second = (world.database.count() - before) / (time.monotonic() - began_s)
            findings = world.settle()
            transactions = world.database.count()
    finally:
        kafka.stop()
    figures = medians(samples, compacted)
    counts = {kind: len(getattr(findings, kind)) for kind in ("lost", "twice", "wrong")}
    result: dict[str, Any] = {
        "minutes": options.minutes,
        "transactions": transactions,
        "per_second": round(per_second, 1),
        **counts,
        "figures": {name: {"first_third": first, "last_third": last} for name, (first, last) in figures.items()},
        "grown": grown(figures),
        "samples": [asdict(one) for one in samples],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    Console(width=120).print(_table_of(result))
    for line in findings.lines()[:20]:
        say(line)
    ok = findings.ok and not result["grown"]
    if ok:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if ok else 1


def _table_of(result: dict[str, Any]) -> TextTable:
    counts = ", ".join(f"{result[kind]} {kind}" for kind in ("lost", "twice", "wrong"))
    table = TextTable(title=f"{result['transactions']} transactions, {result['per_second']} a second: {counts}")
    for name in ("figure", "first third", "last third", ""):
        table.add_column(name, justify="left" if name in ("figure", "") else "right")
    for name, figure in result["figures"].items():
        table.add_row(name, f"{figure['first_third']:g}", f"{figure['last_third']:g}", "grown" if name in result["grown"] else "")
    return table


if __name__ == "__main__":
    sys.exit(main())
