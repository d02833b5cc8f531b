"""Delta's tables and the files of a checkpoint, as far as Halfway depends on them.

An append is atomic. Delta skips one whose application id has written that version or a later one (`txn`). A `Storage`
is given to the product as its Spark session: what reads and writes files and properties then reads and writes these.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Self
from unittest.mock import patch

import pyarrow as pa

from halfway.pipelines.resolve import check_lag, sources
from halfway.pipelines.storage import batch_settings, delta_tables, first_start, lineage, manifest, ownership, state_reader
from halfway.pipelines.storage.delta_tables import Owner, append_id
from halfway.schemas.events import FORMER_SCHEMA
from halfway.schemas.headers import Source
from halfway.schemas.outcomes import Reason
from halfway.schemas.security import SigningSettings
from halfway.schemas.tables import Table
from tests.simulation.history import HALF, History, Place, Row
from tests.simulation.log import Clock

Offsets = dict[Place, int]
Step = Callable[[str], None]
"""Called with a name before and after each write. It may raise: the job is killed there."""


class Commit(NamedTuple):
    """A commit, as the table's history tells it."""

    metadata: str | None
    operation: str = "WRITE"


@dataclass
class DeltaTable:
    """A table: its rows, and what decides who may append what."""

    name: Table
    owner: Owner | None = None
    """None if the table does not exist."""
    rows: list[Row] = field(default_factory=list)
    txn: dict[str, int] = field(default_factory=dict)
    commits: list[Commit] = field(default_factory=list)


@dataclass
class Checkpoint:
    """The folder of a checkpoint: files by their names, and the versions of the state."""

    files: dict[str, Any] = field(default_factory=dict)
    start: Offsets | None = None
    """Where batch 0 begins: Spark's `sources/0/0`."""
    states: dict[int, dict[int, Any]] = field(default_factory=dict)
    """Batch → bucket → the state that the batch begins with."""

    def copy(self) -> "Checkpoint":
        """Return the checkpoint as a backup keeps it."""
        return Checkpoint(dict(self.files), self.start, {batch: dict(states) for batch, states in self.states.items()})

    def names(self, folder: str) -> list[int]:
        return sorted(int(name.removeprefix(f"{folder}/")) for name in self.files if name.startswith(f"{folder}/"))

    @property
    def last_planned(self) -> int:
        """Return the last batch whose offsets were written; -1 before the first."""
        # They were written in their order, and a dict keeps it.
        return next((int(name.removeprefix("offsets/")) for name in reversed(self.files) if name.startswith("offsets/")), -1)

    def is_committed(self, batch_id: int) -> bool:
        return f"commits/{batch_id}" in self.files

    def ends(self, batch_id: int) -> Offsets | None:
        """Return where a planned batch ends."""
        text = self.files.get(f"offsets/{batch_id}")
        return None if text is None else _ends(text)

    def plan(self, batch_id: int, ends: Offsets) -> None:
        """Write where a batch ends, as Spark does."""
        by_topic: dict[str, dict[str, int]] = defaultdict(dict)
        for (topic, partition), end in ends.items():
            by_topic[topic][str(partition)] = end
        self.files[f"offsets/{batch_id}"] = f"v1\n{{}}\n{json.dumps(by_topic)}"


@lru_cache(maxsize=256)
def _ends(offsets: str) -> Offsets:
    return {(topic, partition): end for topic, ends in state_reader.ends_in(offsets).items() for partition, end in ends.items()}


class Storage:
    """The disk: three tables, and any number of checkpoints."""

    def __init__(self, clock: Clock, history: History) -> None:
        self.clock, self.history = clock, history
        self.tables = {name: DeltaTable(name) for name in Table}
        self.checkpoints: dict[str, Checkpoint] = {}
        self.step: Step = lambda _: None
        self._histories = 0
        """How often a history was read: each start reads that of each table."""

    def checkpoint(self, path: str) -> Checkpoint:
        """Return a checkpoint; an empty one if nothing was written there."""
        return self.checkpoints.setdefault(path, Checkpoint())

    def append(self, name: Table, app_id: str, version: int, rows: Iterable[dict[str, Any]], writer: str, metadata: str | None) -> bool:
        """Append rows once. Return False if Delta skipped them."""
        table = self.tables[name]
        if table.txn.get(app_id, -1) >= version:
            return False
        table.txn[app_id] = version
        seq = self.clock.next_seq()
        added = [Row(str(name), seq, row, writer) for row in rows]
        table.rows.extend(added)
        table.commits.append(Commit(metadata))
        self.history.rows.extend(added)
        return True

    # Files, as `file_systems` gives them.

    def read_json(self, uri: str) -> Any:
        text = self.read_text(uri)
        return json.loads(text) if text else None

    def write_json(self, uri: str, content: Any) -> None:
        path, name = self._split(uri)
        self.checkpoint(path).files[name] = json.dumps(content)
        self.step(f"wrote {name}")

    def delete_folder(self, uri: str) -> None:
        path, name = self._split(uri)
        assert name == "sources"
        self.checkpoint(path).start = None

    def read_text(self, uri: str) -> str | None:
        path, name = self._split(uri)
        return self.checkpoint(path).files.get(name)

    def names_in(self, uri: str) -> list[str]:
        path, folder = self._split(uri)
        return [str(number) for number in self.checkpoint(path).names(folder)]

    def _split(self, uri: str) -> tuple[str, str]:
        path = next(path for path in (*self.checkpoints, "/") if uri.startswith(f"{path}/"))
        return path, uri.removeprefix(f"{path}/")

    # Tables, as `delta_tables` and `adopted_rows` give them.

    def table_exists(self, _: Any, table: Table) -> bool:
        return self.tables[table].owner is not None

    def owner_of(self, _: Any, table: Table) -> Owner:
        return self.tables[table].owner or Owner(None)

    def last_epoch(self, _: Any, table: Table) -> int | None:
        return max((row["epoch"] for row in self.tables[table].rows), default=None)

    def claim_tables(self, _: Any, query_id: str, epoch: int = 0) -> None:
        """Do what the product's function of this name does, step by step."""
        for table in self.tables.values():
            if table.owner is None:
                table.owner = Owner(query_id, epoch)
            self._take_over(table, query_id, epoch)
            self.step(f"owner of {table.name}")

    def _take_over(self, table: DeltaTable, query_id: str, epoch: int) -> None:
        assert table.owner is not None
        former = table.owner
        delta_tables.verify_unclaimed(former, query_id, epoch, table.name)
        if former.former_id is not None:
            self._fence(table, former.former_id)
        if former.query_id == query_id:
            return
        table.owner = Owner(query_id, epoch, former.query_id)
        table.commits.append(Commit(None, "SET TBLPROPERTIES"))
        self.step(f"named the owner of {table.name}")
        if former.query_id is not None:
            self._fence(table, former.query_id)

    def _fence(self, table: DeltaTable, query_id: str) -> None:
        for what in (table.name, Reason.HALF_LOST):
            table.txn[append_id(query_id, what)] = delta_tables.FENCED
            table.commits.append(Commit(delta_tables.fence_note(query_id)))

    def last_appended(self, _: Any, table: Table, app_id: str) -> int | None:
        # At every second start it does not tell, as in a catalog.
        return self.tables[table].txn.get(app_id, -1) if (self._histories - 1) // len(Table) % 2 else None

    def last_settled_ms(self, _: Any) -> int:
        times = [row["committed_at"] for row in self.tables[Table.MESSAGES].rows]
        return max([0, *times, *(row["discarded_at"] for row in self.tables[Table.DISCARDED].rows)])

    def former_records(self, _: Any, __: Any, epoch: int, first: Mapping[str, Mapping[int, int]]) -> pa.Table:
        found = []
        for name in (Table.DISCARDED, Table.QUARANTINE):
            for row in self.tables[name].rows:
                topic, partition, offset, at_ms = _place_of(row)
                is_read_again = offset >= first[topic].get(partition, offset + 1)
                if row["epoch"] < epoch and row["reason"] != Reason.HALF_LOST and is_read_again:
                    source = Source.HALF if topic == HALF else Source.OP
                    discarded_ms = row["discarded_at"] if name is Table.DISCARDED else 0
                    found.append((int(source), partition, offset, at_ms, discarded_ms))
        return pa.Table.from_pylist([dict(zip(FORMER_SCHEMA.names, row, strict=True)) for row in found], schema=FORMER_SCHEMA)

    def batches_since(self, _: Any, epoch: int, since: Mapping[Table, int]) -> dict[Table, int]:
        found = {}
        for table, batch_id in since.items():
            later = [row["batch_id"] for row in self.tables[table].rows if row["epoch"] == epoch and row["batch_id"] >= batch_id]
            if later:
                found[table] = max(later)
        return found

    def even_keys(self, state: Any) -> tuple[int, ...]:
        return tuple(range(state.buckets))

    # Spark, as far as a start needs it.

    @property
    def sparkContext(self) -> Self:  # noqa: N802
        return self

    def broadcast(self, value: Any) -> "Broadcast":
        return Broadcast(value)

    def sql(self, statement: str) -> "_Commits":
        """Answer `DESCRIBE HISTORY`."""
        self._histories += 1
        name = next(name for name in Table if f"/{name}`" in statement)
        return _Commits([(0, Commit(None, "CREATE TABLE")), *enumerate(self.tables[name].commits, 1)][-100:])


class Broadcast(NamedTuple):
    """A broadcast variable."""

    value: Any


class _Commits:
    def __init__(self, commits: Sequence[tuple[int, Commit]]) -> None:
        self._commits = commits

    def select(self, *_: str) -> Self:
        return self

    def collect(self) -> list[tuple[int, str, str | None, None]]:
        return [(version, commit.operation, commit.metadata, None) for version, commit in self._commits]


def _place_of(row: Row) -> tuple[str, int, int, int]:
    if row.table == Table.QUARANTINE:
        return row["source_topic"], row["source_partition"], row["source_offset"], row["source_timestamp"]
    return HALF, row["half_partition"], row["half_offset"], row["half_at"]


_REPLACED = {
    manifest: ("read_json", "write_json"),
    ownership: ("table_exists", "owner_of", "last_epoch"),
    first_start: ("write_json", "delete_folder", "claim_tables", "last_settled_ms", "_even_keys"),
    batch_settings: ("write_json",),
    lineage: ("_batches_since", "last_appended"),
    state_reader: ("read_text", "names_in"),
    sources: ("former_records",),
}


@contextmanager
def in_place_of_spark() -> Iterator[None]:
    """Let the product's functions use the `Storage` that they are given as their session."""
    with ExitStack() as stack:
        for module, names in _REPLACED.items():
            for name in names:
                stack.enter_context(patch.object(module, name, _asked_of_storage(name.lstrip("_"))))
        stack.enter_context(patch.object(check_lag, "ranges_consumer", lambda *_: nullcontext()))
        # It takes 50 ms, as it should.
        stack.enter_context(patch.object(SigningSettings, "fingerprint", lambda _: ""))
        yield


def _asked_of_storage(name: str) -> Callable[..., Any]:
    return lambda storage, *arguments: getattr(storage, name)(*arguments)
