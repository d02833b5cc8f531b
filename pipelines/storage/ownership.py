"""Reads which checkpoint owns which tables, and refuses a start where they do not belong together (decision 6)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from pyspark.sql import SparkSession

from halfway.pipelines.storage.delta_tables import owner_of, table_exists, table_name
from halfway.pipelines.storage.file_systems import names_in, read_json
from halfway.pipelines.storage.manifest import Manifest, checkpoint_file, read_manifest
from halfway.schemas.errors import OwnershipError
from halfway.schemas.settings import Settings, StorageSettings
from halfway.schemas.state_format import FORMAT_VERSION, other_format
from halfway.schemas.tables import Table


@dataclass(frozen=True, slots=True)
class Ownership:
    """What a checkpoint and the tables say about themselves."""

    manifest: Manifest | None
    """None for a new checkpoint."""
    query_id: str | None
    has_run: bool
    tables: Mapping[Table, str | None]
    """The tables that exist, with the id of the query that owns each."""


def read_ownership(spark: SparkSession, storage: StorageSettings) -> Ownership:
    """Read what the checkpoint and the tables say about themselves."""
    owners = {table: owner_of(spark, storage, table) for table in Table if table_exists(spark, storage, table)}
    metadata = read_json(spark, checkpoint_file(storage, "metadata"))
    return Ownership(
        manifest=read_manifest(spark, storage),
        query_id=str(metadata["id"]) if metadata else None,
        has_run=bool(names_in(spark, checkpoint_file(storage, "commits"))),
        tables=owners,
    )


def verify_ownership(settings: Settings, found: Ownership, *, adopt: bool) -> None:
    """Refuse a start whose checkpoint, tables and settings do not belong together. Changes nothing.

    Args:
        settings: the job's settings.
        found: what the checkpoint and the tables say about themselves.
        adopt: allow a new checkpoint to take over the tables of another one.

    Raises:
        OwnershipError: something does not fit; the message says what to do.
    """
    if found.manifest is not None:
        _verify_manifest(settings, found.manifest)
    for table in Table:
        _verify_table(settings.storage, table, found, adopt=adopt)
    others = {owner for owner in found.tables.values() if owner not in (None, found.query_id)}
    if adopt and found.query_id is not None and others:
        _refuse(
            f"--adopt needs a new checkpoint, and {settings.storage.checkpoint} has been used: set storage.checkpoint to a folder that "
            "does not exist yet"
        )


def _verify_manifest(settings: Settings, manifest: Manifest) -> None:
    if manifest.format_version != FORMAT_VERSION:
        _refuse(other_format(f"the checkpoint {settings.storage.checkpoint}", manifest.format_version))
    frozen = {
        "state.buckets": (manifest.buckets, settings.state.buckets),
        "kafka.half_topic": (manifest.half_topic, settings.kafka.half_topic),
        "kafka.op_topic": (manifest.op_topic, settings.kafka.op_topic),
    }
    for name, (made_with, wanted) in frozen.items():
        if made_with != wanted:
            _refuse(
                f"the checkpoint {settings.storage.checkpoint} was made with {name} = {made_with}, not {wanted}: set it back, or "
                "start a new checkpoint (another storage.checkpoint) with `halfway resolve --adopt`"
            )


def _verify_table(storage: StorageSettings, table: Table, found: Ownership, *, adopt: bool) -> None:
    place = "storage.catalog_schema" if storage.catalog_schema else "storage.warehouse"
    name, owner = table_name(storage, table), found.tables.get(table)
    if owner is not None and owner != found.query_id and not adopt:
        _refuse(
            f"the table {name} belongs to another checkpoint than {storage.checkpoint} (query {owner}): set storage.checkpoint to "
            f"that one, or {place} to a new one; if the old checkpoint is lost, `halfway resolve --adopt` takes the tables over"
        )
    if owner is None and found.query_id is not None and found.has_run:
        what = "has no owner" if table in found.tables else "is missing"
        _refuse(
            f"the checkpoint {storage.checkpoint} has run before, but its table {name} {what}: set {place} to where its tables "
            "are, or storage.checkpoint to a new folder to start again from the topics"
        )


def _refuse(text: str) -> NoReturn:
    raise OwnershipError(text)
