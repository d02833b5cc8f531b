"""A second implementation of the rules (docs/rules.md), as slow and plain as they read.

It plays one id at a time, keeps the whole history of the id, and stores nothing that can be derived. It shares only the
record types with `halfway.transforms.protocol`. Batches matter to it as they matter to the rules: they say what had
been read when the job reached a horizon.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from halfway.schemas.headers import LocalTransactionState, Source
from halfway.transforms.horizon import SourcePartition, Tick
from halfway.transforms.protocol import Batch, Half, Op, Rules


@dataclass
class Life:
    """An accepted half, and what happened to it."""

    half: Half
    checks: list[int] = field(default_factory=list)
    put_offs: list[int] = field(default_factory=list)
    patience: list[int] = field(default_factory=list)
    """The put-offs past the retention that count: when the one before did so, too (R5, R8)."""
    waits: list[int] = field(default_factory=list)
    """The horizons at which its last check did not count yet (R5)."""
    ended: str = "PENDING"
    ended_ms: int = -1


def latest_of(ticks: Sequence[Tick]) -> list[Tick]:
    """Return the last tick of each partition."""
    places = {(tick.source, tick.partition) for tick in ticks}
    return [[tick for tick in ticks if (tick.source, tick.partition) == place][-1] for place in places]


def horizon_of(ticks: Sequence[Tick]) -> int | None:
    """Return the smallest time over all partitions of their latest ticks; None while a partition has no tick."""
    latest = latest_of(ticks)
    for source in Source:
        heard = [tick.partition for tick in latest if tick.source is source]
        sizes = [tick.partitions for tick in latest if tick.source is source]
        if not heard or set(range(max(sizes))) - set(heard):
            return None
    return min(tick.at_ms for tick in latest)


def read_mark_of(batches: Sequence[Batch], horizon_ms: int) -> int:
    """Return the smallest time over all partitions of the latest tick or record with the broker's time."""
    heard = {(tick.source, tick.partition): tick.at_ms for tick in latest_of([tick for batch in batches for tick in batch.ticks])}
    read: dict[SourcePartition, int] = {}
    for batch in batches:
        read |= batch.read_ms
    return max(horizon_ms, min(max(heard.get(place, 0), read.get(place, 0)) for place in heard.keys() | read.keys()))


def away_of(batches: Sequence[Batch]) -> tuple[str, ...]:
    """Return the groups that the latest tick of any partition names (R15)."""
    return tuple({group for tick in latest_of([tick for batch in batches for tick in batch.ticks]) for group in tick.absent_groups})


def asked_of(batches: Sequence[Batch]) -> int:
    """Return the smallest of what the latest tick of each partition says (R5)."""
    return min(tick.asked_ms for tick in latest_of([tick for batch in batches for tick in batch.ticks]))


def all_outcomes(batches: Sequence[Batch], rules: Rules) -> tuple[list[str], dict[str, str]]:
    """Return every outcome as a line of text, sorted, and the phase of each id that is still known at the end."""
    ids = {record.transaction_id for batch in batches for record in (*batch.halves, *batch.ops)}
    told: list[str] = []
    phases: dict[str, str] = {}
    for transaction_id in ids:
        lines, phase = _one_id(transaction_id, batches, rules)
        told.extend(lines)
        if phase is not None:
            phases[transaction_id] = phase
    return sorted(told), phases


def _one_id(me: str, batches: Sequence[Batch], rules: Rules) -> tuple[list[str], str | None]:
    told: list[str] = []
    life: Life | None = None
    waiting: list[Op] = []
    horizon_ms = read_mark_ms = 0
    for number, batch in enumerate(batches):
        came = False
        for half in sorted((half for half in batch.halves if half.transaction_id == me), key=lambda h: (h.at_ms, h.partition, h.offset)):
            came = True
            if life is None:
                life = Life(half)
            elif half.producer_group != life.half.producer_group:
                told.append(f"quarantine {me} id_conflict")
            elif half.incarnation < life.half.incarnation:
                told.append(f"quarantine {me} stale_incarnation")
            elif half.incarnation > life.half.incarnation:
                if life.ended == "DISCARDED":
                    life = Life(half)
                else:
                    told.append(f"quarantine {me} incarnation_refused")
        ops = [op._replace(due_ms=max(op.at_ms, read_mark_ms)) for op in batch.ops if op.transaction_id == me]
        if came:
            ops, waiting = ops + waiting, []
        for op in sorted(ops, key=lambda o: (o.at_ms, o.partition, o.offset)):
            told.extend(_one_op(me, op, life, waiting, read_mark_ms))
        now_ms = horizon_of([tick for earlier in batches[: number + 1] for tick in earlier.ticks])
        if now_ms is None:
            continue
        # Neither goes back, though a broker's clock may.
        horizon_ms = max(horizon_ms, now_ms)
        read_mark_ms = max(read_mark_ms, read_mark_of(batches[: number + 1], horizon_ms))
        if life is not None and life.ended == "PENDING":
            told.extend(_due(me, life, horizon_ms, batches[: number + 1], rules))
        if life is not None and life.ended != "PENDING" and read_mark_ms > life.ended_ms + rules.resolved_retention_ms:
            life = None
        for op in list(waiting):
            if read_mark_ms > op.due_ms + rules.timeout_ms:
                waiting.remove(op)
                told.append(f"quarantine {me} orphan_op")
    return told, life.ended if life is not None else None


def _one_op(me: str, op: Op, life: Life | None, waiting: list[Op], read_mark_ms: int) -> list[str]:
    if life is not None and op.producer_group != life.half.producer_group:
        return [f"quarantine {me} group_mismatch"]
    if op.action is LocalTransactionState.UNKNOWN:
        return []
    if life is None or op.incarnation > life.half.incarnation:
        waiting.append(op)
        return []
    if op.incarnation < life.half.incarnation or life.ended == "DISCARDED":
        return [f"quarantine {me} late_verdict"]
    verdict = "COMMITTED" if op.action is LocalTransactionState.COMMIT else "ROLLED_BACK"
    if life.ended == "PENDING":
        life.ended, life.ended_ms = verdict, max(op.at_ms, read_mark_ms)
        return [f"commit {me} @{op.at_ms}"] if verdict == "COMMITTED" else []
    return [] if life.ended == verdict else [f"quarantine {me} conflicting_verdict"]


def _due(me: str, life: Life, horizon_ms: int, batches: Sequence[Batch], rules: Rules) -> list[str]:
    def age(at_ms: int) -> int:
        return at_ms - life.half.at_ms

    def is_past(at_ms: int) -> bool:
        return age(at_ms) > rules.half_retention_ms

    before = [*life.checks, *life.put_offs]
    looks = [at_ms + max(1, rules.check_interval_ms // 8) for at_ms in life.waits]
    first_ms = life.half.at_ms + min(life.half.immunity_ms or rules.timeout_ms, rules.half_retention_ms) + 1
    due_ms = max([*looks, max(before) + rules.check_interval_ms]) if before else first_ms
    if horizon_ms < due_ms:
        return []
    checks, asked_ms = len(life.checks), asked_of(batches)
    if checks and life.checks[-1] > asked_ms:
        life.waits.append(horizon_ms)
        return []
    if life.half.producer_group in away_of(batches):
        is_patient = is_past(horizon_ms) and (not life.patience or life.patience[-1] <= asked_ms)
        ends = is_patient and len(life.patience) == rules.check_max
        if not ends:
            life.patience += [horizon_ms] if is_patient else []
            life.put_offs.append(horizon_ms)
            return []
    else:
        last_call_was_made = any(map(is_past, life.checks))
        ends = checks == rules.check_max or last_call_was_made
    if ends:
        life.ended, life.ended_ms = "DISCARDED", horizon_ms
        return [f"discard {me} {'check_max' if checks == rules.check_max else 'expired'} #{checks} @{horizon_ms}"]
    life.checks.append(horizon_ms)
    return [f"check {me} #{checks + 1} @{horizon_ms}"]
