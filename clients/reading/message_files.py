"""The files of the table `messages`, as delta-rs finds them in the table's log, and the rows in them."""

# mypy: disable-error-code=import-untyped

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler

from halfway.clients.reading.message_rows import MESSAGE_SCHEMA, PLACE, after, complete, last_in
from halfway.schemas.bookmark import Bookmark
from halfway.schemas.errors import TableError

_START = Bookmark(0, 0)
_COLOUR_OR_LOGIN = re.compile(r"\x1b\[[\d;]*m|(?<=//)[^/@:\s]*:[^/\s]*@")
"""A login has a colon: in `abfss://container@account` there is none."""
_OF_FILE = ["path", "size_bytes", "min.epoch", "max.epoch", "null_count.epoch", "min.batch_id", "max.batch_id"]
_HAS_LARGE = "binary_type" in inspect.signature(pq.ParquetFile.__init__).parameters
_LARGE: dict[str, Any] = {"binary_type": pa.large_binary()} if _HAS_LARGE else {}
"""64-bit offsets: with others Arrow reads no map of more than 2 GiB of texts (arrow issue 38513). pyarrow 20 cannot."""
_ELSEWHERE = re.compile(r"/|[A-Za-z][\w+.-]*:")
"""How the path of a file that is not in the table's folder begins."""
_READER_FEATURES = {"v2Checkpoint", "timestampNtz", "vacuumProtocolCheck"}
"""What a table may ask of its readers. The others change what a data file means."""


class MessageFile(NamedTuple):
    """A data file, and a bookmark that none of its rows comes before, as the statistics in the log say."""

    first: Bookmark
    path: str
    last: Bookmark | None
    """That of its last row; None if the statistics do not tell."""


@dataclass
class MessageFiles:
    """The table as it is at one version."""

    uri: str
    _options: dict[str, str] = field(repr=False)
    _table: DeltaTable
    _log: pa_fs.FileSystem
    _commit: "_Commit"
    """The log's file of this version. A table that was recreated has another one."""
    _data: pa_fs.FileSystem = field(init=False, repr=False)
    """Opens the files that `after` has returned last."""

    @classmethod
    def open(cls, uri: str, storage_options: Mapping[str, str]) -> Self:
        """Open the table as it is now.

        Raises:
            TableError: there is no table, or this version cannot read it, or the store does not answer.
        """
        options, told = dict(storage_options), one_line(uri)
        try:
            with storage_errors(uri):
                table = DeltaTable(uri, storage_options=options)
        except TableNotFoundError:
            raise TableError(
                f"there is no table {told} yet: run `halfway resolve`, which creates it; if the job runs in another folder, go there, "
                "or set storage.warehouse"
            ) from None
        _verify(table, told)
        store = pa_fs.PyFileSystem(DeltaStorageHandler(uri, options))
        with storage_errors(uri):
            return cls(uri, options, table, _log=store, _commit=_commit_in(store, table.version()))

    @property
    def id(self) -> str:
        """Return the table's id, which no other table has."""
        return str(self._table.metadata().id)

    @property
    def version(self) -> int:
        """Return the version of the table."""
        return int(self._table.version())

    def has_changed(self) -> bool:
        """Return True if the log holds the next version. This is one look at one file.

        Raises:
            TableError: the store does not answer.
        """
        with storage_errors(self.uri):
            return bool(_commit_in(self._log, self.version + 1).type == pa_fs.FileType.File)

    def update(self) -> None:
        """Read the commits since this version.

        Raises:
            TableError: commits are gone from the log, or are another table's, or this version cannot read the table any
                more. This is of no use then: `open` the table anew.
        """
        version, table_id = self.version, self.id
        try:
            self._table.update_incremental()
        except (DeltaError, OSError) as error:
            raise TableError(f"the log of {one_line(self.uri)} cannot be read on: {one_line(error)}") from None
        with storage_errors(self.uri):
            if self.id != table_id or _commit_in(self._log, version) != self._commit:
                raise TableError(f"the log of {one_line(self.uri)} is another one since version {version}")
            self._commit = _commit_in(self._log, self.version)
        _verify(self._table, one_line(self.uri))

    def after(self, bookmark: Bookmark | None) -> list[MessageFile]:
        """Return the files that may hold rows after a bookmark, or all, in the order of their first bookmarks.

        Raises:
            TableError: the table is a shallow clone.
        """
        found = pa.table(self._table.get_add_actions(flatten=True))
        for name in set(_OF_FILE) - set(found.column_names):  # a table whose files have no statistics
            found = found.append_column(name, pa.nulls(found.num_rows, pa.int64()))
        if bookmark is not None:
            found = found.filter(_may_be_after(found["max.epoch"], found["max.batch_id"], bookmark))
        rows: list[dict[str, Any]] = found.select(_OF_FILE).to_pylist()
        if any(_ELSEWHERE.match(row["path"]) for row in rows):
            raise TableError(f"the table {one_line(self.uri)} is a shallow clone, whose files are elsewhere: read it with Spark")
        self._data = self._data_files({row["path"]: row["size_bytes"] for row in rows})
        return sorted(map(_file_of, rows))

    def _data_files(self, sizes: dict[str, int]) -> pa_fs.FileSystem:
        """Return what opens data files of these sizes in bytes, by their paths in the table."""
        uri = self._table.table_uri
        if uri.startswith("file:"):  # Arrow reads by itself: what it gets from Python, its threads give back at any time.
            local, folder = pa_fs.FileSystem.from_uri(uri)
            return pa_fs.SubTreeFileSystem(folder, local)
        # Without the sizes, delta-rs asks for each one, and holds Python's lock until the store has answered.
        return pa_fs.PyFileSystem(DeltaStorageHandler(self.uri, self._options, sizes))

    def end(self) -> Bookmark | None:
        """Return the greatest bookmark of the rows; None if there are none.

        Raises:
            FileNotFoundError: a file was compacted, and has been deleted since.
        """
        ends = (
            end for file in self.after(None) for end in ([file.last] if file.last else map(RowGroup.end, self.row_groups_of(file, None)))
        )
        return max((end for end in ends if end is not None), default=None)

    def row_groups_of(self, file: MessageFile, bookmark: Bookmark | None) -> list["RowGroup"]:
        """Return the row groups of a file that hold rows after a bookmark, or all. Their rows are not read yet.

        Raises:
            FileNotFoundError: the file was compacted, and has been deleted since.
        """
        with self._data.open_input_file(file.path) as opened:
            stored = StoredFile(self._data, file.path, pq.read_metadata(opened))
        groups = [_row_group_of(stored, number, file.first) for number in range(stored.metadata.num_row_groups)]
        return [group for group in groups if bookmark is None or ((end := group.end()) is not None and end > bookmark)]


@contextmanager
def storage_errors(uri: str) -> Iterator[None]:
    """Raise a TableError for an error of delta-rs or its store, but for one that tells that there is no such file."""
    try:
        yield
    except (FileNotFoundError, TableNotFoundError):
        raise
    except (DeltaError, OSError, pa.ArrowException) as error:
        raise TableError(f"the table {one_line(uri)} cannot be read: {one_line(error)}") from None


def one_line(told: object) -> str:
    """Return an error of delta-rs or an address in one line, without colours and without the login in it."""
    return _COLOUR_OR_LOGIN.sub("", " ".join(str(told).split()))


def _verify(table: DeltaTable, told: str) -> None:
    """Refuse a table whose files have other rows than they show.

    Raises:
        TableError: only Spark can read it, or it lacks columns. Calls it `told`.
    """
    protocol = table.protocol()
    unknown = set(protocol.reader_features or ()) - _READER_FEATURES
    if protocol.min_reader_version not in (1, 3) or unknown:
        raise TableError(f"the table {told} needs a reader with {', '.join(sorted(unknown)) or 'column mapping'}: read it with Spark")
    if table.metadata().partition_columns:
        raise TableError(f"the table {told} is partitioned, so that its files lack columns: read it with Spark")
    missing = set(MESSAGE_SCHEMA.names) - {field.name for field in table.schema().fields}
    if missing:
        raise TableError(
            f"the table {told} was made by an earlier version, without {', '.join(sorted(missing))}: start the job, "
            "`halfway resolve`, once with this version, which adds them"
        )


class _Commit(NamedTuple):
    """A file of the log. Arrow's own FileInfo has no equality."""

    type: pa_fs.FileType
    size: int | None
    mtime_ns: int | None


def _commit_in(log: pa_fs.FileSystem, version: int) -> _Commit:
    [found] = log.get_file_info([f"_delta_log/{version:020}.json"])
    return _Commit(found.type, found.size, found.mtime_ns)


class StoredFile(NamedTuple):
    """A data file that is open only while rows are read: a table without statistics has all its files at once."""

    files: pa_fs.FileSystem
    path: str
    metadata: pq.FileMetaData

    def read(self, number: int, columns: list[str] | None = None) -> pa.Table:
        """Read a row group.

        Raises:
            FileNotFoundError: the file was compacted, and has been deleted since.
        """
        with self.files.open_input_file(self.path) as opened:
            # Threads that read ahead may give a buffer back to Python while the process ends, which aborts it.
            return pq.ParquetFile(opened, metadata=self.metadata, pre_buffer=False, **_LARGE).read_row_group(number, columns)


class RowGroup(NamedTuple):
    """A row group of a file, and a bookmark that none of its rows comes before."""

    first: Bookmark
    last: Bookmark | None
    """That of its last row; None if the statistics do not tell."""
    stored: StoredFile
    number: int

    def end(self) -> Bookmark | None:
        """Return the bookmark of its last row; None if there are none.

        A compaction puts rows of two epochs into one file, and its statistics do not tell where the later one ends.
        Then only the epochs and batches are read: otherwise each look for news would read the whole file.
        """
        return self.last or last_in(complete(self.stored.read(self.number, PLACE), PLACE))

    def rows(self) -> pa.Table:
        """Read the rows (MESSAGE_SCHEMA)."""
        return complete(self.stored.read(self.number))


def _may_be_after(epochs: pa.ChunkedArray, batches: pa.ChunkedArray, bookmark: Bookmark) -> pa.ChunkedArray:
    """Return for each file whether it may hold rows after a bookmark. A file without statistics may."""
    last = pa.table({"epoch": epochs, "batch_id": batches})
    return pc.fill_null(after(last, bookmark), True)


def _file_of(row: Mapping[str, Any]) -> MessageFile:
    """Return a file; `row` is what the log says of it (_OF_FILE)."""
    epoch, first, last = row["min.epoch"], row["min.batch_id"], row["max.batch_id"]
    if epoch is None or epoch != row["max.epoch"] or row["null_count.epoch"] != 0 or None in (first, last):
        return MessageFile(_START, row["path"], None)
    return MessageFile(Bookmark(epoch, first), row["path"], Bookmark(epoch, last))


def _row_group_of(stored: StoredFile, number: int, first: Bookmark) -> RowGroup:
    """Return a row group; `first` is the bookmark of its file."""
    group = stored.metadata.row_group(number)
    columns = {group.column(number).path_in_schema: group.column(number).statistics for number in range(group.num_columns)}
    epochs, batches = columns.get("epoch"), columns.get("batch_id")
    if not (epochs and batches and epochs.has_min_max and batches.has_min_max) or epochs.min != epochs.max or epochs.null_count:
        return RowGroup(first, None, stored, number)
    return RowGroup(Bookmark(epochs.min, batches.min), Bookmark(epochs.max, batches.max), stored, number)
