"""The protocol: rules R1-R13 and R15 of the design, in plain Python.

`resolve(state, batch, rules)` takes what one bucket knows and what has newly been read, and returns what the bucket
knows then, and the outcomes. Nothing here does I/O or looks at a clock: the only time is the horizon, which ticks move.
Transactions do not touch each other, so a caller may pass just those that the batch or the horizon concerns.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from halfway.schemas.headers import LocalTransactionState, Source
from halfway.schemas.outcomes import Count, Kind, Phase, Reason


class Half(NamedTuple):
    """A half message, without its body: the half topic keeps that at (partition, offset)."""

    transaction_id: str
    producer_group: str
    topic: str
    incarnation: int
    at_ms: int
    partition: int
    offset: int
    immunity_ms: int = 0


class Op(NamedTuple):
    """A verdict, or UNKNOWN, on the half of the same id and incarnation."""

    transaction_id: str
    producer_group: str
    incarnation: int
    action: LocalTransactionState
    at_ms: int
    partition: int
    offset: int


class Lost(NamedTuple):
    """The job's own notice that the half at (partition, offset) could not be read when it was needed (R17)."""

    transaction_id: str
    partition: int
    offset: int
    at_ms: int


class Tick(NamedTuple):
    """Time, as one partition of one topic has it: all that was appended there before has been read."""

    source: Source
    partition: int
    partitions: int
    at_ms: int
    absent_groups: tuple[str, ...] = ()


class Transaction(NamedTuple):
    """What is kept of one id. `due_ms`: the first horizon at which a check, a discard or its forgetting is due."""

    phase: Phase
    producer_group: str
    topic: str
    incarnation: int
    start_ms: int
    partition: int
    offset: int
    check_times: int
    due_ms: int


class Outcome(NamedTuple):
    """A row for a sink. `source`, `partition`, `offset` and `at_ms` point to the half, or to the quarantined record.

    `decided_ms` is the op's timestamp for a commit and the horizon for a check, a discard or a quarantined orphan (R16).
    """

    kind: Kind
    transaction_id: str
    source: Source
    partition: int
    offset: int
    at_ms: int
    decided_ms: int
    producer_group: str
    topic: str
    incarnation: int
    check_times: int
    reason: str
    detail: str


class Rules(NamedTuple):
    """The numbers in the rules, in ms where they are times."""

    timeout_ms: int
    check_interval_ms: int
    check_max: int
    half_retention_ms: int
    resolved_retention_ms: int


@dataclass(frozen=True, slots=True)
class Clock:
    """The ticks heard so far, and what they say: the horizon, and which producer groups are away (R15)."""

    heard_ms: Mapping[tuple[Source, int], int] = field(default_factory=dict)
    partitions: Mapping[Source, tuple[int, int]] = field(default_factory=dict)
    """Per topic the time of its latest tick and how many partitions that says the topic has."""
    latest: tuple[int, Source, int, tuple[str, ...]] = (-1, Source.HALF, -1, ())
    """Time and place of the latest tick of all, and the groups that it says are away."""

    def after(self, ticks: Iterable[Tick]) -> "Clock":
        """Return the clock after more ticks, in whatever order they come; time never goes back."""
        heard, partitions = dict(self.heard_ms), dict(self.partitions)
        latest = self.latest
        for tick in ticks:
            place = (tick.source, tick.partition)
            heard[place] = max(heard.get(place, tick.at_ms), tick.at_ms)
            partitions[tick.source] = max(partitions.get(tick.source, (-1, 0)), (tick.at_ms, tick.partitions))
            latest = max(latest, (tick.at_ms, *place, tuple(sorted(tick.absent_groups))))
        return Clock(heard, partitions, latest)

    def absent_groups(self) -> frozenset[str]:
        """Return the producer groups that are away, as the latest tick says (R15)."""
        return frozenset(self.latest[3])

    def horizon_ms(self) -> int | None:
        """Return the smallest time over all partitions of both topics; None while one has not been heard of."""
        times_ms: list[int] = []
        for source in Source:
            _, partitions = self.partitions.get(source, (-1, 0))
            heard = [at_ms for (of, partition), at_ms in self.heard_ms.items() if of is source and partition < partitions]
            # What was heard is counted, not what a tick says there is: that may be any number.
            if not heard or len(heard) < partitions:
                return None
            times_ms.extend(heard)
        return min(times_ms)


@dataclass(frozen=True, slots=True)
class BucketState:
    """All that one bucket knows. `waiting`: verdicts whose half has not been read yet, in the order they came (R10)."""

    clock: Clock = field(default_factory=Clock)
    transactions: Mapping[str, Transaction] = field(default_factory=dict)
    waiting: Mapping[str, Sequence[Op]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """What was newly read, in any order."""

    halves: Sequence[Half] = ()
    ops: Sequence[Op] = ()
    lost: Sequence[Lost] = ()
    ticks: Sequence[Tick] = ()
    broken: Sequence[Outcome] = ()
    """Records that break the contract (R14): they are passed on to quarantine as they are."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """What `resolve` returns: the state after the batch, the outcomes, and what was counted."""

    state: BucketState
    outcomes: list[Outcome]
    counts: Counter[str]


def resolve(state: BucketState, batch: Batch, rules: Rules) -> Resolution:
    """Apply a batch: the halves, then the ops, each in order of time, partition and offset, then the horizon (design §3)."""
    resolver = _Resolver(state, rules)
    resolver.outcomes.extend(batch.broken)
    resolver.counts.update(outcome.reason for outcome in batch.broken)
    resolver.counts[Count.HALVES] += len(batch.halves)
    for half in sorted(batch.halves, key=_ORDER):
        resolver.on_half(half)
    for lost in batch.lost:
        resolver.on_lost(lost)
    for op in sorted(resolver.with_waiting(batch), key=_ORDER):
        resolver.on_op(op)
    clock = state.clock.after(batch.ticks)
    horizon_ms = clock.horizon_ms()
    if horizon_ms is not None:
        resolver.on_horizon(horizon_ms, clock.absent_groups())
    return Resolution(BucketState(clock, resolver.transactions, resolver.waiting), resolver.outcomes, resolver.counts)


_ORDER = attrgetter("at_ms", "partition", "offset")


class _Resolver:
    """One call of `resolve`, taken apart by what happens."""

    def __init__(self, state: BucketState, rules: Rules) -> None:
        self.rules = rules
        self.transactions = dict(state.transactions)
        self.waiting = {transaction_id: list(ops) for transaction_id, ops in state.waiting.items()}
        self.outcomes: list[Outcome] = []
        self.counts: Counter[str] = Counter()

    def on_half(self, half: Half) -> None:
        """Begin a transaction, or refuse a second half of its id (R4, R12)."""
        known = self.transactions.get(half.transaction_id)
        if known is None or self._replaces(half, known):
            due_ms = half.at_ms + (half.immunity_ms or self.rules.timeout_ms) + 1
            self.transactions[half.transaction_id] = Transaction(
                Phase.PENDING, half.producer_group, half.topic, half.incarnation, half.at_ms, half.partition, half.offset, 0, due_ms
            )
        elif half.producer_group != known.producer_group:
            self._refuse(half, Reason.ID_CONFLICT, f"the id is group {known.producer_group}'s")
        elif half.incarnation == known.incarnation:
            self.counts[Count.DUPLICATE_HALF] += 1
        elif half.incarnation < known.incarnation:
            self._refuse(half, Reason.STALE_INCARNATION, f"incarnation {half.incarnation} after {known.incarnation}")
        else:
            self._refuse(half, Reason.INCARNATION_REFUSED, f"incarnation {known.incarnation} is {known.phase.name}, not DISCARDED")

    @staticmethod
    def _replaces(half: Half, known: Transaction) -> bool:
        same_group = half.producer_group == known.producer_group
        return same_group and half.incarnation > known.incarnation and known.phase is Phase.DISCARDED

    def on_lost(self, lost: Lost) -> None:
        """Settle an id whose half cannot be read any more; the sink that found out has quarantined it (R17)."""
        known = self.transactions.get(lost.transaction_id)
        if known is None or known.phase is Phase.LOST or (known.partition, known.offset) != (lost.partition, lost.offset):
            return
        self.counts[Count.LOST] += 1
        self._settle(lost.transaction_id, known, Phase.LOST, lost.at_ms)

    def with_waiting(self, batch: Batch) -> list[Op]:
        """Return the batch's ops and those that waited for a half which has come now (R1)."""
        came = [half.transaction_id for half in batch.halves if half.transaction_id in self.waiting]
        self.counts[Count.OPS] += len(batch.ops)
        return [*batch.ops, *(op for transaction_id in dict.fromkeys(came) for op in self.waiting.pop(transaction_id))]

    def on_op(self, op: Op) -> None:
        """Settle by the first verdict; a later one is a duplicate, a conflict or too late (R1, R2, R3, R11, R13)."""
        known = self.transactions.get(op.transaction_id)
        if known is not None and op.producer_group != known.producer_group:
            self._refuse(op, Reason.GROUP_MISMATCH, f"{op.action} from group {op.producer_group} on a half of group {known.producer_group}")
        elif op.action is LocalTransactionState.UNKNOWN:
            self.counts[Count.UNKNOWN] += 1
        elif known is None or op.incarnation > known.incarnation:
            self.waiting.setdefault(op.transaction_id, []).append(op)
        elif op.incarnation < known.incarnation:
            self._refuse(op, Reason.LATE_VERDICT, f"{op.action} of incarnation {op.incarnation} after {known.incarnation}")
        elif known.phase is Phase.PENDING:
            self._on_verdict(op, known)
        elif known.phase in (Phase.DISCARDED, Phase.LOST):
            self._refuse(op, Reason.LATE_VERDICT, f"{op.action} after the message was {known.phase.name}")
        elif known.phase is _VERDICT[op.action]:
            self.counts[Count.DUPLICATE_OP] += 1
        else:
            self._refuse(op, Reason.CONFLICTING_VERDICT, f"{op.action} after the message was {known.phase.name}")

    def _on_verdict(self, op: Op, half: Transaction) -> None:
        if op.action is LocalTransactionState.COMMIT:
            self.counts[Count.COMMITTED] += 1
            self._emit(Kind.COMMIT, op.transaction_id, half, op.at_ms)
        else:
            self.counts[Count.ROLLED_BACK] += 1
        self._settle(op.transaction_id, half, _VERDICT[op.action], op.at_ms)

    def on_horizon(self, horizon_ms: int, absent_groups: frozenset[str]) -> None:
        """Do all that is due: checks and discards, orphaned ops, forgetting (R5 to R11, R15)."""
        for transaction_id, known in list(self.transactions.items()):
            if horizon_ms < known.due_ms:
                continue
            if known.phase is Phase.PENDING:
                self._on_due(transaction_id, known, horizon_ms, known.producer_group in absent_groups)
            else:
                del self.transactions[transaction_id]
        for transaction_id, ops in list(self.waiting.items()):
            left = []
            for op in ops:
                if horizon_ms > op.at_ms + self.rules.timeout_ms:
                    self._refuse(op, Reason.ORPHAN_OP, f"{op.action} of incarnation {op.incarnation}", decided_ms=horizon_ms)
                else:
                    left.append(op)
            if left:
                self.waiting[transaction_id] = left
            else:
                del self.waiting[transaction_id]

    def _on_due(self, transaction_id: str, half: Transaction, horizon_ms: int, away: bool) -> None:
        """Check, discard or put off one pending half. Exhausted checks are named as the reason before old age (R6, R8)."""
        expired = horizon_ms - half.start_ms > self.rules.half_retention_ms and (half.check_times > 0 or away)
        if away and not expired:
            self.counts[Count.PUT_OFF] += 1
            self.transactions[transaction_id] = half._replace(due_ms=horizon_ms + self.rules.check_interval_ms)
        elif half.check_times >= self.rules.check_max or expired:
            reason = Reason.CHECK_MAX if half.check_times >= self.rules.check_max else Reason.EXPIRED
            self.counts[Count.DISCARDED] += 1
            self._emit(Kind.DISCARD, transaction_id, half, horizon_ms, reason)
            self._settle(transaction_id, half, Phase.DISCARDED, horizon_ms)
        else:
            checked = half._replace(check_times=half.check_times + 1, due_ms=horizon_ms + self.rules.check_interval_ms)
            self.counts[Count.CHECKED] += 1
            self.transactions[transaction_id] = checked
            self._emit(Kind.CHECK, transaction_id, checked, horizon_ms)

    def _settle(self, transaction_id: str, half: Transaction, phase: Phase, at_ms: int) -> None:
        """Remember a settled id until the horizon is past its verdict by more than `resolved_retention` (R11)."""
        _, group, topic, incarnation, start_ms, partition, offset, check_times, _ = half
        due_ms = at_ms + self.rules.resolved_retention_ms + 1
        self.transactions[transaction_id] = Transaction(phase, group, topic, incarnation, start_ms, partition, offset, check_times, due_ms)

    def _emit(self, kind: Kind, transaction_id: str, half: Transaction, decided_ms: int, reason: str = "") -> None:
        _, group, topic, incarnation, start_ms, partition, offset, check_times, _ = half
        outcome = Outcome(
            kind, transaction_id, Source.HALF, partition, offset, start_ms, decided_ms, group, topic, incarnation, check_times, reason, ""
        )
        self.outcomes.append(outcome)

    def _refuse(self, record: Half | Op, reason: Reason, detail: str, decided_ms: int = 0) -> None:
        """Quarantine a record by its pointer; what it is about stays as it is."""
        self.counts[reason] += 1
        source = Source.HALF if isinstance(record, Half) else Source.OP
        pointer = (source, record.partition, record.offset, record.at_ms)
        group, incarnation = record.producer_group, record.incarnation
        self.outcomes.append(
            Outcome(Kind.QUARANTINE, record.transaction_id, *pointer, decided_ms, group, "", incarnation, 0, reason, detail)
        )


_VERDICT = {LocalTransactionState.COMMIT: Phase.COMMITTED, LocalTransactionState.ROLLBACK: Phase.ROLLED_BACK}
