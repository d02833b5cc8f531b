"""The table `messages` as the relay sees it: its id, whether it has news, and what comes after a position in it."""

import time
from collections.abc import Iterator
from typing import NamedTuple

from halfway.clients.reading.committed import CommittedMessage, MessageBatch
from halfway.clients.reading.message_reader import MessageReader, folder_of
from halfway.pipelines.relay.positions import TablePosition
from halfway.schemas.bookmark import Bookmark
from halfway.schemas.errors import TableError
from halfway.schemas.settings import StorageSettings

MESSAGES_AT_ONCE = 2_000
_BYTES_AT_ONCE = 16 * 1024 * 1024
_LOOK_AGAIN_S = 30.0


class Portion(NamedTuple):
    """The messages of one Kafka transaction, in order: those of some batches, or a part of a large one."""

    messages: list[CommittedMessage]
    reached: TablePosition
    """The table has no other message up to here."""


class RelayTable:
    """The table `messages`, which delta-rs reads.

    Args:
        storage: where the tables are. They are folders: delta-rs does not know Spark's catalog.
    """

    def __init__(self, storage: StorageSettings) -> None:
        """Open the table.

        Raises:
            SetupError: deltalake is not installed.
            TableError: there is no table, or it cannot be read without Spark.
        """
        self._storage, self._uri = storage, folder_of(storage)
        self._reader_of(None)  # Says which extra is missing.
        from halfway.clients.reading.message_files import MessageFiles  # noqa: PLC0415  # deltalake is an extra

        self._open = MessageFiles.open
        self._files = self._open(self._uri, {})
        self._look_again_s = 0.0

    @property
    def id(self) -> str:
        """Return the id of the table, which no other table has, as of the last look."""
        return self._files.id

    def look(self) -> None:
        """Open the table as it is now.

        Raises:
            TableError: the table is gone, or cannot be read.
        """
        self._files = self._open(self._uri, {})
        self._look_again_s = time.monotonic() + _LOOK_AGAIN_S

    def has_news(self) -> bool:
        """Return True if the table has another version than at the last look, or may have: a look at one file.

        Raises:
            TableError: the table is gone, was recreated, or cannot be read.
        """
        is_due = time.monotonic() >= self._look_again_s  # the commit after the last one may be gone from the log
        if not is_due and not self._files.has_changed():
            return False
        former = self.id
        self.look()
        if self.id != former:
            raise TableError("the table was recreated")
        return True

    def end(self) -> Bookmark:
        """Return the bookmark of the last message; `0.-1` without one.

        Raises:
            TableError: the table is not the one of the last look any more, or cannot be read.
        """
        return self._reader_of(None).must_be(self.id).end()

    def newest(self, after: TablePosition | None) -> Bookmark | None:
        """Return a bookmark of the newest file that may hold rows after a position, as of the last look; or None."""
        return max((file.first for file in self._files.after(None if after is None else after.bookmark)), default=None)

    def read(self, after: TablePosition | None, named: str | None = None) -> Iterator[Portion]:
        """Yield what there is now after a position: all messages, or those that name a topic.

        Raises:
            TableError: the table is not the one of the last look any more, or cannot be read.
        """
        reader = self._reader_of(named).must_be(self.id)
        for batch in reader.read(None if after is None else after.bookmark):
            yield from _portions(batch, after)

    def _reader_of(self, named: str | None) -> MessageReader:
        return MessageReader(self._storage, topic=named, max_rows=MESSAGES_AT_ONCE, max_bytes=_BYTES_AT_ONCE)


def _portions(batch: MessageBatch, after: TablePosition | None) -> Iterator[Portion]:
    """Divide what is after a position: a batch of the job may be larger than what Kafka takes in one transaction."""
    messages: list[CommittedMessage] = []
    size = 0
    table = batch.to_arrow()
    rows_at_once = max(1, min(MESSAGES_AT_ONCE, table.num_rows * _BYTES_AT_ONCE // max(1, table.nbytes)))
    rows = (row for part in table.to_batches(max_chunksize=rows_at_once) for row in part.to_pylist())
    for message in map(CommittedMessage.of_row, rows):
        if after is not None and TablePosition.of(message) <= after:
            continue
        if messages and (len(messages) == MESSAGES_AT_ONCE or size + len(message.body) > _BYTES_AT_ONCE):
            yield Portion(messages, TablePosition.of(messages[-1]))
            messages, size = [], 0
        messages.append(message)
        size += len(message.body)
    yield Portion(messages, TablePosition(*batch.bookmark))
