"""Tables of committed messages, written with delta-rs: for tests of readers that need neither Spark nor Kafka."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import WriterProperties, write_deltalake

from halfway.clients.reading.committed import MessageBatch
from halfway.clients.reading.message_rows import MESSAGE_SCHEMA
from halfway.schemas.bookmark import Bookmark

STATISTICS = "delta.dataSkippingStatsColumns"
AT_US = 1_700_000_000_000_000


def row(at: Bookmark | Sequence[int], op_offset: int, **changes: Any) -> dict[str, Any]:
    """Return a row of `messages`: the commit at `op_offset` of op partition 0, written by a batch."""
    epoch, batch_id = at
    return {
        "transaction_id": f"t{op_offset}",
        "topic": "orders",
        "queue_id": 0,
        "tags": "paid",
        "keys": None,
        "body": str(op_offset).encode(),
        "properties": [("trace", "x")],
        "producer_group": "g",
        "born_at": AT_US,
        "half_at": AT_US,
        "committed_at": AT_US,
        "check_times": 0,
        "incarnation": 0,
        "half_partition": 0,
        "half_offset": op_offset,
        "op_partition": 0,
        "op_offset": op_offset,
        "epoch": epoch,
        "batch_id": batch_id,
        **changes,
    }


def message_rows(at: Bookmark, count: int, **changes: Any) -> pa.Table:
    """Return the rows of a batch (MESSAGE_SCHEMA)."""
    return pa.Table.from_pylist([row(at, number, **changes) for number in range(count)], schema=MESSAGE_SCHEMA)


def batch_at(at: Sequence[int], after: Bookmark | None = None) -> MessageBatch:
    """Return a batch as a reader yields it, with one message."""
    bookmark = Bookmark(*at)
    return MessageBatch(bookmark, message_rows(bookmark, 1), after)


def append(
    folder: Path | str, rows: Iterable[dict[str, Any]], storage_options: dict[str, str] | None = None, row_group: int | None = None
) -> None:
    """Append one file of rows to a table, which is made if need be, as the job does; in groups of `row_group` rows."""
    write_deltalake(
        str(folder),
        pa.Table.from_pylist(list(rows), schema=MESSAGE_SCHEMA),
        mode="append",
        configuration={STATISTICS: "topic,epoch,batch_id"},
        storage_options=storage_options,
        writer_properties=WriterProperties(max_row_group_size=row_group) if row_group else None,
    )
