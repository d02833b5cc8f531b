"""Reads committed messages from the table `messages`, in order, from a bookmark on, without Spark (docs/reading.md)."""

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Self, TypeVar

from halfway.clients.reading.committed import MessageBatch
from halfway.schemas.bookmark import BEGINNING, Bookmark
from halfway.schemas.errors import MissingPackageError, TableError
from halfway.schemas.settings import StorageSettings

if TYPE_CHECKING:
    from halfway.clients.reading.message_files import MessageFiles

log = logging.getLogger(__name__)

_OPEN_AGAIN_S = 30.0
_EMPTY_EVERY_S = 5.0
_LOOK_FOR_STOP_S = 0.2
_TRIES = 5
_Step = TypeVar("_Step", MessageBatch, MessageBatch | None)


class MessageReader:
    """Reads the table `messages` from a folder or an object store. It keeps nothing: the bookmark is the caller's.

    A batch is never divided, and no message is left out or comes twice, whatever is compacted, vacuumed or appended
    meanwhile. Save `batch.bookmark` in one transaction with the effect of the messages, and the effect is exactly once.

    Args:
        source: the job's storage settings, or the path or URI of the table's folder.
        topic: only messages of this topic; None for all.
        tags: only messages with one of these tags, separated by `||` as in RocketMQ; None or `*` for all.
        max_rows: how many messages a batch has at most, unless a single batch of the job has more: it is not divided.
        max_bytes: the same for the bytes of its messages.
        storage_options: delta-rs' options of an object store. Credentials are better in the environment, as
            `AWS_ACCESS_KEY_ID` and the like, where delta-rs finds them.

    Raises:
        MissingPackageError: deltalake or pyarrow is not installed.
        TableError: the table is in a catalog.
        TypeError: `source` is neither settings nor a path.
        ValueError: `tags` has another form, or a limit is below 1.
    """

    def __init__(
        self,
        source: StorageSettings | str | os.PathLike[str],
        *,
        topic: str | None = None,
        tags: str | None = None,
        max_rows: int = 10_000,
        max_bytes: int = 64 * 1024 * 1024,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        """Store what to read. Reads nothing yet."""
        try:
            from halfway.clients.reading import message_files, message_merge, message_rows  # noqa: PLC0415  # deltalake is an extra
        except ModuleNotFoundError as error:
            raise MissingPackageError("a MessageReader", error.name, "tables") from None
        source = os.fspath(source) if isinstance(source, os.PathLike) else source
        if not isinstance(source, (StorageSettings, str)):
            raise TypeError(f"a MessageReader reads storage settings, as load_settings().storage, or a table's folder: not {source!r:.60}")
        if max_rows < 1 or max_bytes < 1:
            raise ValueError("max_rows and max_bytes are at least 1")
        self._uri = source if isinstance(source, str) else folder_of(source)
        self._options = dict(storage_options or {})
        self._wanted = message_rows.Wanted(topic, tags_in(tags), max_rows, max_bytes)
        self._open_files, self._merged = message_files.MessageFiles.open, message_merge.merged
        self._storage_errors, self._told = message_files.storage_errors, message_files.one_line(self._uri)
        self._stopping = threading.Event()
        self._table_id: str | None = None
        self._warn_of_ahead: Callable[[Bookmark, Bookmark | None], None] = self._log_ahead

    def must_be(self, table_id: str) -> Self:
        """Refuse to read another table than the one with this id, which Delta gives to each."""
        self._table_id = table_id
        return self

    def warn_by(self, warn: Callable[[Bookmark, Bookmark | None], None]) -> Self:
        """Hand a bookmark that is not of this table to `warn`, and do not log it. What comes before it is never read.

        Args:
            warn: gets the bookmark, and that of the table's last message; None if it holds none.
        """
        self._warn_of_ahead = warn
        return self

    def read(self, after: Bookmark | None = None) -> Iterator[MessageBatch]:
        """Yield what the table holds now after a bookmark.

        The last batch has the bookmark of all that was read. It holds no messages if the reader wants none of them.

        Args:
            after: the bookmark of the last batch that was dealt with; None to read from the beginning.

        Raises:
            TableError: there is no table, it was recreated since this reader's first look, or needs Spark to be read.
            TypeError: `after` is no bookmark.
        """
        _verify_bookmark(after)
        has_read = False
        for batch in _each_after_the_last(self._read(self._open(), after), after):
            has_read = True
            yield batch
        if after is not None and not has_read:
            self._look_if_ahead(after)

    def end(self) -> Bookmark:
        """Return the bookmark of the last message that the table holds, to read only what comes later.

        Returns:
            The bookmark; `0.-1` if the table holds no message.

        Raises:
            TableError: there is no table, it was recreated since this reader's first look, or needs Spark to be read.
        """
        for _ in range(_TRIES):
            with suppress(FileNotFoundError), self._storage_errors(self._uri):  # A file that is not there was replaced.
                return self._open().end() or BEGINNING
        raise self._has_no_file()

    def follow(self, after: Bookmark | None = None, *, poll_s: float = 0.2) -> Iterator[MessageBatch]:
        """Yield what the table holds after a bookmark, and what comes, until `stop` is called.

        An error of the storage ends it. Begin again with the bookmark of the last batch that was dealt with.

        Args:
            after: the bookmark of the last batch that was dealt with; None to read from the beginning.
            poll_s: how often to look for new messages. A look is one request for one file of the table's log.

        Raises:
            TableError: there is no table, it was recreated meanwhile, or needs Spark to be read.
            TypeError: `after` is no bookmark.
        """
        for batch in _each_after_the_last(self._steps(after), after):
            if batch is None:
                self._wait(poll_s)
            if self._stopping.is_set():
                return
            if batch is not None:
                yield batch

    async def follow_async(self, after: Bookmark | None = None, *, poll_s: float = 0.2) -> AsyncIterator[MessageBatch]:
        """Do what `follow` does, for asyncio: reading takes a thread, not the event loop. Waiting takes neither."""
        steps = _each_after_the_last(self._steps(after), after)
        while not self._stopping.is_set():
            batch = await asyncio.to_thread(next, steps)
            if batch is None:
                await asyncio.sleep(poll_s)
            elif not self._stopping.is_set():
                yield batch

    def _steps(self, after: Bookmark | None) -> Iterator[MessageBatch | None]:
        """Yield what there is and what comes, without an end, and None where whoever follows is to wait."""
        _verify_bookmark(after)
        position = after
        empty_s = time.monotonic()
        files, open_again_s = self._open(), time.monotonic() + _OPEN_AGAIN_S
        while True:
            for batch in self._read(files, position):
                position = batch.bookmark
                if len(batch) or time.monotonic() - empty_s >= _EMPTY_EVERY_S:
                    empty_s = time.monotonic()
                    yield batch
            if after is not None and position is after:
                self._look_if_ahead(after)
                after = None
            is_changed = False
            while not is_changed and time.monotonic() < open_again_s:
                yield None
                is_changed = files.has_changed()
            with suppress(TableError):
                if is_changed:
                    files.update()
                    continue
            # The next commit may be gone from the log, or the table be another one.
            files, open_again_s = self._open(), time.monotonic() + _OPEN_AGAIN_S

    def _wait(self, poll_s: float) -> None:
        """Sleep. A signal handler in this thread that sets the event could hang on its lock if this waited for it."""
        ends_s = time.monotonic() + poll_s
        while not self._stopping.is_set() and (left_s := ends_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _LOOK_FOR_STOP_S))

    def stop(self) -> None:
        """End `follow` for good, after the batch that it yields now. Any thread, or a signal handler, may call it."""
        self._stopping.set()

    def _open(self) -> "MessageFiles":
        files = self._open_files(self._uri, self._options)
        if self._table_id not in (None, files.id):
            raise TableError(
                f"the table {self._told} was recreated since it was first read: bookmarks are of the former one. Begin with a new reader, "
                "and with a bookmark of this table or none"
            )
        self._table_id = files.id
        return files

    def _read(self, files: "MessageFiles", after: Bookmark | None) -> Iterator[MessageBatch]:
        """Yield what a version of the table holds. A file that is gone was replaced: a newer version has its rows.

        In a long read newer versions are looked for too, between batches: what was erased meanwhile is not to be read.
        Looking earlier, a slow read of a table that always changes would begin again and again.
        """
        position, end, tries_left, looked_s = after, None, _TRIES, time.monotonic()
        while tries_left:
            try:
                with self._storage_errors(self._uri):
                    for batch in self._merged(files, position, self._wanted):
                        position, tries_left = batch.bookmark, _TRIES
                        yield batch
                        if end is not None and position >= end:
                            return
                        if time.monotonic() - looked_s >= _OPEN_AGAIN_S:
                            looked_s = time.monotonic()
                            if files.has_changed():
                                end = end or files.end()  # What is appended while it is read is not to make it endless.
                                break
                    else:
                        return
            except FileNotFoundError:
                tries_left -= 1
            files = self._open()
        raise self._has_no_file()

    def _look_if_ahead(self, after: Bookmark) -> None:
        end = self.end()
        if end < after:
            self._warn_of_ahead(after, None if end == BEGINNING else end)

    def _log_ahead(self, after: Bookmark, end: Bookmark | None) -> None:
        log.warning("event=bookmark_ahead_of_table bookmark=%s end=%s table=%r", after, end, self._told)

    def _has_no_file(self) -> TableError:
        return TableError(
            f"the table {self._told} names a data file that does not exist: something has deleted it, such as a lifecycle rule of the "
            "store, or a VACUUM with a short retention beside an append. Restore the file, and read on from the last bookmark"
        )


def _each_after_the_last(batches: Iterator[_Step], after: Bookmark | None) -> Iterator[_Step]:
    """Yield the same, and have each batch say after which messages it comes."""
    for batch in batches:
        if batch is None:
            yield batch
            continue
        yield replace(batch, after=after)
        if len(batch):
            after = batch.bookmark


def _verify_bookmark(after: object) -> None:
    if after is not None and not isinstance(after, Bookmark):
        raise TypeError(f"{after!r} is no Bookmark: Bookmark.parse reads one from its text")


def tags_in(expression: str | None) -> frozenset[str]:
    """Return the tags in RocketMQ's form `A || B`; none for `*` or None, which stand for all messages.

    Raises:
        ValueError: the expression has another form.
    """
    if expression is None or expression.strip() == "*":
        return frozenset()
    tags = frozenset(tag.strip() for tag in expression.split("||"))
    if "" in tags or "&&" in expression:
        raise ValueError(f"{expression!r} is no tag and no list of tags: give a tag, or several as in 'paid || refunded'")
    return tags


def folder_of(storage: StorageSettings) -> str:
    """Return where the table `messages` is.

    Raises:
        TableError: it is in a catalog.
    """
    if storage.catalog_schema:
        raise TableError(
            f"the tables are in the catalog, in {storage.catalog_schema}: give the URI of the folder of `messages`, or read them with Spark"
        )
    return f"{storage.warehouse.rstrip('/')}/messages"
