"""What is pending, told from the state: the one view that the command `halfway pending` and the notebooks share.

It works on whole Arrow columns, so that a million pending transactions take no object each.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from halfway.schemas.outcomes import Phase
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
"""`start_ms` is the half's record timestamp, `age_ms` the horizon less that (null while the horizon is undefined; below 0 for a half
that the horizon has not passed yet), `next_due_ms` the first horizon at which the next check, or the discard, is due."""


@dataclass(frozen=True, slots=True)
class PendingView:
    """All that the buckets' states say of what is pending."""

    transactions: pa.Table
    """PENDING_SCHEMA, oldest first."""
    horizon_ms: int | None
    """The smallest over the buckets; None while it is undefined in one, or there is no state yet: nothing is due then."""
    absent_groups: frozenset[str]
    """The producer groups that are away, as the latest tick says: their checks are put off (R15)."""
    totals: Counter[str]
    """What was counted since the checkpoint began, by `halfway.schemas.outcomes.Count` or the reason of a quarantine."""
    waiting: int
    """Verdicts that wait for their half (R10)."""
    remembered: int
    """Ids that are settled and not forgotten yet (R11)."""


def view_pending(states: Iterable[tuple[int, bytes]]) -> PendingView:
    """Return what is pending in these buckets.

    Args:
        states: one row a bucket (`STATE_SCHEMA`): format version and payload.

    Raises:
        StateFormatError: a row was written by a newer version, or is damaged.
    """
    tables, horizons, totals = [PENDING_SCHEMA.empty_table()], [], Counter[str]()
    latest: tuple[int, frozenset[str]] = (-1, frozenset())
    settled_or_waiting = remembered = 0
    for format_version, payload in states:
        bucket = Bucket.decode(format_version, payload)
        horizon_ms = bucket.clock.horizon_ms()
        pending = bucket.pending()
        tables.append(_to_view(pending, horizon_ms))
        horizons.append(horizon_ms)
        totals.update(bucket.totals)
        latest = max(latest, (bucket.clock.latest[0], bucket.clock.absent_groups()), key=lambda tick: tick[0])
        settled_or_waiting += bucket.entries.num_rows - pending.num_rows
        remembered += pc.sum(pc.is_in(bucket.entries["entry"], value_set=_SETTLED)).as_py() or 0
    known = [horizon_ms for horizon_ms in horizons if horizon_ms is not None]
    return PendingView(
        transactions=pa.concat_tables(tables).sort_by([("start_ms", "ascending"), ("transaction_id", "ascending")]),
        horizon_ms=min(known) if known and len(known) == len(horizons) else None,
        absent_groups=latest[1],
        totals=totals,
        waiting=settled_or_waiting - remembered,
        remembered=remembered,
    )


def phase_of(states: Iterable[tuple[int, bytes]], transaction_id: str) -> Phase | None:
    """Return where one transaction stands; None if these buckets do not know its half, or have forgotten it (R11).

    Args:
        states: as for `view_pending`.
        transaction_id: the id.

    Raises:
        StateFormatError: a row was written by a newer version, or is damaged.
    """
    for format_version, payload in states:
        entries = Bucket.decode(format_version, payload).entries
        for entry in entries["entry"].filter(pc.equal(entries["transaction_id"], transaction_id)).to_pylist():
            if entry in _PHASES:
                return Phase(entry)
    return None


_PHASES = frozenset(int(phase) for phase in Phase)
_SETTLED = pa.array([int(phase) for phase in Phase if phase is not Phase.PENDING], pa.int8())


def _to_view(pending: pa.Table, horizon_ms: int | None) -> pa.Table:
    """Return a bucket's pending entries (ENTRY_SCHEMA) as PENDING_SCHEMA."""
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
