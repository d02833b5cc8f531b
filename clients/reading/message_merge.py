"""Puts the rows of a table's files in order, whole batches at a time, with little of them in memory."""

# mypy: disable-error-code=import-untyped

import heapq
from collections.abc import Iterator
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc

from halfway.clients.reading.committed import MessageBatch
from halfway.clients.reading.message_files import MessageFile, MessageFiles, RowGroup
from halfway.clients.reading.message_rows import MESSAGE_SCHEMA, Wanted, after, in_order, last_in
from halfway.schemas.bookmark import Bookmark

_SEEN_PER_ROW = 100
_ROW_BYTES = 200
_BYTES = "bytes"
_BUFFERED = MESSAGE_SCHEMA.append(pa.field(_BYTES, pa.int64()))
"""Rows, and about how many bytes each has: computed once, as it is asked for again with each row group."""
_OVERLAP = 4
"""How many batches of the largest size may be in memory before they are complete."""


def merged(files: MessageFiles, position: Bookmark | None, wanted: Wanted) -> Iterator[MessageBatch]:
    """Yield what a table holds after a bookmark.

    Files overlap where a compaction has put distant batches together. A batch is complete as soon as no unread row
    group can hold a row of it, or one before it. If more overlaps than may be in memory, the later rows are dropped
    and read again.

    Raises:
        FileNotFoundError: a file was compacted, and has been deleted since. What was yielded is right.
    """
    while True:
        buffer = _Buffer(position, wanted)
        yield from _read_into(buffer, files, position)
        if buffer.limit is None:
            return
        position = buffer.limit


def _read_into(buffer: "_Buffer", files: MessageFiles, position: Bookmark | None) -> Iterator[MessageBatch]:
    found = enumerate(files.after(position))
    unread: list[tuple[Bookmark, int, MessageFile | RowGroup]] = [(file.first, number, file) for number, file in found]
    number = len(unread)
    while unread and not buffer.needs_nothing_from(unread[0][0]):
        _, _, part = heapq.heappop(unread)
        if isinstance(part, MessageFile):
            for group in files.row_groups_of(part, position):
                number += 1
                heapq.heappush(unread, (group.first, number, group))
            continue
        buffer.add(part.rows())
        if unread and buffer.is_full():
            yield from buffer.take(unread[0][0])
            buffer.narrow()
    yield from buffer.rest()


class _Buffer:
    """Rows that were read and not yet yielded."""

    def __init__(self, position: Bookmark | None, wanted: Wanted) -> None:
        self._wanted = wanted
        self._from = self._yielded = self._reached = position
        self._rows = _BUFFERED.empty_table()
        self._seen = 0
        self.limit: Bookmark | None = None
        """Rows after it were left out, and must be read again; None if there are none."""

    def add(self, rows: pa.Table) -> None:
        """Add the rows of a row group that are after the position, and wanted."""
        if self._from is not None:
            rows = rows.filter(after(rows, self._from))
        if self.limit is not None:
            rows = rows.filter(pc.invert(after(rows, self.limit)))
        last = last_in(rows)
        if last is not None:
            self._reached = last if self._reached is None else max(self._reached, last)
        self._seen += rows.num_rows
        wanted = self._wanted.of(rows)
        self._rows = pa.concat_tables([self._rows, wanted.append_column(_BUFFERED.field(_BYTES), _bytes_of(wanted))])

    def is_full(self) -> bool:
        """Return True if there is enough for a batch, or if so much was not wanted that the bookmark must get on."""
        return self._is_enough(self._rows) or self._seen >= _SEEN_PER_ROW * self._wanted.max_rows

    def needs_nothing_from(self, first: Bookmark) -> bool:
        """Return True if rows from a bookmark on are left out."""
        return self.limit is not None and first > self.limit

    def narrow(self) -> None:
        """Leave out the later rows if there are too many whose batches are not complete."""
        if self._rows.num_rows < _OVERLAP * self._wanted.max_rows and _size(self._rows) < _OVERLAP * self._wanted.max_bytes:
            return
        first = next(self._chunks(in_order(self._rows)))
        self.limit = self._reached = _last_of(first)
        self._rows = first

    def take(self, limit: Bookmark) -> Iterator[MessageBatch]:
        """Yield full batches of the rows before `limit`, of which all are there."""
        is_complete = pc.invert(_is_from(self._rows, limit))
        chunks = list(self._chunks(in_order(self._rows.filter(is_complete))))
        left = [self._rows.filter(pc.invert(is_complete))]
        if self._reached is not None and self._reached < limit and self._seen >= _SEEN_PER_ROW * self._wanted.max_rows:
            yield from self._all(chunks)
        else:
            if chunks and not self._is_enough(chunks[-1]):
                left.append(chunks.pop())
            for chunk in chunks:
                yield self._batch(chunk, _last_of(chunk))
        self._rows = pa.concat_tables(left)

    def rest(self) -> Iterator[MessageBatch]:
        """Yield everything, with the bookmark of what was read last, wanted or not."""
        yield from self._all(list(self._chunks(in_order(self._rows))))

    def _all(self, chunks: list[pa.Table]) -> Iterator[MessageBatch]:
        if self._reached is None or self._reached == self._yielded:
            return
        *before, last = chunks or [_BUFFERED.empty_table()]
        for chunk in before:
            yield self._batch(chunk, _last_of(chunk))
        yield self._batch(last, self._reached)

    def _batch(self, rows: pa.Table, bookmark: Bookmark) -> MessageBatch:
        self._yielded, self._seen = bookmark, 0
        return MessageBatch(bookmark, rows.drop_columns(_BYTES))

    def _is_enough(self, rows: pa.Table) -> bool:
        return bool(rows.num_rows >= self._wanted.max_rows or _size(rows) >= self._wanted.max_bytes)

    def _chunks(self, rows: pa.Table) -> Iterator[pa.Table]:
        """Split rows, which are in order, into as many whole batches as fit; a batch that does not is alone."""
        if not rows.num_rows:
            return
        rows = rows.combine_chunks()
        sizes = pc.cumulative_sum(rows[_BYTES]).to_pylist()
        begin = fits = 0
        for end in _ends(rows):
            before = sizes[begin - 1] if begin else 0
            if end - begin > self._wanted.max_rows or sizes[end - 1] - before > self._wanted.max_bytes:
                if fits > begin:
                    yield rows.slice(begin, fits - begin)
                begin = fits
            fits = end
        yield rows.slice(begin)


def _is_from(rows: pa.Table, bookmark: Bookmark) -> pa.ChunkedArray:
    """Return for each row whether it comes at or after a bookmark."""
    return after(rows, Bookmark(bookmark.epoch, bookmark.batch_id - 1))


def _size(rows: pa.Table) -> int:
    """Return about how many bytes the rows have."""
    return int(pc.sum(rows[_BYTES]).as_py() or 0)


def _bytes_of(rows: pa.Table) -> pa.ChunkedArray:
    """Return about how many bytes each row has, with all that its producer may choose."""
    lengths = [pc.fill_null(pc.binary_length(rows[name]), 0).cast(pa.int64()) for name in ("body", "keys", "tags")]
    return reduce(pc.add, lengths, pc.add(_bytes_of_properties(rows["properties"]), _ROW_BYTES))


def _bytes_of_properties(properties: pa.ChunkedArray) -> pa.ChunkedArray:
    sizes = []
    for maps in properties.chunks:
        lengths = [pc.fill_null(pc.binary_length(texts), 0).cast(pa.int64()) for texts in (maps.keys, maps.items)]
        before = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(pc.add(*lengths))]).take(maps.offsets)
        sizes.append(pc.subtract(before[1:], before[:-1]))
    return pa.chunked_array(sizes, pa.int64())


def _ends(rows: pa.Table) -> list[int]:
    """Return where each batch of rows in order ends."""
    here, there = rows.slice(0, rows.num_rows - 1), rows.slice(1)
    changes = pc.or_(pc.not_equal(here["epoch"], there["epoch"]), pc.not_equal(here["batch_id"], there["batch_id"]))
    return [place + 1 for place in pc.indices_nonzero(changes).to_pylist()] + [rows.num_rows]


def _last_of(rows: pa.Table) -> Bookmark:
    return Bookmark(rows["epoch"][-1].as_py(), rows["batch_id"][-1].as_py())
