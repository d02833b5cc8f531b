"""A bucket's state between batches: entries as columns, of which each batch turns only the affected ones into objects.

A batch affects a transaction whose id it holds, a waiting verdict whose half it holds, and any entry whose `due_ms` has
been reached: by the horizon if it is pending, or else by the read mark. The rules are not needed to tell.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc

from halfway.schemas.headers import LocalTransactionState, Source
from halfway.schemas.outcomes import Kind, Phase, Reason
from halfway.schemas.reports import BucketReport, count_latencies
from halfway.schemas.state_format import (
    ENTRY_SCHEMA,
    FORMAT_VERSION,
    NAME_TYPE,
    WAITING_COMMIT,
    WAITING_ROLLBACK,
    decode_payload,
    encode_payload,
)
from halfway.transforms.horizon import Clock, Floor, Groups, Times
from halfway.transforms.protocol import Batch, BucketState, Half, Op, Outcome, Rules, Transaction, resolve

_PHASES = {int(phase): phase for phase in Phase}
_WAITING_ENTRY = {LocalTransactionState.COMMIT: WAITING_COMMIT, LocalTransactionState.ROLLBACK: WAITING_ROLLBACK}
_WAITING_ACTION = {entry: action for action, entry in _WAITING_ENTRY.items()}


@dataclass(frozen=True, slots=True)
class Bucket:
    """The state of one bucket."""

    entries: pa.Table = field(default_factory=ENTRY_SCHEMA.empty_table)
    """ENTRY_SCHEMA, in one chunk."""
    clock: Clock = field(default_factory=Clock)
    totals: Counter[str] = field(default_factory=Counter)
    """Counted since the checkpoint began, as in `BucketReport`."""

    @classmethod
    def decode(cls, format_version: int, payload: bytes) -> "Bucket":
        """Read a bucket from its state row.

        Raises:
            StateFormatError: see `decode_payload`.
        """
        entries, metadata = decode_payload(format_version, payload)
        return cls(entries, _decode_clock(metadata["clock"]), Counter(metadata["totals"]))

    def encode(self) -> tuple[int, bytes]:
        """Return the state row (`STATE_SCHEMA`)."""
        return FORMAT_VERSION, encode_payload(self.entries, {"clock": _encode_clock(self.clock), "totals": self.totals})

    def after(self, batch: Batch, rules: Rules) -> tuple["Bucket", list[Outcome], Counter[str]]:
        """Apply a batch. Return the bucket after it, the outcomes, and what this batch counted."""
        clock = self.clock.after(batch.ticks, batch.read_ms)
        untouched, affected = self._split(batch, clock)
        resolution = resolve(_to_state(self.clock, affected), batch, rules, clock)
        entries = _join(untouched, _to_entries(resolution.state))
        totals = self.totals + resolution.counts + _further_counts(resolution.outcomes)
        return Bucket(entries, clock, totals), resolution.outcomes, resolution.counts

    def pending(self) -> pa.Table:
        """Return the pending entries (ENTRY_SCHEMA)."""
        return self.entries.filter(pc.equal(self.entries["entry"], int(Phase.PENDING)))

    def report(self, number: int, counts: Counter[str]) -> BucketReport:
        """Return the report of this bucket, whose number is `number`, after a batch that counted `counts`."""
        pending = self.pending()
        return BucketReport(
            bucket=number,
            horizon_ms=self.clock.horizon_ms(),
            pending=pending.num_rows,
            checked=pc.sum(pc.greater(pending["check_times"], 0)).as_py() or 0,
            oldest_ms=pc.min(pending["start_ms"]).as_py(),
            entries=self.entries.num_rows,
            absent_groups=len(self.clock.absent_groups()),
            counts=counts,
            totals=self.totals,
            read_digest=read_digest(self.clock),
        )

    def _split(self, batch: Batch, clock: Clock) -> tuple[pa.Table, pa.Table]:
        """Return the entries that the batch leaves untouched, and those that it affects.

        Only its half and time affect a waiting verdict. Further verdicts of its id do not: there may be very many.
        A settled entry that is due to be forgotten, and whose id is not in the batch, is in neither table. Dropping it
        here is what `resolve` would do, without an object for each entry.
        """
        pending = pc.equal(self.entries["entry"], int(Phase.PENDING))
        waits = pc.greater_equal(self.entries["entry"], WAITING_COMMIT)
        touched = self._has_id_of((*batch.halves, *batch.ops, *batch.lost))
        if pc.any(waits).as_py():  # Verdicts seldom wait, and the second search takes 2 ms.
            touched = pc.and_(touched, pc.or_(pc.invert(waits), self._has_id_of(batch.halves)))
        horizon_ms, read_mark_ms = clock.horizon_ms(), clock.read_mark_ms()
        if horizon_ms is None or read_mark_ms is None:
            return self.entries.filter(pc.invert(touched)), self.entries.filter(touched)
        due = pc.less_equal(self.entries["due_ms"], pc.if_else(pending, horizon_ms, read_mark_ms))
        affected = pc.or_(touched, pc.and_(due, pc.or_(pending, waits)))
        return self.entries.filter(pc.invert(pc.or_(touched, due))), self.entries.filter(affected)

    def _has_id_of(self, records: Iterable[Any]) -> pa.ChunkedArray:
        """Return for each entry whether its id is that of one of the records."""
        ids = pa.array({record.transaction_id for record in records}, pa.string())
        return pc.is_in(self.entries["transaction_id"], value_set=ids)


def _further_counts(outcomes: Sequence[Outcome]) -> Counter[str]:
    """Count what only the metrics need: discards by reason, and the time from half to commit (in record timestamps)."""
    discards = Counter([str(Reason(outcome.reason)) for outcome in outcomes if outcome.kind is Kind.DISCARD])
    return discards + count_latencies([outcome.decided_ms - outcome.at_ms for outcome in outcomes if outcome.kind is Kind.COMMIT])


def _to_state(clock: Clock, entries: pa.Table) -> BucketState:
    """Turn entries (ENTRY_SCHEMA) into objects."""
    transactions: dict[str, Transaction] = {}
    waiting: dict[str, list[Op]] = {}
    for row in zip(*(column.to_pylist() for column in entries.columns), strict=True):
        transaction_id, entry, group, topic, incarnation, start_ms, partition, offset, binding, *timer = row
        if entry in _PHASES:
            half = Half(transaction_id, group, topic, incarnation, start_ms, partition, offset, binding)
            check_times, due_ms, *late = timer
            transactions[transaction_id] = Transaction(_PHASES[entry], half, due_ms, check_times, *late)
        else:
            _, due_ms, *_ = timer
            op = Op(transaction_id, group, incarnation, _WAITING_ACTION[entry], start_ms, partition, offset, binding, due_ms)
            waiting.setdefault(transaction_id, []).append(op)
    return BucketState(clock, transactions, waiting)


def _to_entries(state: BucketState) -> list[pa.Table]:
    """Turn objects into entries (ENTRY_SCHEMA): a table for the transactions, and one for the waiting verdicts."""
    tables = []
    if state.transactions:
        phases, halves, dues_ms, check_times, *late = zip(*state.transactions.values(), strict=True)
        ids, groups, topics, incarnations, *places, _, _, _ = zip(*halves, strict=True)
        tables.append(_table(ids, phases, groups, topics, incarnations, *places, check_times, dues_ms, *late))
    ops = [op for of_one_id in state.waiting.values() for op in of_one_id]
    if ops:
        ids, groups, incarnations, actions, *places, orphans_ms = zip(*ops, strict=True)
        entries = [_WAITING_ENTRY[action] for action in actions]
        no_topics, zeros, no_checks = [""] * len(ops), [0] * len(ops), [-1] * len(ops)
        columns = (ids, entries, groups, no_topics, incarnations, *places, zeros, orphans_ms, no_checks, zeros, no_checks)
        tables.append(_table(*columns))
    return tables


def _table(*columns: Sequence[Any]) -> pa.Table:
    arrays = [_to_array(values, column) for values, column in zip(columns, ENTRY_SCHEMA, strict=True)]
    return pa.table(arrays, schema=ENTRY_SCHEMA)


def _to_array(values: Sequence[Any], column: pa.Field) -> pa.Array:
    if column.type == NAME_TYPE:
        return pa.array(values, pa.string()).dictionary_encode()
    return pa.array(values, column.type)


def _join(untouched: pa.Table, changed: Sequence[pa.Table]) -> pa.Table:
    """Return all entries in one chunk. Names that no entry has any more are dropped once they are most of them."""
    joined = pa.concat_tables([untouched, *changed]).unify_dictionaries().combine_chunks()
    for name in ("producer_group", "topic"):
        [column] = joined[name].chunks or [pa.array([], NAME_TYPE)]
        if len(column.dictionary) > 2 * len(column.unique()) + 16:
            compact = column.cast(pa.string()).dictionary_encode()
            joined = joined.set_column(joined.schema.get_field_index(name), ENTRY_SCHEMA.field(name), compact)
    return joined


def read_digest(clock: Clock) -> int:
    """Return a number that is another one if other records were read, and the same in each process (R16)."""
    return crc32(repr([sorted(clock.last_ms(source).items()) for source in Source]).encode())


def _encode_clock(clock: Clock) -> dict[str, Any]:
    """Return the clock under the names of the stored format."""
    return {
        "heard_ms": _encode_times(clock.tick_ms),
        "read_ms": _encode_times(clock.read_ms),
        "asked_ms": _encode_times(clock.asked_ms),
        "sizes": _encode_times(clock.partition_counts),
        "absent": _encode_groups(clock.absent),
        "floor_ms": clock.floor,
    }


def _decode_clock(stored: dict[str, Any]) -> Clock:
    return Clock(
        tick_ms=_decode_times(stored["heard_ms"]),
        read_ms=_decode_times(stored["read_ms"]),
        asked_ms=_decode_times(stored["asked_ms"]),
        partition_counts=_decode_times(stored["sizes"]),
        absent=_decode_groups(*stored["absent"]),
        floor=Floor(*stored["floor_ms"]),
    )


def _encode_times(times_ms: Times) -> list[list[list[int]]]:
    """Return [partitions, times] of each topic: a list for each partition would take three times as long."""
    return [[list(times_ms[source]), list(times_ms[source].values())] for source in Source]


def _decode_times(stored: list[list[list[int]]]) -> Times:
    return {source: dict(zip(*of_topic, strict=True)) for source, of_topic in zip(Source, stored, strict=True)}


def _encode_groups(groups: Groups) -> list[Any]:
    """Return the distinct lists of groups, and [partitions, places in them] of each topic."""
    lists: dict[tuple[str, ...], int] = {}
    of_place = {source: {number: lists.setdefault(named, len(lists)) for number, named in groups[source].items()} for source in Source}
    return [list(lists), _encode_times(of_place)]


def _decode_groups(lists: list[list[str]], stored: list[list[list[int]]]) -> Groups:
    named = list(map(tuple, lists))
    return {source: {number: named[which] for number, which in of_topic.items()} for source, of_topic in _decode_times(stored).items()}
