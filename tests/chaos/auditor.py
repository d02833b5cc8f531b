"""Judges the outcome of every transaction by what Kafka, the tables and the services' database hold.

Has no I/O and no Spark, and uses the contract's names alone of the product. Times are in ms, those of Kafka's records.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from halfway.schemas.headers import check_id
from halfway.schemas.outcomes import Reason
from tests.chaos.plans import Decision, Fate, body_of, digest
from tests.chaos.reading import Reading, Tick

Place = tuple[int, int]
"""Partition and offset."""


class Half(NamedTuple):
    """A half in the half topic."""

    transaction_id: str
    partition: int
    offset: int
    at_ms: int
    group: str
    body_digest: str


class Verdict(NamedTuple):
    """A COMMIT or ROLLBACK in the op topic."""

    transaction_id: str
    at_ms: int
    partition: int
    offset: int
    group: str
    is_commit: bool
    is_stray: bool = False
    """No service gave this verdict. It counts all the same if it comes first (R2)."""


class Check(NamedTuple):
    """A check request in the check topic."""

    transaction_id: str
    check_id: str
    times: int
    at_ms: int
    body_digest: str


class Row(NamedTuple):
    """A row of `messages` or `discarded`. `decided_ms` is committed_at or discarded_at."""

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
    """What is known from outside the job."""

    half_topic: str
    check_max: int
    decisions: Mapping[str, Decision] = field(default_factory=dict)
    halves: Sequence[Half] = ()
    verdicts: Sequence[Verdict] = ()
    checks: Sequence[Check] = ()
    messages: Sequence[Row] = ()
    discarded: Sequence[Row] = ()
    quarantine: Sequence[Refused] = ()
    garbage: Sequence[Place] = ()
    """Halves that break the contract."""
    asked_at: Sequence[tuple[str, int]] = ()
    """CHECK_ID and horizon of each check, once for each time that the job decided it."""
    pending: frozenset[str] | None = None
    """The ids that `halfway pending` lists; None while traffic runs."""
    start_offsets: Mapping[int, int] = field(default_factory=dict)
    """The first retained offset of each partition of the half topic."""
    destroyed: frozenset[str] = frozenset()
    """The ids whose half or verdict a fault deleted from Kafka."""
    op_ticks: Sequence[Tick] = ()
    """The ticks of the op topic, each partition in order. They matter where brokers' clocks differ."""
    not_due: frozenset[str] = frozenset()
    """The ids whose half a broker stamped with a time to come."""


@dataclass
class Findings:
    """The violations that an audit found, one line each."""

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
        evidence: what is known from outside the job.
        settled: the ids that must be settled by now. With None every id must be settled or pending.
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
    """Return the verdict that counts for each half (R2).

    It is the first one of the half's group, in order of time, partition and offset. Where a clock was wrong, it may
    be an orphan, and the answer to a check count (docs/reliability.md).
    """
    groups = {half.transaction_id: half.group for half in evidence.halves}
    clock_was_wrong = any(row.reason == Reason.BAD_TICK for row in evidence.quarantine)
    orphans = {row[2:4] for row in evidence.quarantine if row.reason == Reason.ORPHAN_OP and clock_was_wrong}
    first: dict[str, Verdict] = {}
    for verdict in sorted(evidence.verdicts, key=lambda verdict: (verdict[2:4] in orphans, verdict[1:4])):
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
            problem = "it was rolled back, but is readable"
        elif row.decided_ms != verdict.at_ms:
            problem = problem or f"committed_at is {row.decided_ms}, but the COMMIT has the time {verdict.at_ms}"
        decision = evidence.decisions.get(row.transaction_id)
        if decision is None:
            problem = problem or "no service decided on it, but it is readable"
        elif decision.fate is not Fate.COMMIT and not (verdict is not None and verdict.is_stray):
            problem = f"the service decided {decision.fate}, but it is readable"
        if problem:
            findings.wrong.append(f"{row.transaction_id} in messages: {problem}")


def _look_at_discards(evidence: Evidence, first: Mapping[str, Verdict], findings: Findings) -> None:
    halves, reading = _by_pointer(evidence.halves), Reading(evidence.op_ticks)
    for row in evidence.discarded:
        verdict = first.get(row.transaction_id)
        problem = _difference(row, halves, evidence.destroyed)
        if verdict is not None and reading.had(verdict.partition, verdict.offset, verdict.at_ms, row.decided_ms):
            problem = f"discarded at horizon {row.decided_ms}, but its verdict was in Kafka at {verdict.at_ms} (R9)"
        elif row.check_times != evidence.check_max:
            problem = problem or f"discarded after {row.check_times} checks, not {evidence.check_max} (R6)"
        if problem:
            findings.wrong.append(f"{row.transaction_id} in discarded: {problem}")


def _look_at_half_lost(evidence: Evidence, findings: Findings) -> None:
    """Find repeated and false reports of `half_lost` (R17). A false one would excuse a loss."""
    named = [row for row in evidence.quarantine if row.reason == Reason.HALF_LOST]
    counted = Counter((row.transaction_id, row.partition, row.offset) for row in named)
    findings.twice += [f"{pointer} is half_lost {count} times" for pointer, count in counted.items() if count > 1]
    for row in named:
        if row.offset >= evidence.start_offsets.get(row.partition, 0) and row.transaction_id not in evidence.destroyed:
            findings.wrong.append(f"{row.transaction_id} is half_lost, but Kafka has it at {row.partition}:{row.offset}")


def _look_at_checks(evidence: Evidence, first: Mapping[str, Verdict], findings: Findings) -> None:
    """Find checks of settled halves and of none, copies of a check that differ, and gaps in the numbers of checks."""
    halves = {(half.transaction_id, half.partition, half.offset): half for half in evidence.halves}
    reading, excused = Reading(evidence.op_ticks), _excused(evidence)
    for name, horizon_ms in set(evidence.asked_at):
        verdict = first.get(name.rpartition(":")[0].rpartition(":")[0])
        if verdict is not None and reading.had(verdict.partition, verdict.offset, verdict.at_ms, horizon_ms):
            findings.wrong.append(f"check {name}: decided at horizon {horizon_ms}, but the verdict was in Kafka at {verdict.at_ms} (R9)")
    decided = {name for name, _ in evidence.asked_at}
    numbers: dict[tuple[str, int, int], set[int]] = defaultdict(set)
    for check in evidence.checks:
        pointer = _pointer_of(check.check_id)
        half = halves.get((check.transaction_id, *pointer))
        numbers[check.transaction_id, *pointer].add(check.times)
        if check.check_id != check_id(check.transaction_id, *pointer, check.times):
            findings.wrong.append(f"check {check.check_id}: it is check {check.times} of {check.transaction_id}")
        elif check.check_id not in decided:
            findings.wrong.append(f"check {check.check_id}: the job did not decide it")
        elif half is None and check.transaction_id not in excused:
            findings.wrong.append(f"check {check.check_id}: a check of no half that Kafka has")
        elif half is not None and check.body_digest != half.body_digest:
            findings.wrong.append(f"check {check.check_id}: its body differs from the half's")
    for (transaction_id, *_), asked in numbers.items():
        if asked != set(range(1, max(asked) + 1)) or max(asked) > evidence.check_max:
            findings.wrong.append(f"{transaction_id} has checks with the numbers {sorted(asked)} (R6)")


def _look_for_losses(evidence: Evidence, first: Mapping[str, Verdict], findings: Findings, settled: Iterable[str] | None) -> None:
    """Find halves without any of the four fates, and messages that a service committed and nobody can read."""
    readable = {row.transaction_id for row in evidence.messages}
    discarded = {row.transaction_id for row in evidence.discarded}
    stored = {half.transaction_id for half in evidence.halves}
    excused = _excused(evidence)
    for transaction_id in sorted((stored | set(evidence.decisions)) if settled is None else settled):
        decision, verdict = evidence.decisions.get(transaction_id), first.get(transaction_id)
        decided_commit = decision is not None and decision.fate is Fate.COMMIT
        if transaction_id in excused or (transaction_id in evidence.not_due and _is_pending(transaction_id, evidence)):
            continue
        if transaction_id not in stored:
            findings.lost.append(f"{transaction_id}: its half was acknowledged, but is not in Kafka")
        elif verdict is not None and verdict.is_commit and transaction_id not in readable:
            findings.lost.append(f"{transaction_id}: a COMMIT is in Kafka, but it is not in messages")
        elif decided_commit and transaction_id not in readable and not (verdict and verdict.is_stray):
            outcome = "was discarded" if transaction_id in discarded else "was rolled back" if verdict else "has no verdict"
            findings.lost.append(f"{transaction_id}: the service committed, but it {outcome}")
        elif verdict is None and evidence.pending is not None and transaction_id not in discarded | evidence.pending:
            findings.lost.append(f"{transaction_id}: neither committed, rolled back, discarded nor pending")
    if evidence.pending is None:
        return
    settled_ids = readable | discarded | set(first)
    findings.twice += [f"{transaction_id} is settled and pending" for transaction_id in sorted(evidence.pending & settled_ids)]
    refused = {(row.partition, row.offset) for row in evidence.quarantine if row.topic == evidence.half_topic}
    findings.lost += [f"the record without headers at {place} is not in quarantine" for place in sorted(set(evidence.garbage) - refused)]


def _excused(evidence: Evidence) -> frozenset[str | None]:
    """Return the ids whose half or verdict a fault deleted, or whose half the job has reported lost."""
    return evidence.destroyed | {row.transaction_id for row in evidence.quarantine if row.reason == Reason.HALF_LOST}


def _is_pending(transaction_id: str, evidence: Evidence) -> bool:
    return evidence.pending is None or transaction_id in evidence.pending


def _difference(row: Row, halves: Mapping[tuple[str, int, int, int], Half], destroyed: frozenset[str]) -> str:
    """Say how a row differs from its half in Kafka and from what the service sent. Empty if it does not differ."""
    half = halves.get((row.transaction_id, row.partition, row.offset, row.half_at_ms))
    if row.body_digest != digest(body_of(row.transaction_id)):
        return "its body differs from what was sent"
    if half is None:
        return "" if row.transaction_id in destroyed else "no half lies at its pointer"
    return "" if row.group == half.group else f"its group is {row.group}, but the half's is {half.group}"


def _by_pointer(halves: Iterable[Half]) -> dict[tuple[str, int, int, int], Half]:
    return {(half.transaction_id, half.partition, half.offset, half.at_ms): half for half in halves}


def _pointer_of(name: str) -> tuple[int, int]:
    partition, _, offset = name.split(":")[-2].partition(".")
    return int(partition), int(offset)
