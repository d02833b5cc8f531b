"""The rows of `messages` in Arrow: their columns, their order, and which of them a reader wants."""

# mypy: disable-error-code=import-untyped

from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from halfway.schemas.bookmark import Bookmark

MESSAGE_SCHEMA = pa.schema(
    {
        "transaction_id": pa.string(),
        "topic": pa.string(),
        "queue_id": pa.int32(),
        "tags": pa.large_string(),
        "keys": pa.large_string(),
        "body": pa.large_binary(),
        "properties": pa.map_(pa.large_string(), pa.large_string()),
        "producer_group": pa.string(),
        "born_at": pa.timestamp("us", "UTC"),
        "half_at": pa.timestamp("us", "UTC"),
        "committed_at": pa.timestamp("us", "UTC"),
        "check_times": pa.int32(),
        "incarnation": pa.int32(),
        "half_partition": pa.int32(),
        "half_offset": pa.int64(),
        "op_partition": pa.int32(),
        "op_offset": pa.int64(),
        "epoch": pa.int32(),
        "batch_id": pa.int64(),
    }
)
"""The columns of `messages`. `tests/unit/clients/reading` compares them with those that the job writes.

What producers may make long has offsets of 64 bits: a batch of the job may have more than 2 GiB of it.
"""
PLACE = ["epoch", "batch_id"]
"""The columns of a row's bookmark."""
_ORDER = (*PLACE, "op_partition", "op_offset", "half_partition", "half_offset")


class Wanted(NamedTuple):
    """What a reader wants, and how much of it at a time."""

    topic: str | None
    tags: frozenset[str]
    """Any of these; empty for all."""
    max_rows: int
    max_bytes: int

    def of(self, rows: pa.Table) -> pa.Table:
        """Return the rows that the reader wants. A message that was erased has no body, and nobody wants it."""
        rows = rows.filter(pc.is_valid(rows["body"]))
        if self.topic is not None:
            rows = rows.filter(pc.equal(rows["topic"], self.topic))
        if self.tags:
            rows = rows.filter(pc.is_in(rows["tags"], pa.array(sorted(self.tags))))
        return rows


def after(rows: pa.Table, bookmark: Bookmark) -> pa.ChunkedArray:
    """Return for each row whether it comes after a bookmark."""
    epoch, batch_id = rows["epoch"], rows["batch_id"]
    return pc.or_(pc.greater(epoch, bookmark.epoch), pc.and_(pc.equal(epoch, bookmark.epoch), pc.greater(batch_id, bookmark.batch_id)))


def last_in(rows: pa.Table) -> Bookmark | None:
    """Return the greatest bookmark of rows; None if there are none."""
    if not rows.num_rows:
        return None
    epoch = pc.max(rows["epoch"]).as_py()
    return Bookmark(epoch, pc.max(rows["batch_id"].filter(pc.equal(rows["epoch"], epoch))).as_py())


def in_order(rows: pa.Table) -> pa.Table:
    """Return rows by batch, op partition and op offset; those without an op's place by that of their half."""
    keys = pa.table({name: pc.fill_null(rows[name], -1) for name in _ORDER})
    return rows.take(pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in _ORDER]))


def complete(rows: pa.Table, names: Sequence[str] = MESSAGE_SCHEMA.names) -> pa.Table:
    """Return rows with all these columns of MESSAGE_SCHEMA. Rows without `epoch` are of a table's first checkpoint."""
    kinds = pa.schema([MESSAGE_SCHEMA.field(name) for name in names])
    columns = [rows[kind.name] if kind.name in rows.column_names else pa.nulls(rows.num_rows, kind.type) for kind in kinds]
    rows = pa.table(columns, names=names).cast(kinds)
    return rows.set_column(rows.schema.get_field_index("epoch"), MESSAGE_SCHEMA.field("epoch"), pc.fill_null(rows["epoch"], 0))
