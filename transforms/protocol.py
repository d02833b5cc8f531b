"""The protocol: rules R1 to R13, R15, R17 and R14's copied signatures (docs/rules.md), in plain Python (decision 4).

`resolve(state, batch, rules)` takes the state of one bucket and the records that were newly read, and returns the state
after them and the outcomes. It does no I/O and reads no clock. Time is what was read: checks and discards wait for the
horizon, which ticks alone move; what is forgotten waits for the read mark, which is ahead of it in a backlog.
Transactions do not affect each other. A caller may therefore pass only those that the batch or its time affects.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from halfway.schemas.headers import SIGNED_WINDOW_MS, LocalTransactionState, Source
from halfway.schemas.outcomes import MAX_DETAIL, Count, Kind, Phase, Reason
from halfway.transforms.horizon import Clock, SourcePartition, Tick


class Half(NamedTuple):
    """A half message without its body, which stays in the half topic at (partition, offset) (decision 3)."""

    transaction_id: str
    producer_group: str
    topic: str
    incarnation: int
    at_ms: int
    partition: int
    offset: int
    binding: int = 0
    """What its ops repeat (`binding_of`); 0 if the half is not signed."""
    immunity_ms: int = 0
    """0 if the half sets none. It counts when the half is applied (R4); the state does not keep it."""
    discarded_ms: int = 0
    """The horizon at which a former checkpoint discarded it; 0 if none did. The state does not keep it (decision 6)."""
    valid_ms: int = 0
    """The read mark up to which its signature is valid; 0 if none was verified. The state does not keep it (R14)."""


class Op(NamedTuple):
    """A verdict (COMMIT or ROLLBACK), or UNKNOWN, on the half of the same id and incarnation."""

    transaction_id: str
    producer_group: str
    incarnation: int
    action: LocalTransactionState
    at_ms: int
    partition: int
    offset: int
    binding: int = 0
    """The signed half that it answers (`binding_of`); 0 if it names none."""
    due_ms: int = 0
    """The read mark at which it is an orphan; 0 until it waits for its half (R10)."""


class Lost(NamedTuple):
    """The job's own notice that the half at (partition, offset) could not be read back when it was needed (R17)."""

    transaction_id: str
    partition: int
    offset: int
    at_ms: int


class Transaction(NamedTuple):
    """What the state keeps of one id."""

    phase: Phase
    half: Half
    due_ms: int
    """The horizon at which a pending half is due, or the read mark at which a settled id is forgotten (see `Rules`)."""
    check_times: int = 0
    checked_ms: int = -1
    """The horizon of its last check; -1 before the first."""
    late_put_offs: int = 0
    """How many of its put-offs (R15) past the retention of halves count (R8)."""
    put_off_ms: int = -1
    """The horizon of the last of these; -1 before the first."""


class Outcome(NamedTuple):
    """A row for a sink. `source`, `partition`, `offset` and `at_ms` point to the half, or to the quarantined record."""

    kind: Kind
    transaction_id: str = ""
    source: Source = Source.HALF
    partition: int = 0
    offset: int = 0
    at_ms: int = 0
    decided_ms: int = 0
    """The op's timestamp for a commit, the horizon for a check or discard, the read mark for an orphan (R10), or 0."""
    producer_group: str = ""
    topic: str = ""
    incarnation: int = 0
    check_times: int = 0
    reason: str = ""
    detail: str = ""
    op_partition: int = -1
    op_offset: int = -1
    """The COMMIT in the op topic; -1 for all that is no commit."""


def first_ms_after(limit_ms: int) -> int:
    """Return the first time that is greater than a limit. Each "greater than" of the rules is this function."""
    return limit_ms + 1


class Rules(NamedTuple):
    """The numbers in the rules (times in ms), and the due times that follow from them.

    A due time is the first time at which something is due: for checks and discards the horizon must be >= that time,
    for orphans and forgetting the read mark.
    """

    timeout_ms: int
    check_interval_ms: int
    check_max: int
    half_retention_ms: int
    resolved_retention_ms: int

    def first_check_ms(self, half: Half) -> int:
        """Return when the first check is due: the age is > the half's immunity, or the timeout if it sets none (R4).

        What outlasts the retention of halves counts as that: a half must not outlive its body.
        """
        return first_ms_after(half.at_ms + min(half.immunity_ms or self.timeout_ms, self.half_retention_ms))

    def next_check_ms(self, horizon_ms: int) -> int:
        """Return when the next check is due: the interval after the horizon of a check or put-off (R5, R15)."""
        return horizon_ms + self.check_interval_ms

    def look_again_ms(self, horizon_ms: int) -> int:
        """Return when to look again whether a check counts by now (R5). To look at each one in each batch is slow."""
        return horizon_ms + max(1, self.check_interval_ms // 8)

    def expiry_ms(self, half: Half) -> int:
        """Return from when on a half is late: its age is > the retention of halves (R8)."""
        return first_ms_after(half.at_ms + self.half_retention_ms)

    def orphan_ms(self, op: Op, read_mark_ms: int) -> int:
        """Return when a verdict without a half becomes an orphan: it has waited for > the timeout (R10).

        The read mark at which it was read counts if it is later: the clock of a broker may have been ahead.
        """
        return first_ms_after(max(op.at_ms, read_mark_ms) + self.timeout_ms)

    def forget_ms(self, settled_ms: int, half: Half) -> int:
        """Return when an id is forgotten: it has been settled for > the retention of settled ids (R11).

        A signed half is stored within the window around `SIGNED_AT`. Twice the window later, no copy of it is valid
        any more, wherever in the window this one was stored.
        """
        remembered_ms = settled_ms + self.resolved_retention_ms
        return first_ms_after(max(remembered_ms, half.at_ms + 2 * SIGNED_WINDOW_MS) if half.binding else remembered_ms)


@dataclass(frozen=True, slots=True)
class BucketState:
    """The state of one bucket, as objects."""

    clock: Clock = field(default_factory=Clock)
    transactions: Mapping[str, Transaction] = field(default_factory=dict)
    waiting: Mapping[str, Sequence[Op]] = field(default_factory=dict)
    """Id → the verdicts whose half has not been read yet, in the order in which they were read (R10)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The records that were newly read, in any order but for the ticks of a partition."""

    halves: Sequence[Half] = ()
    ops: Sequence[Op] = ()
    lost: Sequence[Lost] = ()
    ticks: Sequence[Tick] = ()
    broken: Sequence[Outcome] = ()
    """The quarantine of records that break the contract (R14), made where they were decoded."""
    read_ms: Mapping[SourcePartition, int] = field(default_factory=dict)
    """Partition → the time of the last record there that keeps the contract and has the broker's time."""
    counted: Counter[str] = field(default_factory=Counter)
    """`Count` → the records that a former checkpoint has dealt with (decision 6)."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """What `resolve` returns."""

    state: BucketState
    outcomes: list[Outcome]
    counts: Counter[str]
    """What this batch counted: `Count`, and quarantined records by their `Reason`."""


def resolve(state: BucketState, batch: Batch, rules: Rules, clock: Clock | None = None) -> Resolution:
    """Apply a batch: the halves, notices of lost ones, and ops, each by time, partition and offset. Then let time move.

    Time comes last, so that every verdict up to the horizon wins over the checks and discards that it makes due (R9).

    Args:
        state: the bucket before the batch.
        batch: what was read.
        rules: the settings that count for this batch.
        clock: the clock after the batch, if the caller knows it already.
    """
    resolver = _Resolver(state, rules)
    resolver.counts.update({Count.HALVES: len(batch.halves), Count.OPS: len(batch.ops)})
    resolver.counts.update(batch.counted)
    resolver.pass_on(batch.broken)
    for half in sorted(batch.halves, key=_ORDER):
        resolver.on_half(half)
    for lost in sorted(batch.lost, key=_ORDER):
        resolver.on_lost(lost)
    for op in sorted([*batch.ops, *resolver.take_waiting(batch.halves)], key=_ORDER):
        resolver.on_op(op)
    clock = clock or state.clock.after(batch.ticks, batch.read_ms)
    horizon_ms, read_mark_ms = clock.horizon_ms(), clock.read_mark_ms()
    if horizon_ms is not None:
        resolver.on_horizon(horizon_ms, clock.asked_horizon_ms(), clock.absent_groups())
    if read_mark_ms is not None:
        resolver.on_read_mark(read_mark_ms)
    return Resolution(BucketState(clock, resolver.transactions, resolver.waiting), resolver.outcomes, resolver.counts)


_ORDER = attrgetter("at_ms", "partition", "offset")
_SETTLED_BY = {LocalTransactionState.COMMIT: Phase.COMMITTED, LocalTransactionState.ROLLBACK: Phase.ROLLED_BACK}


class _Resolver:
    """One call of `resolve`: the state as it changes, and what has come of the batch so far."""

    def __init__(self, state: BucketState, rules: Rules) -> None:
        self.rules = rules
        self.read_before_ms = max(0, state.clock.floor.read_mark_ms)
        self.transactions = dict(state.transactions)
        self.waiting = {transaction_id: list(ops) for transaction_id, ops in state.waiting.items()}
        self.outcomes: list[Outcome] = []
        self.counts: Counter[str] = Counter()

    def pass_on(self, broken: Sequence[Outcome]) -> None:
        """Hand broken records on to quarantine. No other rule applies to them (R14)."""
        self.outcomes.extend(broken)
        self.counts.update(outcome.reason for outcome in broken)

    def on_half(self, half: Half) -> None:
        """Start a transaction (R1, R4, R7), or count or quarantine a second half of a known id (R12).

        A half whose signature is no longer valid may be a copy, whose id was settled and is forgotten (R14).
        """
        known = self.transactions.get(half.transaction_id)
        if half.valid_ms and half.valid_ms < self.read_before_ms:
            detail = f"the signature was valid until {half.valid_ms} ms, and the read mark is {self.read_before_ms} ms"
            self._quarantine(half, Reason.BAD_SIGNATURE, detail)
        elif known is None or _starts_afresh(half, known):
            started = Transaction(Phase.PENDING, half, self.rules.first_check_ms(half))
            self.transactions[half.transaction_id] = started
            if half.discarded_ms:  # decision 6
                self.counts[Count.ADOPTED] += 1
                self._settle(started, Phase.DISCARDED, half.discarded_ms)
        elif half.discarded_ms:
            self.counts[Count.ADOPTED] += 1
            if self._was_copy(known, half):
                self._settle(known._replace(half=half), Phase.DISCARDED, half.discarded_ms)
        elif half.producer_group != known.half.producer_group:
            self._quarantine(half, Reason.ID_CONFLICT, f"the id belongs to group {known.half.producer_group}")
        elif half.incarnation == known.half.incarnation:
            self.counts[Count.DUPLICATE_HALF] += 1
        elif half.incarnation < known.half.incarnation:
            detail = f"incarnation {half.incarnation} after {known.half.incarnation}"
            self._quarantine(half, Reason.STALE_INCARNATION, detail)
        else:
            detail = f"incarnation {known.half.incarnation} is {known.phase.name}, not DISCARDED"
            self._quarantine(half, Reason.INCARNATION_REFUSED, detail)

    def _was_copy(self, known: Transaction, discarded: Half) -> bool:
        """Return True if a pending half was a second one of what a former checkpoint discarded, and read first (R12).

        A half that came when the id was free again is another message (R11). A copy of a signed half has any time.
        """
        is_same = (known.half.producer_group, known.half.incarnation) == (discarded.producer_group, discarded.incarnation)
        is_copied = known.half.binding != 0 and known.half.binding == discarded.binding
        free_ms = self.rules.forget_ms(discarded.discarded_ms, discarded)
        return known.phase is Phase.PENDING and is_same and (is_copied or discarded.at_ms <= known.half.at_ms < free_ms)

    def on_lost(self, lost: Lost) -> None:
        """Settle an id whose half is gone (R17).

        The sink that found it gone has quarantined it. It is quarantined here too, because a notice may be forged; the
        sink leaves the second row out. Behind a backlog a notice may come when the id is forgotten: it is counted, also
        twice, if the batch that wrote it was repeated.
        """
        known = self.transactions.get(lost.transaction_id)
        place = lost.partition, lost.offset
        if known is not None and (known.phase is Phase.LOST or (known.half.partition, known.half.offset) != place):
            return
        self.counts[Count.LOST] += 1
        if known is None:
            return
        self.outcomes.append(
            _outcome_of(Kind.QUARANTINE, known, 0, Reason.HALF_LOST)._replace(detail="a notice says that the half is lost")
        )
        self._settle(known, Phase.LOST, max(lost.at_ms, self.read_before_ms))

    def take_waiting(self, halves: Iterable[Half]) -> list[Op]:
        """Remove and return the verdicts that waited for one of these halves (R1)."""
        arrived = dict.fromkeys([half.transaction_id for half in halves if half.transaction_id in self.waiting])
        return [op for transaction_id in arrived for op in self.waiting.pop(transaction_id)]

    def on_op(self, op: Op) -> None:
        """Settle the half by its first verdict; keep, count or quarantine any other op."""
        known = self.transactions.get(op.transaction_id)
        if known is not None and op.producer_group != known.half.producer_group:  # R13, before all others
            detail = f"{op.action} from group {op.producer_group} on a half of group {known.half.producer_group}"
            self._quarantine(op, Reason.GROUP_MISMATCH, detail)
        elif known is not None and op.binding and op.incarnation == known.half.incarnation and op.binding != known.half.binding:
            self._quarantine(op, Reason.BAD_SIGNATURE, f"{op.action} is signed for another half of this id")
        elif op.action is LocalTransactionState.UNKNOWN:  # R3
            self.counts[Count.UNKNOWN] += 1
        elif known is None or op.incarnation > known.half.incarnation:  # R1, R10, R11: its half may still come
            due_ms = op.due_ms or self.rules.orphan_ms(op, self.read_before_ms)
            self.waiting.setdefault(op.transaction_id, []).append(op._replace(due_ms=due_ms))
        elif op.incarnation < known.half.incarnation:  # R11
            detail = f"{op.action} of incarnation {op.incarnation} after {known.half.incarnation}"
            self._quarantine(op, Reason.LATE_VERDICT, detail)
        elif known.phase is Phase.PENDING:  # R1, R2, R7
            self._on_first_verdict(op, known)
        elif known.phase in (Phase.DISCARDED, Phase.LOST):  # R11
            self._quarantine(op, Reason.LATE_VERDICT, f"{op.action} after the message was {known.phase.name}")
        elif known.phase is _SETTLED_BY[op.action]:  # R2
            self.counts[Count.DUPLICATE_OP] += 1
        else:  # R2
            self._quarantine(op, Reason.CONFLICTING_VERDICT, f"{op.action} after the message was {known.phase.name}")

    def _on_first_verdict(self, op: Op, known: Transaction) -> None:
        if op.action is LocalTransactionState.COMMIT:
            self.counts[Count.COMMITTED] += 1
            commit = _outcome_of(Kind.COMMIT, known, op.at_ms)
            self.outcomes.append(commit._replace(op_partition=op.partition, op_offset=op.offset))
        else:
            self.counts[Count.ROLLED_BACK] += 1
        self._settle(known, _SETTLED_BY[op.action], max(op.at_ms, self.read_before_ms))

    def on_horizon(self, horizon_ms: int, asked_ms: int, absent_groups: frozenset[str]) -> None:
        """Do the checks and discards that are due (R4 to R8, R15)."""
        for known in list(self.transactions.values()):
            if known.phase is Phase.PENDING and horizon_ms >= known.due_ms:
                if known.checked_ms > asked_ms:  # R5: nobody can have answered that check yet
                    self._put_off(known._replace(due_ms=self.rules.look_again_ms(horizon_ms)))
                elif known.checked_ms >= 0 and horizon_ms < (due_ms := self.rules.next_check_ms(known.checked_ms)):
                    self._put_off(known._replace(due_ms=due_ms))  # R5: the interval was shorter when that check was sent
                else:
                    self._on_due(known, horizon_ms, asked_ms, is_absent=known.half.producer_group in absent_groups)

    def on_read_mark(self, read_mark_ms: int) -> None:
        """Let go of what no record can concern any more: orphaned verdicts (R10), ids that are forgotten (R11)."""
        for transaction_id, ops in list(self.waiting.items()):
            self._quarantine_orphans(transaction_id, ops, read_mark_ms)
        for transaction_id, known in list(self.transactions.items()):
            if known.phase is not Phase.PENDING and read_mark_ms >= known.due_ms:
                del self.transactions[transaction_id]

    def _on_due(self, known: Transaction, horizon_ms: int, asked_ms: int, *, is_absent: bool) -> None:
        """Check, discard or put off a pending half."""
        rules = self.rules
        is_exhausted = known.check_times >= rules.check_max  # R6
        expiry_ms = rules.expiry_ms(known.half)
        later = known._replace(due_ms=rules.next_check_ms(horizon_ms))
        if is_absent:
            # R8: a put-off counts if a check sent at the last one that did would: a backlog's horizons pass in ms.
            has_waited = horizon_ms >= expiry_ms and known.put_off_ms <= asked_ms
            # What was counted under a shorter retention was not past this age.
            late_put_offs = known.late_put_offs if known.put_off_ms >= expiry_ms else 0
            is_expired = has_waited and late_put_offs >= rules.check_max  # R8
            if not is_expired:  # R15
                self._put_off(later._replace(late_put_offs=late_put_offs + 1, put_off_ms=horizon_ms) if has_waited else later)
                return
        else:
            # R8: a last call is one past the half's age. The horizon is past it too then, because it never goes back.
            # -1 is no call, but a half of before 1970 expires earlier.
            is_expired = known.checked_ms >= max(0, expiry_ms)
        if is_exhausted or is_expired:
            self.counts[Count.DISCARDED] += 1
            reason = Reason.CHECK_MAX if is_exhausted else Reason.EXPIRED
            self.outcomes.append(_outcome_of(Kind.DISCARD, known, horizon_ms, reason))
            self._settle(known, Phase.DISCARDED, max(horizon_ms, self.read_before_ms))
        else:  # R4, R5
            self.counts[Count.CHECKED] += 1
            checked = later._replace(check_times=known.check_times + 1, checked_ms=horizon_ms)
            self.outcomes.append(_outcome_of(Kind.CHECK, checked, horizon_ms))
            self.transactions[known.half.transaction_id] = checked

    def _put_off(self, later: Transaction) -> None:
        """Ask again later. It uses up no check (R5, R15)."""
        self.counts[Count.PUT_OFF] += 1
        self.transactions[later.half.transaction_id] = later

    def _quarantine_orphans(self, transaction_id: str, ops: Sequence[Op], read_mark_ms: int) -> None:
        """Quarantine the verdicts that have waited too long for their half, each of them (R10)."""
        left = []
        for op in ops:
            if read_mark_ms < op.due_ms:
                left.append(op)
            else:
                self._quarantine(op, Reason.ORPHAN_OP, f"{op.action} of incarnation {op.incarnation}", read_mark_ms)
        if left:
            self.waiting[transaction_id] = left
        else:
            del self.waiting[transaction_id]

    def _settle(self, known: Transaction, phase: Phase, settled_ms: int) -> None:
        """Remember how the id ended until it is to be forgotten (R11)."""
        self.transactions[known.half.transaction_id] = Transaction(
            phase, known.half, self.rules.forget_ms(settled_ms, known.half), known.check_times
        )

    def _quarantine(self, record: Half | Op, reason: Reason, detail: str, decided_ms: int = 0) -> None:
        """Quarantine a record by its pointer. The transaction stays as it is."""
        self.counts[reason] += 1
        self.outcomes.append(
            Outcome(
                kind=Kind.QUARANTINE,
                transaction_id=record.transaction_id,
                source=Source.HALF if isinstance(record, Half) else Source.OP,
                partition=record.partition,
                offset=record.offset,
                at_ms=record.at_ms,
                decided_ms=decided_ms,
                producer_group=record.producer_group,
                incarnation=record.incarnation,
                reason=reason,
                detail=detail[:MAX_DETAIL],
            )
        )


def _starts_afresh(half: Half, known: Transaction) -> bool:
    """Return True if a half resends a discarded message of its group under a higher incarnation (R12)."""
    same_group = half.producer_group == known.half.producer_group
    return same_group and half.incarnation > known.half.incarnation and known.phase is Phase.DISCARDED


def _outcome_of(kind: Kind, known: Transaction, decided_ms: int, reason: str = "") -> Outcome:
    """Return an outcome of a half: its commit, check or discard, or the quarantine of one that is lost."""
    half = known.half
    return Outcome(
        kind=kind,
        transaction_id=half.transaction_id,
        partition=half.partition,
        offset=half.offset,
        at_ms=half.at_ms,
        decided_ms=decided_ms,
        producer_group=half.producer_group,
        topic=half.topic,
        incarnation=half.incarnation,
        check_times=known.check_times,
        reason=reason,
    )
