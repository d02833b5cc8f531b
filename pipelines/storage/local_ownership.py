"""Reads from files on this machine, without Spark, which checkpoint and tables belong together."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from halfway.pipelines.storage.delta_tables import Owner, append_ids
from halfway.pipelines.storage.file_systems import local_path
from halfway.pipelines.storage.lineage import COMMITS_LOOKED_AT, TableCommit, TableHistory, commit_of
from halfway.pipelines.storage.manifest import MANIFEST_FILE, METADATA_FILE, Manifest
from halfway.pipelines.storage.missing_tables import OFFSETS
from halfway.pipelines.storage.ownership import UNNAMED, Ownership
from halfway.pipelines.storage.state_reader import LocalFiles, damaged_log
from halfway.schemas.errors import SetupError
from halfway.schemas.settings import StorageSettings
from halfway.schemas.tables import Table


def read_local_ownership(storage: StorageSettings) -> Ownership:
    """Read which checkpoint and tables belong together from their files on this machine, without Spark.

    Raises:
        SetupError: a file cannot be read or is damaged.
    """
    checkpoint = local_folder(storage.checkpoint)
    with reading(storage):
        if name := damaged_log(LocalFiles(checkpoint)):
            raise ValueError(f"{name} is damaged")
        logs = {table: _log_of(storage, table) for table in Table}
        manifest = _json(checkpoint / MANIFEST_FILE)
        return Ownership(
            manifest=Manifest.from_json(manifest) if manifest else None,
            query_id=_json(checkpoint / METADATA_FILE).get("id"),
            last_batch_id=max(LocalFiles(checkpoint).batches(OFFSETS), default=None),
            tables={table: _read_log(log).owner() for table, log in logs.items() if log.is_dir()},
        )


def local_history(storage: StorageSettings, query_id: str, table: Table) -> TableHistory:
    """Return what a table's log says of a query."""
    log = _log_of(storage, table)
    commits = [_commit_in(file) for file in sorted(log.glob("[0-9]*.json"), reverse=True)[:COMMITS_LOOKED_AT]]
    appended = _read_log(log).appended
    return TableHistory(commits, max(appended.get(app_id, -1) for app_id in append_ids(query_id, table)))


def _commit_in(file: Path) -> TableCommit:
    info: dict[str, Any] = next((action["commitInfo"] for action in _actions_in(file) if "commitInfo" in action), {})
    return commit_of(int(file.name.partition(".")[0]), info.get("operation", ""), info.get("userMetadata"), info.get("operationParameters"))


@contextmanager
def reading(storage: StorageSettings) -> Iterator[None]:
    """Raise what a file that cannot be read raises as a SetupError that names checkpoint and tables."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise SetupError(f"cannot read the checkpoint {storage.checkpoint} or the tables in {storage.warehouse}: {error}") from None


def _log_of(storage: StorageSettings, table: Table) -> Path:
    return local_folder(storage.warehouse) / table / "_delta_log"


def local_folder(uri: str) -> Path:
    """Return the folder of a URI.

    Raises:
        SetupError: it is not on this machine.
    """
    folder = local_path(uri)
    if folder is None:
        raise SetupError("storage is not on this machine")
    return folder


def _json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content


def _actions_in(commit: Path) -> list[dict[str, Any]]:
    """Return the actions of a commit, one a line. A text may hold what `splitlines` splits at, such as U+2028."""
    return [json.loads(line) for line in commit.read_text("utf-8").split("\n") if line]


class _Log(NamedTuple):
    """What Halfway needs of a Delta table's log."""

    properties: dict[str, str]
    appended: dict[str, int]
    """Application id → the last batch that it has appended."""
    has_files: bool

    def owner(self) -> Owner:
        """Return the owner. Files without one were copied; their epoch is not read."""
        owner = Owner.of(self.properties)
        return Owner(UNNAMED) if owner.query_id is None and self.has_files else owner


def _read_log(folder: Path) -> _Log:
    """Read a Delta table's log: its newest checkpoint, and the JSON file of each later commit."""
    version = _json(folder / "_last_checkpoint").get("version", -1)
    actions: list[dict[str, Any]] = []
    for part in folder.glob(f"{version:020d}.checkpoint*.parquet"):
        actions += pq.read_table(part, columns=["metaData", "txn", "add.path"]).to_pylist()
    while (commit := folder / f"{(version := version + 1):020d}.json").exists():
        actions += _actions_in(commit)
    log = _Log({}, {}, has_files=False)
    for action in actions:
        if metadata := action.get("metaData"):
            log = log._replace(properties=dict(metadata["configuration"]))
        if transaction := action.get("txn"):
            log.appended[transaction["appId"]] = transaction["version"]
        if action.get("add"):
            log = log._replace(has_files=True)
    return log
