"""A bucket's state between batches: columns at rest, and only what a batch concerns as objects.

Which entries a batch concerns needs no rule: those of an id it brings (verdicts that wait: of a half it brings), and those whose
`due_ms` the horizon has reached.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

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
from halfway.transforms.protocol import Batch, BucketState, Clock, Op, Outcome, Rules, Transaction, resolve

_PHASES = {int(phase): phase for phase in Phase}
_WAITING_ENTRY = {LocalTransactionState.COMMIT: WAITING_COMMIT, LocalTransactionState.ROLLBACK: WAITING_ROLLBACK}
_WAITING_ACTION = {entry: action for action, entry in _WAITING_ENTRY.items()}


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket: its entries (columns of ENTRY_SCHEMA), its clock, and its totals since the checkpoint began (see `BucketReport`)."""

    entries: pa.Table = field(default_factory=ENTRY_SCHEMA.empty_table)
    clock: Clock = field(default_factory=Clock)
    totals: Counter[str] = field(default_factory=Counter)

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
        """Apply a batch; return the bucket after it, the outcomes, and what this batch counted."""
        horizon_ms = self.clock.after(batch.ticks).horizon_ms()
        at_rest, concerned = self._split(batch, horizon_ms)
        state = _to_state(self.clock, concerned)
        resolution = resolve(state, batch, rules)
        entries = _join(at_rest, _to_entries(resolution.state, rules))
        totals = self.totals + resolution.counts + _further_counts(resolution.outcomes)
        return Bucket(entries, resolution.state.clock, totals), resolution.outcomes, resolution.counts

    def pending(self) -> pa.Table:
        """Return the entries that are pending."""
        return self.entries.filter(pc.equal(self.entries["entry"], int(Phase.PENDING)))

    def report(self, number: int, counts: Counter[str]) -> BucketReport:
        """Return what this bucket, the `number`th, has to tell after a batch that counted `counts`."""
        pending = self.pending()
        return BucketReport(
            bucket=number,
            horizon_ms=self.clock.horizon_ms(),
            pending=pending.num_rows,
            checked=pc.sum(pc.greater(pending["check_times"], 0)).as_py() or 0,
            oldest_ms=pc.min(pending["start_ms"]).as_py(),
            remembered=self.entries.num_rows,
            absent_groups=len(self.clock.absent_groups()),
            counts=counts,
            totals=self.totals,
        )

    def _split(self, batch: Batch, horizon_ms: int | None) -> tuple[pa.Table, pa.Table]:
        """Return the entries that the batch leaves alone, and those it concerns.

        A verdict that waits is concerned by its half and by time alone, not by further verdicts: of those there may be very many.
        Settled entries that nothing was read for, and whose time to be forgotten has come, are in neither: dropping them here
        is what `resolve` would do, without an object for each.
        """
        waits = pc.greater_equal(self.entries["entry"], WAITING_COMMIT)
        touched = self._is_of((*batch.halves, *batch.ops, *batch.lost))
        if pc.any(waits).as_py():  # seldom, and a second search takes 2 ms
            touched = pc.and_(touched, pc.or_(pc.invert(waits), self._is_of(batch.halves)))
        if horizon_ms is None:
            return self.entries.filter(pc.invert(touched)), self.entries.filter(touched)
        due = pc.less_equal(self.entries["due_ms"], horizon_ms)
        settled = pc.and_(pc.greater(self.entries["entry"], int(Phase.PENDING)), pc.invert(waits))
        concerned = pc.or_(touched, pc.and_(due, pc.invert(settled)))
        return self.entries.filter(pc.invert(pc.or_(touched, due))), self.entries.filter(concerned)

    def _is_of(self, records: Iterable[Any]) -> pa.ChunkedArray:
        """Return for each entry whether one of the records is of its id."""
        ids = pa.array({record.transaction_id for record in records}, pa.string())
        return pc.is_in(self.entries["transaction_id"], value_set=ids)


def _further_counts(outcomes: Iterable[Outcome]) -> Counter[str]:
    """Count what only the metrics tell apart: discards by their reason, and how long commits took (in record timestamps)."""
    discards = Counter(str(Reason(outcome.reason)) for outcome in outcomes if outcome.kind is Kind.DISCARD)
    return discards + count_latencies(outcome.decided_ms - outcome.at_ms for outcome in outcomes if outcome.kind is Kind.COMMIT)


def _to_state(clock: Clock, entries: pa.Table) -> BucketState:
    transactions: dict[str, Transaction] = {}
    waiting: dict[str, list[Op]] = {}
    for row in zip(*(column.to_pylist() for column in entries.columns), strict=True):
        transaction_id, entry, group, topic, incarnation, start_ms, partition, offset, check_times, due_ms = row
        if entry in _PHASES:
            transactions[transaction_id] = Transaction(
                _PHASES[entry], group, topic, incarnation, start_ms, partition, offset, check_times, due_ms
            )
        else:
            op = Op(transaction_id, group, incarnation, _WAITING_ACTION[entry], start_ms, partition, offset)
            waiting.setdefault(transaction_id, []).append(op)
    return BucketState(clock, transactions, waiting)


def _to_entries(state: BucketState, rules: Rules) -> pa.Table:
    rows: list[tuple[Any, ...]] = [(transaction_id, *transaction) for transaction_id, transaction in state.transactions.items()]
    for ops in state.waiting.values():
        for op in ops:
            pointer = (op.incarnation, op.at_ms, op.partition, op.offset)
            rows.append((op.transaction_id, _WAITING_ENTRY[op.action], op.producer_group, "", *pointer, 0, op.at_ms + rules.timeout_ms + 1))
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(ENTRY_SCHEMA)
    arrays = [_to_array(values, column) for values, column in zip(columns, ENTRY_SCHEMA, strict=True)]
    return pa.table(arrays, schema=ENTRY_SCHEMA)


def _to_array(values: tuple[Any, ...], column: pa.Field) -> pa.Array:
    if column.type == NAME_TYPE:
        return pa.array(values, pa.string()).dictionary_encode()
    return pa.array(values, column.type)


def _join(at_rest: pa.Table, changed: pa.Table) -> pa.Table:
    """Put both together in one chunk, with names that no entry has any more left out."""
    joined = pa.concat_tables([at_rest, changed]).unify_dictionaries().combine_chunks()
    for name in ("producer_group", "topic"):
        column = joined[name].combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = column.chunk(0) if column.num_chunks else pa.array([], NAME_TYPE)
        if len(column.dictionary) > 2 * len(column.unique()) + 16:
            compact = column.cast(pa.string()).dictionary_encode()
            joined = joined.set_column(joined.schema.get_field_index(name), ENTRY_SCHEMA.field(name), compact)
    return joined


def _encode_clock(clock: Clock) -> dict[str, Any]:
    return {
        "heard_ms": [[source, partition, at_ms] for (source, partition), at_ms in sorted(clock.heard_ms.items())],
        "partitions": [[source, at_ms, partitions] for source, (at_ms, partitions) in sorted(clock.partitions.items())],
        "latest": list(clock.latest),
    }


def _decode_clock(stored: dict[str, Any]) -> Clock:
    at_ms, source, partition, absent = stored["latest"]
    return Clock(
        heard_ms={(Source(source), partition): at_ms for source, partition, at_ms in stored["heard_ms"]},
        partitions={Source(source): (at_ms, partitions) for source, at_ms, partitions in stored["partitions"]},
        latest=(at_ms, Source(source), partition, tuple(absent)),
    )
