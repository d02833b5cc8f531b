"""What a reader returns: committed messages, in batches that end at a bookmark."""

# mypy: disable-error-code=import-untyped

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from halfway.schemas.bookmark import BEGINNING, Bookmark

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedMessage:
    """A row of `messages` (docs/contract.md). Its `repr` shows neither body nor properties. Times are UTC.

    Attributes:
        transaction_id: the transaction.
        incarnation: 0, and one more each time a discarded message was sent again (R12).
        topic: the topic that it is for, `REAL_TOPIC`.
        queue_id: as the producer has set it, or 0.
        tags: RocketMQ's tags.
        keys: RocketMQ's keys.
        body: opaque bytes.
        properties: the user's own headers.
        producer_group: the group that has sent it.
        born_at: when the message was made.
        half_at: the record time of its half.
        committed_at: the record time of its COMMIT.
        check_times: how often the job has asked for the outcome.
        half_partition: its half in the half topic.
        half_offset: its half in the half topic.
        op_partition: its COMMIT in the op topic; None in rows that were written before the table had the column.
        op_offset: its COMMIT in the op topic; None like op_partition.
        bookmark: the batch that has written it.
    """

    transaction_id: str
    incarnation: int
    topic: str
    queue_id: int
    tags: str | None
    keys: str | None
    body: bytes = field(repr=False)
    properties: Mapping[str, str | None] = field(repr=False)
    producer_group: str
    born_at: datetime
    half_at: datetime
    committed_at: datetime
    check_times: int
    half_partition: int
    half_offset: int
    op_partition: int | None
    op_offset: int | None
    bookmark: Bookmark

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> Self:
        """Return the message of a row of `messages`."""
        bookmark = Bookmark(row.pop("epoch"), row.pop("batch_id"))
        return cls(**{**row, "properties": dict(row["properties"] or ())}, bookmark=bookmark)


@dataclass(frozen=True)
class MessageBatch:
    """The messages of one or more whole batches of the job, in order. It may hold none that the reader wants.

    The order is that of epoch, batch, op partition and op offset, the same for every reader.

    Attributes:
        bookmark: reading on after it continues behind this batch.
        after: the bookmark of the last batch before it that held messages, or where the reader began.
    """

    bookmark: Bookmark
    _rows: "pa.Table" = field(repr=False, compare=False)
    after: Bookmark | None = field(default=None, compare=False)

    def __len__(self) -> int:
        """Return how many messages there are."""
        return int(self._rows.num_rows)

    @cached_property
    def messages(self) -> list[CommittedMessage]:
        """Return the messages."""
        return [CommittedMessage.of_row(row) for row in self._rows.to_pylist()]

    def follows(self, position: Bookmark | None) -> bool:
        """Return True if its messages are the next ones after a position: none is before it, none was passed over."""
        if position is None:
            return self.after in (None, BEGINNING)
        first = Bookmark(self._rows["epoch"][0].as_py(), self._rows["batch_id"][0].as_py()) if len(self) else self.bookmark
        return position < first and (self.after is None or self.after <= position)

    def to_arrow(self) -> "pa.Table":
        """Return the messages as an Arrow table with the columns of `messages`."""
        return self._rows
