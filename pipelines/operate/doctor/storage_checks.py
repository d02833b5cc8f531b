"""`halfway doctor` on tables and checkpoint: writable, and do they belong together? Plain files where they are local, or else Spark."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from halfway.pipelines.operate.doctor.findings import Finding, State, existing, looked_at
from halfway.pipelines.runtime.session import spark_session
from halfway.pipelines.storage.checkpoint import (
    FACTS_FILE,
    LOCK_FILE,
    Belongings,
    check_ownership,
    is_in_use,
    refuse_strangers,
)
from halfway.pipelines.storage.delta_tables import OWNER_PROPERTY
from halfway.pipelines.storage.file_systems import check_writable, local_path
from halfway.schemas.errors import SetupError
from halfway.schemas.settings import Settings, StorageSettings
from halfway.schemas.tables import Table


def storage(settings: Settings) -> Iterator[Finding]:
    """Look at the warehouse, the checkpoint and whose they are."""
    schema = settings.storage.catalog_schema
    if schema:
        yield Finding("warehouse", State.UNKNOWN, f"the tables are in the catalog's schema {schema}: who may write them, the catalog knows")
    else:
        yield from looked_at("warehouse", lambda: _writable("warehouse", settings.storage.warehouse, settings))
    yield from looked_at("checkpoint", lambda: _writable("checkpoint", settings.storage.checkpoint, settings))
    yield from looked_at("ownership", lambda: _ownership(settings))


def _writable(name: str, uri: str, settings: Settings) -> Iterator[Finding]:
    folder = local_path(uri)
    if folder is None:
        check_writable(spark_session(settings), uri)
        yield Finding(name, State.OK, f"{uri} can be written")
        return
    there = existing(folder)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        what = f"storage.{name} {folder} cannot be written ({error.strerror})"
        raise SetupError(f"{what}: let this user write to {there}, or set storage.{name} to another folder") from None
    if name == "checkpoint" and (folder / LOCK_FILE).exists() and is_in_use(settings.storage):
        yield Finding(name, State.OK, f"{folder} is in use: a job is running on it, so that a second one would be refused")
    else:
        yield Finding(name, State.OK, f"{folder} can be written" + ("" if there == folder else "; the job will make it"))


def _ownership(settings: Settings) -> Iterator[Finding]:
    places = (settings.storage.warehouse, settings.storage.checkpoint)
    if settings.storage.catalog_schema or any(local_path(uri) is None for uri in places):
        check_ownership(spark_session(settings), settings, adopt=False)
        yield Finding("ownership", State.OK, "checkpoint and tables belong together")
        return
    found = found_locally(settings.storage)
    refuse_strangers(settings, found, adopt=False)
    new = not found.tables and not found.has_run
    yield Finding("ownership", State.OK, "nothing there yet: the first start makes it" if new else "checkpoint and tables belong together")


def found_locally(places: StorageSettings) -> Belongings:
    """Read what checkpoint and tables on this machine say of themselves, from their files alone: Spark takes 10 s to start.

    Raises:
        SetupError: if one of the files cannot be read, or is not what it should be.
    """
    warehouse, checkpoint = local_path(places.warehouse), local_path(places.checkpoint)
    if warehouse is None or checkpoint is None:
        raise SetupError("storage is not on this machine")
    try:
        logs = {table: warehouse / table / "_delta_log" for table in Table}
        commits = checkpoint / "commits"
        return Belongings(
            facts=_json(checkpoint / FACTS_FILE),
            query_id=_json(checkpoint / "metadata").get("id"),
            has_run=commits.is_dir() and any(commits.iterdir()),
            tables={table: _table_properties(log).get(OWNER_PROPERTY) for table, log in logs.items() if log.is_dir()},
        )
    except (OSError, ValueError) as error:
        raise SetupError(f"cannot read the checkpoint {checkpoint} or the tables in {warehouse}: {error}") from None


def _json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content


def _table_properties(log: Path) -> dict[str, str]:
    """Return a Delta table's properties: its log is the newest checkpoint, and a JSON file for each commit since."""
    version = _json(log / "_last_checkpoint").get("version", -1)
    properties: dict[str, str] = {}
    for part in log.glob(f"{version:020d}.checkpoint*.parquet"):
        actions = pq.read_table(part, columns=["metaData"])["metaData"].drop_null().to_pylist()
        properties = dict(actions[0]["configuration"]) if actions else properties
    while (commit := log / f"{(version := version + 1):020d}.json").exists():
        for line in commit.read_text().splitlines():
            properties = json.loads(line).get("metaData", {}).get("configuration", properties)
    return properties
