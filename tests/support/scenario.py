"""Scenarios for the protocol core: a list of batches, each a list of records made by the functions below."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from halfway.schemas.headers import LocalTransactionState, Source
from halfway.schemas.outcomes import Kind
from halfway.schemas.tick_value import ALL_ASKED
from halfway.transforms.bucket import Bucket
from halfway.transforms.horizon import SourcePartition, Tick
from halfway.transforms.protocol import Batch, BucketState, Half, Lost, Op, Outcome, Rules, resolve

RULES = Rules(timeout_ms=6_000, check_interval_ms=30_000, check_max=2, half_retention_ms=200_000, resolved_retention_ms=60_000)

Record = Half | Op | Lost | list[Tick] | dict[SourcePartition, int]
BUCKETS = 3


def half(
    transaction_id: str,
    at_ms: int = 0,
    *,
    group: str = "g",
    incarnation: int = 0,
    immunity_ms: int = 0,
    discarded_ms: int = 0,
    partition: int = 0,
    offset: int = 0,
    binding: int = 0,
    valid_ms: int = 0,
) -> Half:
    return Half(transaction_id, group, "orders", incarnation, at_ms, partition, offset, binding, immunity_ms, discarded_ms, valid_ms)


def _op(action: LocalTransactionState, transaction_id: str, at_ms: int, group: str, incarnation: int, partition: int, offset: int) -> Op:
    return Op(transaction_id, group, incarnation, action, at_ms, partition, offset)


def commit(transaction_id: str, at_ms: int = 1, *, group: str = "g", incarnation: int = 0, partition: int = 0, offset: int = 0) -> Op:
    return _op(LocalTransactionState.COMMIT, transaction_id, at_ms, group, incarnation, partition, offset)


def rollback(transaction_id: str, at_ms: int = 1, *, group: str = "g", incarnation: int = 0, partition: int = 0, offset: int = 0) -> Op:
    return _op(LocalTransactionState.ROLLBACK, transaction_id, at_ms, group, incarnation, partition, offset)


def unknown(transaction_id: str, at_ms: int = 1, *, group: str = "g", incarnation: int = 0, partition: int = 0, offset: int = 0) -> Op:
    return _op(LocalTransactionState.UNKNOWN, transaction_id, at_ms, group, incarnation, partition, offset)


def lost(transaction_id: str, at_ms: int = 1, *, partition: int = 0, offset: int = 0) -> Lost:
    return Lost(transaction_id, partition, offset, at_ms)


def tick(at_ms: int, *, away: Iterable[str] = (), asked: int = ALL_ASKED) -> list[Tick]:
    """Move the horizon of a half and an op topic with one partition each."""
    return [Tick(source, 0, 1, at_ms, tuple(away), asked) for source in Source]


def read(at_ms: int) -> dict[SourcePartition, int]:
    """Move the read mark of the same topics without a tick, as a record of a backlog does."""
    return {(source, 0): at_ms for source in Source}


def to_batch(records: Iterable[Record]) -> Batch:
    """Sort records by their kind."""
    halves, ops, losts, ticks, read_ms = [], [], [], [], {}
    for record in records:
        if isinstance(record, Half):
            halves.append(record)
        elif isinstance(record, Op):
            ops.append(record)
        elif isinstance(record, Lost):
            losts.append(record)
        elif isinstance(record, list):
            ticks.extend(record)
        else:
            read_ms.update(record)
    return Batch(halves, ops, losts, ticks, read_ms=read_ms)


def told(outcome: Outcome) -> str:
    """Return an outcome as a line that a reader can compare with docs/rules.md."""
    match outcome.kind:
        case Kind.COMMIT:
            return f"commit {outcome.transaction_id} @{outcome.decided_ms}"
        case Kind.CHECK:
            return f"check {outcome.transaction_id} #{outcome.check_times} @{outcome.decided_ms}"
        case Kind.DISCARD:
            return f"discard {outcome.transaction_id} {outcome.reason} #{outcome.check_times} @{outcome.decided_ms}"
        case _:
            return f"quarantine {outcome.transaction_id} {outcome.reason}"


@dataclass(frozen=True)
class Run:
    """The result of a scenario: the outcomes of each batch as lines, all counts, and the final state."""

    batches: list[list[str]]
    counts: Counter[str]
    phases: dict[str, str]
    waiting: dict[str, int]
    state: BucketState

    @property
    def told(self) -> list[str]:
        return [line for batch in self.batches for line in batch]


def run(batches: Iterable[Iterable[Record]], rules: Rules = RULES) -> Run:
    """Play batches into the protocol core."""
    state, counts, all_told = BucketState(), Counter[str](), []
    for records in batches:
        resolution: Any = resolve(state, to_batch(records), rules)
        state = resolution.state
        counts += resolution.counts
        all_told.append([told(outcome) for outcome in resolution.outcomes])
    phases = {transaction_id: known.phase.name for transaction_id, known in state.transactions.items()}
    return Run(all_told, counts, phases, {transaction_id: len(ops) for transaction_id, ops in state.waiting.items()}, state)


def bucket_of(record: Half | Op | Lost) -> int:
    """Return the bucket of a record's id. It is not the job's (`transforms/packing.py`)."""
    return sum(record.transaction_id.encode()) % BUCKETS


def states_after(batches: Iterable[Iterable[Record]]) -> tuple[list[tuple[int, bytes]], list[BucketState]]:
    """Play batches into encoded buckets, as the job does, and into the protocol core. Time goes to every bucket.

    Returns:
        (bucket, payload) of each state row, and the core's state of each bucket.
    """
    buckets = [Bucket() for _ in range(BUCKETS)]
    plain = [BucketState() for _ in range(BUCKETS)]
    for records in batches:
        for number in range(BUCKETS):
            mine = to_batch(record for record in records if isinstance(record, list | dict) or bucket_of(record) == number)
            buckets[number] = buckets[number].after(mine, RULES)[0]
            plain[number] = resolve(plain[number], mine, RULES).state
    return [bucket.encode() for bucket in buckets], plain
