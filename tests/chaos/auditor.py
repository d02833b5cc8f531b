"""What became of every transaction, and whether that is right: no I/O, no Spark, nothing of the product but the contract's words.

Everything is judged by what Kafka, the tables and the services' ledger hold. Times are ms, those of Kafka's records.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from halfway.schemas.headers import check_id
from halfway.schemas.outcomes import Reason
from tests.chaos.plans import Entry, Fate, body_of, digest

Place = tuple[int, int]
"""Partition and offset."""


class Half(NamedTuple):
    """A half in Kafka."""

    transaction_id: str
    partition: int
    offset: int
    at_ms: int
    group: str
    body_digest: str
    incarnation: int = 0


class Verdict(NamedTuple):
    """A COMMIT or ROLLBACK in the op topic."""

    transaction_id: str
    at_ms: int
    partition: int
    offset: int
    group: str
    is_commit: bool
    is_stray: bool = False
    """Not the service's: if it comes first all the same, it counts (R2)."""


class Check(NamedTuple):
    """A check request in Kafka."""

    transaction_id: str
    check_id: str
    times: int
    at_ms: int
    body_digest: str


class Row(NamedTuple):
    """A row of `messages` or `discarded`; `decided_ms` is committed_at or discarded_at."""

    transaction_id: str
    partition: int
    offset: int
    half_at_ms: int
    decided_ms: int
    check_times: int
    group: str
    body_digest: str


class Refused(NamedTuple):
    """A row of `quarantine`."""

    transaction_id: str | None
    topic: str
    partition: int
    offset: int
    reason: str


@dataclass
class Evidence:
    """All that is known from outside the job. `asked_at`: CHECK_ID and the horizon it was decided at, as often as it was decided."""

    half_topic: str
    op_topic: str
    check_max: int
    ledger: Mapping[str, Entry] = field(default_factory=dict)
    halves: Sequence[Half] = ()
    verdicts: Sequence[Verdict] = ()
    checks: Sequence[Check] = ()
    messages: Sequence[Row] = ()
    discarded: Sequence[Row] = ()
    quarantine: Sequence[Refused] = ()
    garbage: Sequence[Place] = ()
    """Halves that break the contract."""
    asked_at: Sequence[tuple[str, int]] = ()
    pending: frozenset[str] | None = None
    """Who is pending, where that was asked; None while traffic runs."""
    low: Mapping[int, int] = field(default_factory=dict)
    """The first offset that Kafka still has of each partition of the half topic."""
    destroyed: frozenset[str] = frozenset()
    """Whose half, or verdict, a fault took out of Kafka."""


@dataclass
class Findings:
    """What is not as it must be, a line each."""

    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.lost or self.twice or self.wrong)

    def lines(self) -> list[str]:
        return [f"{kind}: {line}" for kind in ("lost", "twice", "wrong") for line in getattr(self, kind)]


def audit(evidence: Evidence, settled: Iterable[str] | None = None) -> Findings:
    """Judge the evidence.

    Args:
        evidence: what was found.
        settled: ids that must have their end by now; None: all, and those without one must be pending.
    """
    findings = Findings()
    first = first_verdicts(evidence)
    _look_for_doubles(evidence, findings)
    _look_at_messages(evidence, first, findings)
    _look_at_discards(evidence, first, findings)
    _look_at_checks(evidence, first, findings)
    _look_at_half_lost(evidence, findings)
    _look_for_losses(evidence, first, findings, settled)
    return findings


def first_verdicts(evidence: Evidence) -> dict[str, Verdict]:
    """The verdict that counts for each half (R2): the first of its own group, in order of time, partition and offset."""
    groups = {half.transaction_id: half.group for half in evidence.halves}
    first: dict[str, Verdict] = {}
    for verdict in sorted(evidence.verdicts, key=lambda verdict: verdict[1:4]):
        if verdict.transaction_id not in groups or verdict.group == groups[verdict.transaction_id]:
            first.setdefault(verdict.transaction_id, verdict)
    return first


def _look_for_doubles(evidence: Evidence, findings: Findings) -> None:
    for name, rows in (("messages", evidence.messages), ("discarded", evidence.discarded)):
        counted = Counter(row.transaction_id for row in rows)
        findings.twice += [f"{transaction_id} has {count} rows in {name}" for transaction_id, count in counted.items() if count > 1]
    both = {row.transaction_id for row in evidence.messages} & {row.transaction_id for row in evidence.discarded}
    findings.twice += [f"{transaction_id} is in messages and in discarded" for transaction_id in sorted(both)]


def _look_at_messages(evidence: Evidence, first: Mapping[str, Verdict], findings: Findings) -> None:
    halves = _by_pointer(evidence.halves)
    for row in evidence.messages:
        verdict = first.get(row.transaction_id)
        problem = _difference(row, halves, evidence.destroyed)
        if verdict is None:
            problem = problem or ("" if row.transaction_id in evidence.destroyed else "no COMMIT of its group is in Kafka")
        elif not verdict.is_commit:
            problem = "it was rolled back, and is readable"
        elif row.decided_ms != verdict.at_ms:
            problem = problem or f"committed_at is {row.decided_ms}, the COMMIT's time {verdict.at_ms}"
        entry = evidence.ledger.get(row.transaction_id)
        if entry is None:
            problem = problem or "no service decided on it, and it is readable"
        elif entry.fate is not Fate.COMMIT and not (verdict is not None and verdict.is_stray):
            problem = f"the service decided {entry.fate}, and it is readable"
        if problem:
            findings.wrong.append(f"{row.transaction_id} in messages: {problem}")


def _look_at_discards(evidence: Evidence, first: Mapping[str, Verdict], findings: Findings) -> None:
    halves = _by_pointer(evidence.halves)
    for row in evidence.discarded:
        verdict = first.get(row.transaction_id)
        problem = _difference(row, halves, evidence.destroyed)
        if verdict is not None and verdict.at_ms <= row.decided_ms:
            problem = f"discarded at horizon {row.decided_ms}, and its verdict was in Kafka at {verdict.at_ms} (R9)"
        elif row.check_times != evidence.check_max:
            problem = problem or f"discarded after {row.check_times} checks, not {evidence.check_max} (R6)"
        if problem:
            findings.wrong.append(f"{row.transaction_id} in discarded: {problem}")


def _look_at_half_lost(evidence: Evidence, findings: Findings) -> None:
    """A half is named lost once, and only if it is (R17): it would excuse a loss."""
    named = [row for row in evidence.quarantine if row.reason == Reason.HALF_LOST]
    counted = Counter((row.transaction_id, row.partition, row.offset) for row in named)
    findings.twice += [f"{pointer} is named half_lost {count} times" for pointer, count in counted.items() if count > 1]
    for row in named:
        if row.offset >= evidence.low.get(row.partition, 0) and row.transaction_id not in evidence.destroyed:
            findings.wrong.append(f"{row.transaction_id} is named half_lost, and Kafka has it at {row.partition}:{row.offset}")


def _look_at_checks(evidence: Evidence, first: Mapping[str, Verdict], findings: Findings) -> None:
    """No check for what was settled at its horizon; every copy of a check the same; numbers without a gap."""
    halves = {(half.transaction_id, half.partition, half.offset): half for half in evidence.halves}
    for name, horizon_ms in set(evidence.asked_at):
        verdict = first.get(name.rpartition(":")[0].rpartition(":")[0])
        if verdict is not None and verdict.at_ms <= horizon_ms:
            findings.wrong.append(f"check {name}: decided at horizon {horizon_ms}, and the verdict was in Kafka at {verdict.at_ms} (R9)")
    decided = {name for name, _ in evidence.asked_at}
    numbers: dict[tuple[str, int, int], set[int]] = defaultdict(set)
    for check in evidence.checks:
        pointer = _pointer_of(check.check_id)
        half = halves.get((check.transaction_id, *pointer))
        numbers[check.transaction_id, *pointer].add(check.times)
        if check.check_id != check_id(check.transaction_id, *pointer, check.times):
            findings.wrong.append(f"check {check.check_id}: it is number {check.times} of {check.transaction_id}")
        elif check.check_id not in decided:
            findings.wrong.append(f"check {check.check_id}: nobody decided it")
        elif half is not None and check.body_digest != half.body_digest:
            findings.wrong.append(f"check {check.check_id}: its body is not the half's")
    for (transaction_id, *_), asked in numbers.items():
        if asked != set(range(1, max(asked) + 1)) or max(asked) > evidence.check_max:
            findings.wrong.append(f"{transaction_id} was asked about with numbers {sorted(asked)} (R6)")


def _look_for_losses(evidence: Evidence, first: Mapping[str, Verdict], findings: Findings, settled: Iterable[str] | None) -> None:
    """Each half has one of the four fates, and each message that its service committed is readable."""
    readable = {row.transaction_id for row in evidence.messages}
    discarded = {row.transaction_id for row in evidence.discarded}
    stored = {half.transaction_id for half in evidence.halves}
    named_lost = {row.transaction_id for row in evidence.quarantine if row.reason == Reason.HALF_LOST}
    excused = evidence.destroyed | named_lost
    for transaction_id in sorted((stored | set(evidence.ledger)) if settled is None else settled):
        entry, verdict = evidence.ledger.get(transaction_id), first.get(transaction_id)
        if transaction_id in excused:
            continue
        if transaction_id not in stored:
            findings.lost.append(f"{transaction_id}: its half was acknowledged, and is not in Kafka")
        elif verdict is not None and verdict.is_commit and transaction_id not in readable:
            findings.lost.append(f"{transaction_id}: a COMMIT is in Kafka, and it is not in messages")
        elif entry is not None and entry.fate is Fate.COMMIT and transaction_id not in readable and not (verdict and verdict.is_stray):
            where = "was discarded" if transaction_id in discarded else "was rolled back" if verdict else "has no verdict"
            findings.lost.append(f"{transaction_id}: the service committed, and it {where}")
        elif verdict is None and evidence.pending is not None and transaction_id not in discarded | evidence.pending:
            findings.lost.append(f"{transaction_id}: neither committed, rolled back, discarded nor pending")
    if evidence.pending is None:
        return
    settled_ids = readable | discarded | set(first)
    findings.twice += [f"{transaction_id} is settled, and pending" for transaction_id in sorted(evidence.pending & settled_ids)]
    refused = {(row.partition, row.offset) for row in evidence.quarantine if row.topic == evidence.half_topic}
    findings.lost += [f"the record without headers at {place} is not in quarantine" for place in sorted(set(evidence.garbage) - refused)]


def _difference(row: Row, halves: Mapping[tuple[str, int, int, int], Half], destroyed: frozenset[str]) -> str:
    """How a row differs from its half, as Kafka has it and as the service sent it; empty if it does not."""
    half = halves.get((row.transaction_id, row.partition, row.offset, row.half_at_ms))
    if row.body_digest != digest(body_of(row.transaction_id)):
        return "its body is not what was sent"
    if half is None:
        return "" if row.transaction_id in destroyed else "there is no half where it says"
    return "" if row.group == half.group else f"its group is {row.group}, the half's {half.group}"


def _by_pointer(halves: Iterable[Half]) -> dict[tuple[str, int, int, int], Half]:
    return {(half.transaction_id, half.partition, half.offset, half.at_ms): half for half in halves}


def _pointer_of(name: str) -> tuple[int, int]:
    partition, _, offset = name.split(":")[-2].partition(".")
    return int(partition), int(offset)
