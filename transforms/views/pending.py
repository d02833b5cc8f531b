"""Reads what is pending from the state, for the commands and the notebooks.

It works on whole Arrow columns: a million pending transactions need no Python object each.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from halfway.schemas.outcomes import Phase
from halfway.schemas.reports import common_horizon_ms
from halfway.transforms.bucket import Bucket

PENDING_SCHEMA = pa.schema(
    [
        pa.field("transaction_id", pa.string(), nullable=False),
        pa.field("incarnation", pa.int32(), nullable=False),
        pa.field("producer_group", pa.string(), nullable=False),
        pa.field("topic", pa.string(), nullable=False),
        pa.field("start_ms", pa.int64(), nullable=False),
        pa.field("age_ms", pa.int64()),
        pa.field("check_times", pa.int32(), nullable=False),
        pa.field("next_due_ms", pa.int64(), nullable=False),
        pa.field("half_partition", pa.int32(), nullable=False),
        pa.field("half_offset", pa.int64(), nullable=False),
    ]
)
"""`start_ms` is the half's record timestamp. `age_ms` is the horizon minus `start_ms`: null while the horizon is
undefined, negative for a half that the horizon has not passed yet. `next_due_ms` is the first horizon at which the next
check, or the discard, is due."""


@dataclass(frozen=True, slots=True)
class PendingView:
    """What the states of all buckets hold."""

    transactions: pa.Table
    """PENDING_SCHEMA, oldest first."""
    horizon_ms: int | None
    """The smallest horizon of all buckets. None if one bucket has none or there is no state; then nothing is due."""
    absent_groups: frozenset[str]
    """The producer groups that are away or behind, as the latest ticks say. Their checks are put off (R15)."""
    totals: Counter[str]
    """The counts since the checkpoint began, by `halfway.schemas.outcomes.Count` or the reason of a quarantine."""
    waiting: int
    """Number of verdicts that wait for their half (R10)."""
    remembered: int
    """Number of settled ids that are not forgotten yet (R11)."""

    def find(self, transaction_id: str) -> dict[str, Any] | None:
        """Return the pending transaction with this id, a row of PENDING_SCHEMA; None if there is none."""
        found = self.transactions.filter(pc.equal(self.transactions["transaction_id"], transaction_id)).to_pylist()
        return found[0] if found else None


@dataclass(frozen=True, slots=True)
class GroupPending:
    """What is pending of one producer group."""

    producer_group: str
    pending: int
    """Number of its pending transactions."""
    oldest_age_ms: int | None
    """Age of the oldest one; None while the horizon is undefined."""
    most_checks: int
    """The largest number of checks that one of them has had."""
    is_absent: bool
    """True if the group cannot answer, as the latest ticks say: no instance runs, or it is behind its checks (R15)."""


def view_pending(states: Iterable[tuple[int, bytes]]) -> PendingView:
    """Decode the states of buckets.

    Args:
        states: one row per bucket (`STATE_SCHEMA`): format version and payload.

    Raises:
        StateFormatError: a row is damaged, or another version of Halfway wrote it.
    """
    tables, horizons, totals = [PENDING_SCHEMA.empty_table()], [], Counter[str]()
    absent_groups: set[str] = set()
    settled_or_waiting = remembered = 0
    for format_version, payload in states:
        bucket = Bucket.decode(format_version, payload)
        horizon_ms = bucket.clock.horizon_ms()
        pending = bucket.pending()
        tables.append(_to_view(pending, horizon_ms))
        horizons.append(horizon_ms)
        totals.update(bucket.totals)
        absent_groups |= bucket.clock.absent_groups()
        settled_or_waiting += bucket.entries.num_rows - pending.num_rows
        remembered += pc.sum(pc.is_in(bucket.entries["entry"], value_set=_SETTLED)).as_py() or 0
    return PendingView(
        transactions=pa.concat_tables(tables).sort_by([("start_ms", "ascending"), ("transaction_id", "ascending")]),
        horizon_ms=common_horizon_ms(horizons),
        absent_groups=frozenset(absent_groups),
        totals=totals,
        waiting=settled_or_waiting - remembered,
        remembered=remembered,
    )


def pending_by_group(transactions: pa.Table, absent_groups: Collection[str]) -> list[GroupPending]:
    """Aggregate pending transactions by producer group.

    Args:
        transactions: PENDING_SCHEMA.
        absent_groups: the groups that are away or behind (R15).

    Returns:
        One entry per group, the group with the most pending transactions first.
    """
    counted = transactions.group_by("producer_group").aggregate([("age_ms", "max"), ("check_times", "max"), ("transaction_id", "count")])
    groups = [
        GroupPending(
            producer_group=row["producer_group"],
            pending=row["transaction_id_count"],
            oldest_age_ms=row["age_ms_max"],
            most_checks=row["check_times_max"],
            is_absent=row["producer_group"] in absent_groups,
        )
        for row in counted.to_pylist()
    ]
    return sorted(groups, key=lambda group: (-group.pending, group.producer_group))


def phase_of(states: Iterable[tuple[int, bytes]], transaction_id: str) -> Phase | None:
    """Return the phase of one transaction, or None if these buckets do not hold its half or have forgotten it (R11).

    Args:
        states: as for `view_pending`.
        transaction_id: the id.

    Raises:
        StateFormatError: a row is damaged, or another version of Halfway wrote it.
    """
    found = (row["entry"] for row in _entries_of(states, transaction_id) if row["entry"] in _PHASES)
    return next(map(Phase, found), None)


_PHASES = frozenset(int(phase) for phase in Phase)
_SETTLED = pa.array([int(phase) for phase in Phase if phase is not Phase.PENDING], pa.int8())


def _to_view(pending: pa.Table, horizon_ms: int | None) -> pa.Table:
    """Convert a bucket's pending entries from ENTRY_SCHEMA to PENDING_SCHEMA."""
    ages = pc.subtract(pa.scalar(horizon_ms, pa.int64()), pending["start_ms"])
    columns = {
        "transaction_id": pending["transaction_id"],
        "incarnation": pending["incarnation"],
        "producer_group": pending["producer_group"].cast(pa.string()),
        "topic": pending["topic"].cast(pa.string()),
        "start_ms": pending["start_ms"],
        "age_ms": ages,
        "check_times": pending["check_times"],
        "next_due_ms": pending["due_ms"],
        "half_partition": pending["partition"],
        "half_offset": pending["offset"],
    }
    return pa.table(columns, schema=PENDING_SCHEMA)


def is_signed(states: Iterable[tuple[int, bytes]], transaction_id: str) -> bool:
    """Return True if the half of a pending transaction is signed. `states` are as for `view_pending`."""
    return any(row["binding"] for row in _entries_of(states, transaction_id) if row["entry"] == Phase.PENDING)


def _entries_of(states: Iterable[tuple[int, bytes]], transaction_id: str) -> Iterator[dict[str, Any]]:
    """Yield what the states hold of one id (ENTRY_SCHEMA)."""
    for format_version, payload in states:
        entries = Bucket.decode(format_version, payload).entries
        yield from entries.filter(pc.equal(entries["transaction_id"], transaction_id)).to_pylist()
