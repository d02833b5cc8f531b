"""Runs the faults that a seed draws, in worlds side by side. After each fault its world recovers and is audited.

A world has one broker or three. Each kind has its own faults.
"""

import itertools
import json
import random
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from tests.chaos.auditor import Findings
from tests.chaos.faults import BROKER_FAULTS, PROCESS_FAULTS, CannotBeMadeError, Fault
from tests.chaos.faults_relay import RELAY_FAULTS
from tests.chaos.faults_replicas import REPLICA_FAULTS
from tests.chaos.faults_storage import DISK_BYTES, STORAGE_FAULTS
from tests.chaos.faults_topics import TOPIC_FAULTS
from tests.chaos.world import World
from tests.support.kafka_cluster import KafkaCluster

FAULTS: dict[int, list[Fault]] = {
    1: [*BROKER_FAULTS, *PROCESS_FAULTS, *STORAGE_FAULTS, *TOPIC_FAULTS, *RELAY_FAULTS],
    3: [*REPLICA_FAULTS, *PROCESS_FAULTS],
}
"""The faults of a world by its number of brokers."""
_DISKS = ("checkpoints", "warehouse")
END = "(end of the run)"
_SEEDS_APART = 1_000


@dataclass
class Outcome:
    """The outcome of one fault."""

    fault: str
    findings: Findings
    seconds: float
    recovery_s: float | None = None
    failure: str = ""
    """The fault could not be made, or the world did not recover."""
    skipped: str = ""
    """This machine does not allow the fault."""


@dataclass
class Run:
    """All outcomes of a run."""

    seed: int
    outcomes: list[Outcome] = field(default_factory=list)
    transactions: int = 0
    seconds: float = 0.0
    is_cut_short: bool = False
    """A signal or a world that did not recover ended the run early. It counts as failed."""

    @property
    def made(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.skipped and outcome.fault != END]

    @property
    def ok(self) -> bool:
        return bool(self.made) and not self.is_cut_short and all(outcome.findings.ok and not outcome.failure for outcome in self.outcomes)

    def as_json(self) -> dict[str, Any]:
        by_fault = {fault: self._figures(fault) for fault in dict.fromkeys(outcome.fault for outcome in self.outcomes)}
        totals = {kind: sum(figures[kind] for figures in by_fault.values()) for kind in ("lost", "twice", "wrong")}
        return {
            "seed": self.seed,
            "faults": len(self.made),
            **totals,
            "failed": [f"{outcome.fault}: {outcome.failure}" for outcome in self.outcomes if outcome.failure],
            "is_cut_short": self.is_cut_short,
            "skipped": [f"{outcome.fault}: {outcome.skipped}" for outcome in self.outcomes if outcome.skipped],
            "transactions": self.transactions,
            "seconds": round(self.seconds, 1),
            "by_fault": by_fault,
        }

    def _figures(self, fault: str) -> dict[str, Any]:
        of_fault = [outcome for outcome in self.outcomes if outcome.fault == fault]
        recoveries = [outcome.recovery_s for outcome in of_fault if outcome.recovery_s is not None]
        return {
            "times": sum(not outcome.skipped for outcome in of_fault),
            **{kind: sum(len(getattr(outcome.findings, kind)) for outcome in of_fault) for kind in ("lost", "twice", "wrong")},
            "recovery_s": {"median": round(statistics.median(recoveries), 1), "max": round(max(recoveries), 1)} if recoveries else None,
        }


@dataclass(frozen=True)
class Part:
    """What one world does: its number of brokers, and its faults, one after the other."""

    brokers: int
    faults: Sequence[Fault]


def draw(count: int, brokers: Sequence[int], chance: random.Random) -> list[Part]:
    """Draw faults for worlds with these numbers of brokers, side by side."""
    counts = [len(range(number, count, len(brokers))) for number in range(len(brokers))]
    drawn = {size: _drawn(sum(own for own, of in zip(counts, brokers, strict=True) if of == size), FAULTS[size], chance) for size in FAULTS}
    return [Part(size, [drawn[size].pop() for _ in range(own)]) for own, size in zip(counts, brokers, strict=True)]


def _drawn(count: int, faults: Sequence[Fault], chance: random.Random) -> list[Fault]:
    """Draw faults by their shares, in random order. If there are enough, each fault is drawn at least once."""
    if count < len(faults):
        pool, drawn = list(faults), []
        for _ in range(count):
            [fault] = chance.choices(pool, [fault.share for fault in pool])
            pool.remove(fault)
            drawn.append(fault)
        return drawn
    drawn = [*faults, *chance.choices(faults, [fault.share for fault in faults], k=count - len(faults))]
    chance.shuffle(drawn)
    return drawn


def run_faults(parts: Sequence[Part], seed: int, folder: Path) -> Run:
    """Make the faults of each part in a world of its own, side by side, and print a line for each."""
    began_s, stopping, printed = time.monotonic(), threading.Event(), itertools.count(1)
    count = sum(len(part.faults) for part in parts)

    def report(outcome: Outcome) -> None:
        place = "        " if outcome.fault == END else f"{next(printed):3}/{count} "
        say(place + _text_of(outcome))

    with ThreadPoolExecutor(len(parts)) as pool:
        running = [
            pool.submit(_run_world, part, seed + _SEEDS_APART * number, folder / f"world{number}", report, stopping)
            for number, part in enumerate(parts)
        ]
        try:
            wait(running)
        except (KeyboardInterrupt, SystemExit):
            stopping.set()
            say("stopping after the present faults")
    runs = [world.result() for world in running]
    return Run(
        seed,
        [outcome for run in runs for outcome in run.outcomes],
        sum(run.transactions for run in runs),
        time.monotonic() - began_s,
        any(run.is_cut_short for run in runs),
    )


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)  # noqa: T201  # a command's output


def _run_world(part: Part, seed: int, folder: Path, report: Callable[[Outcome], None], stopping: threading.Event) -> Run:
    run = Run(seed)
    chance = random.Random(seed)
    with ExitStack() as stack:
        kafka = KafkaCluster(folder / "kafka", part.brokers)
        stack.callback(kafka.stop)
        kafka.start()
        world = World(folder / "main", kafka, seed)
        world.disks = stack.enter_context(own_disks(world.folder))
        stack.enter_context(world)
        if part.brokers == 1:
            world.add_relays()
        known: set[str] = set()
        for fault in part.faults:
            if stopping.is_set():
                run.is_cut_short = True
                break
            outcome = _make(fault, world, chance, known)
            run.outcomes.append(outcome)
            if outcome.failure and not _comes_up_again(world):
                outcome.failure += "; its world does not recover and makes no more faults"
                run.is_cut_short = True
            report(outcome)
            if run.is_cut_short:
                break
        else:
            run.outcomes.append(_judge_the_end(world, known))
            report(run.outcomes[-1])
        run.transactions = world.database.count()
    return run


def _make(fault: Fault, world: World, chance: random.Random, known: set[str]) -> Outcome:
    began_s = time.monotonic()
    recovery_s, failure, skipped, findings = None, "", "", Findings()
    # Each fault has its own random source, so that the number of its draws does not change the later faults.
    own_chance = random.Random(chance.random())
    try:
        separate_world = fault.make(world, own_chance)
        recovery_s = world.recover()
        findings = _new(world.audit(), known)
        if separate_world is not None:
            recovery_s, own_findings = separate_world
            for kind in ("lost", "twice", "wrong"):
                getattr(findings, kind).extend(getattr(own_findings, kind))
    except CannotBeMadeError as error:
        skipped = str(error)
    except Exception as error:  # an error of the harness is reported too, and the run goes on
        failure = f"{type(error).__name__}: {error}"
        findings = Findings(lost=[f"{name}: committed, but not readable in time" for name in sorted(world.missing)])
        world.missing.clear()
    return Outcome(fault.name, findings, time.monotonic() - began_s, recovery_s, failure, skipped)


def _judge_the_end(world: World, known: set[str]) -> Outcome:
    began_s = time.monotonic()
    try:
        findings = _new(world.settle(), known)
        findings.wrong += world.judge_history().wrong
    except Exception as error:
        return Outcome(END, Findings(), time.monotonic() - began_s, failure=f"{type(error).__name__}: {error}")
    return Outcome(END, findings, time.monotonic() - began_s)


def _comes_up_again(world: World) -> bool:
    """Return True if the world recovers after a fault that failed."""
    try:
        world.job.disarm()
        world.recover()
    except Exception:
        return False
    return True


def _new(findings: Findings, known: set[str]) -> Findings:
    """Return the findings that earlier audits did not have, and add them to the known ones."""
    new = Findings(*([line for line in getattr(findings, kind) if line not in known] for kind in ("lost", "twice", "wrong")))
    known.update(new.lost, new.twice, new.wrong)
    return new


def _text_of(outcome: Outcome) -> str:
    recovery = "" if outcome.recovery_s is None else f", recovered in {outcome.recovery_s:.1f} s"
    findings = outcome.findings
    counts = f"lost {len(findings.lost)}, twice {len(findings.twice)}, wrong {len(findings.wrong)}"
    lines = [f"{outcome.fault}: {counts}{recovery} ({outcome.seconds:.0f} s in all)", *findings.lines()[:10]]
    lines += [f"FAILED: {outcome.failure}"] if outcome.failure else []
    lines += [f"skipped: {outcome.skipped}"] if outcome.skipped else []
    return "\n        ".join(lines)


@contextmanager
def own_disks(folder: Path) -> Iterator[dict[str, Path]]:
    """Mount small file systems for checkpoint and tables, if the machine allows that."""
    disks: dict[str, Path] = {}
    try:
        for name in _DISKS:
            disk = folder / name
            disk.mkdir(parents=True, exist_ok=True)
            command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                disks[name] = disk
        yield disks
    finally:
        for disk in disks.values():
            subprocess.run(["umount", "-l", str(disk)], check=False)


def table_of(run: Run) -> Table:
    """Return the run as a table to print."""
    facts = run.as_json()
    title = f"{facts['faults']} faults, {facts['transactions']} transactions, {facts['seconds']:.0f} s, seed {run.seed}"
    title += "; cut short" if run.is_cut_short else ""
    table = Table(title=title, show_footer=True)
    table.add_column("fault", footer="all")
    for name in ("times", "lost", "twice", "wrong"):
        total = facts["faults"] if name == "times" else facts[name]
        table.add_column(name, justify="right", footer=str(total))
    table.add_column("recovery s, median", justify="right")
    table.add_column("longest", justify="right")
    for fault, figures in sorted(facts["by_fault"].items()):
        recovery = figures["recovery_s"] or {"median": "", "max": ""}
        counts = [str(figures[name]) for name in ("times", "lost", "twice", "wrong")]
        table.add_row(fault, *counts, str(recovery["median"]), str(recovery["max"]))
    return table


def write_json(run: Run, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run.as_json(), indent=2) + "\n")
