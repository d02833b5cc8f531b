"""Reads from files on this machine, without Spark, which checkpoint and tables belong together."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from halfway.pipelines.storage.delta_tables import Owner
from halfway.pipelines.storage.file_systems import local_path
from halfway.pipelines.storage.lineage import COMMITS_LOOKED_AT, TableCommit, commit_of
from halfway.pipelines.storage.manifest import MANIFEST_FILE, METADATA_FILE, Manifest
from halfway.pipelines.storage.missing_tables import OFFSETS
from halfway.pipelines.storage.ownership import Ownership
from halfway.pipelines.storage.state_reader import LocalFiles
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
        logs = {table: _log_of(storage, table) for table in Table}
        manifest = _json(checkpoint / MANIFEST_FILE)
        return Ownership(
            manifest=Manifest.from_json(manifest) if manifest else None,
            query_id=_json(checkpoint / METADATA_FILE).get("id"),
            last_batch_id=max(LocalFiles(checkpoint).batches(OFFSETS), default=None),
            tables={table: Owner.of(_table_properties(log)) for table, log in logs.items() if log.is_dir()},
        )


def local_commits(storage: StorageSettings, table: Table) -> list[TableCommit]:
    """Return the newest commits of a table, the newest first."""
    return [_commit_in(file) for file in sorted(_log_of(storage, table).glob("[0-9]*.json"), reverse=True)[:COMMITS_LOOKED_AT]]


def _commit_in(file: Path) -> TableCommit:
    actions = map(json.loads, file.read_text().splitlines())
    info: dict[str, Any] = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
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


def _table_properties(log: Path) -> dict[str, str]:
    """Return a Delta table's properties from its log: the newest checkpoint and the JSON file of each later commit."""
    version = _json(log / "_last_checkpoint").get("version", -1)
    properties: dict[str, str] = {}
    for part in log.glob(f"{version:020d}.checkpoint*.parquet"):
        actions = pq.read_table(part, columns=["metaData"])["metaData"].drop_null().to_pylist()
        properties = dict(actions[0]["configuration"]) if actions else properties
    while (commit := log / f"{(version := version + 1):020d}.json").exists():
        for line in commit.read_text().splitlines():
            properties = json.loads(line).get("metaData", {}).get("configuration", properties)
    return properties
