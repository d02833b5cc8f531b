"""Reads which checkpoint owns which tables, and refuses a start where they do not belong together (decision 6)."""

from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import SparkSession

from halfway.pipelines.storage.adopted_rows import last_epoch
from halfway.pipelines.storage.delta_tables import Owner, owner_at_append, owner_of, table_exists, table_name
from halfway.pipelines.storage.manifest import MANIFEST_FILE, METADATA_FILE, Manifest, damaged, read_checkpoint_file, read_manifest
from halfway.pipelines.storage.missing_tables import OFFSETS, missing_table
from halfway.pipelines.storage.state_reader import HadoopFiles, damaged_log
from halfway.schemas.errors import OwnershipError
from halfway.schemas.settings import Settings, StorageSettings
from halfway.schemas.state_format import FORMAT_VERSION, other_format
from halfway.schemas.tables import Table

UNNAMED = "not named: the table is a copy"


@dataclass(frozen=True, slots=True)
class Ownership:
    """What a checkpoint and the tables say about themselves."""

    manifest: Manifest | None
    """None for a new checkpoint, or one whose first start was killed."""
    query_id: str | None
    last_batch_id: int | None
    """The last batch that the checkpoint has planned; None before the first one."""
    tables: Mapping[Table, Owner]
    """The tables that exist, with the owner of each."""

    @property
    def complete_manifest(self) -> Manifest | None:
        """Return the manifest; None if the checkpoint's first start has not come to its end, and must be done again."""
        is_own = self.manifest is not None and self.manifest.query_id == self.query_id
        return self.manifest if is_own and all(self._owns(table) for table in Table) else None

    def next_epoch(self, query_id: str) -> int:
        """Return the epoch of a new checkpoint: above that of every table that it takes over.

        A start that was killed may have taken some of the tables: it has given them the epoch of this start.
        """
        owners = [owner for owner in self.tables.values() if owner.query_id is not None]
        return max([0, *(owner.epoch + (owner.query_id != query_id) for owner in owners)])

    def queries(self) -> set[str | None]:
        """Return the queries of the checkpoint and of the tables, former owners too."""
        owners = self.tables.values()
        return {self.query_id, *(owner.query_id for owner in owners), *(owner.former_id for owner in owners)}

    def others(self, query_id: str | None) -> set[str]:
        """Return the queries that own tables, without this one."""
        return {owner.query_id for owner in self.tables.values() if owner.query_id not in (None, query_id)}

    def _owns(self, table: Table) -> bool:
        return table in self.tables and self.tables[table].query_id == self.query_id is not None


def read_ownership(spark: SparkSession, storage: StorageSettings) -> Ownership:
    """Read what the checkpoint and the tables say about themselves.

    Raises:
        OwnershipError: a file of the checkpoint is damaged.
    """
    owners = {table: _owner(spark, storage, table) for table in Table if table_exists(spark, storage, table)}
    metadata = read_checkpoint_file(spark, storage, METADATA_FILE)
    files = HadoopFiles(spark, storage)
    if name := damaged_log(files):
        raise damaged(storage, name)
    return Ownership(
        manifest=read_manifest(spark, storage),
        query_id=str(metadata["id"]) if metadata else None,
        last_batch_id=max(files.batches(OFFSETS), default=None),
        tables=owners,
    )


def _owner(spark: SparkSession, storage: StorageSettings, table: Table) -> Owner:
    """Return the owner of a table. Rows without one were copied: to the copy, their checkpoint is a former one."""
    owner = owner_of(spark, storage, table)
    epoch = last_epoch(spark, storage, table) if owner.query_id is None else None
    return owner if epoch is None else Owner(UNNAMED, epoch)


def verify_still_owner(spark: SparkSession, storage: StorageSettings, table: Table, query_id: str, *, at_append: bool = False) -> None:
    """Refuse to go on if another checkpoint has taken over a table since the start.

    Args:
        spark: the session.
        storage: where the tables are.
        table: the table.
        query_id: the job's query.
        at_append: only look at what this session's last append found, which takes no time.

    Raises:
        OwnershipError: the message names the new owner, or says that the table is another one.
    """
    owner = (owner_at_append if at_append else owner_of)(spark, storage, table)
    if owner.query_id is None:
        raise missing_table(storage, table_name(storage, table), "has no owner: another one is in its place", has_run=True)
    if owner.query_id != query_id:
        raise OwnershipError(
            f"another checkpoint (query {owner.query_id}, epoch {owner.epoch}) has taken over the table {table_name(storage, table)}: "
            f"this job has ended and appends nothing more, and its checkpoint {storage.checkpoint} can be deleted"
        )


def verify_ownership(settings: Settings, found: Ownership, topic_ids: Mapping[str, str], *, adopt: bool) -> None:
    """Refuse a start whose checkpoint, tables and settings do not belong together. Changes nothing.

    Args:
        settings: the job's settings.
        found: what the checkpoint and the tables say about themselves.
        topic_ids: Kafka's ids of the half and op topics, as far as they are known.
        adopt: allow a new checkpoint to take over the tables of another one.

    Raises:
        OwnershipError: something does not fit; the message says what to do.
    """
    if found.manifest is not None:
        _verify_manifest(settings, found.manifest)
        verify_same_topics(settings.storage, found.manifest, topic_ids)
    if found.last_batch_id is not None and (found.manifest is None or found.manifest.query_id != found.query_id):
        # It says which bucket an id is in: with another one, no verdict would find its half.
        what = f"its files {MANIFEST_FILE} and {METADATA_FILE} are of different checkpoints"
        if found.manifest is None or found.query_id is None:
            what = f"its file {MANIFEST_FILE if found.manifest is None else METADATA_FILE} is missing"
        raise OwnershipError(
            f"the checkpoint {settings.storage.checkpoint} has run before, but {what}: put its own back, or "
            "set storage.checkpoint to a new folder and start once with `halfway resolve --adopt`"
        )
    for table in Table:
        _verify_table(settings.storage, table, found, adopt=adopt)
    if adopt and found.last_batch_id is not None and found.others(found.query_id):
        raise OwnershipError(
            f"--adopt needs a new checkpoint, and {settings.storage.checkpoint} has been used: set storage.checkpoint to a folder that "
            "does not exist yet"
        )


def _verify_manifest(settings: Settings, manifest: Manifest) -> None:
    if manifest.format_version != FORMAT_VERSION:
        raise OwnershipError(other_format(f"the checkpoint {settings.storage.checkpoint}", manifest.format_version))
    frozen = {
        "state.buckets": (manifest.buckets, settings.state.buckets),
        "kafka.half_topic": (manifest.half_topic, settings.kafka.half_topic),
        "kafka.op_topic": (manifest.op_topic, settings.kafka.op_topic),
    }
    for name, (made_with, wanted) in frozen.items():
        if made_with != wanted:
            once = "" if name == "state.buckets" else ", once nothing is pending, because what is would get no outcome,"
            raise OwnershipError(
                f"the checkpoint {settings.storage.checkpoint} was made with {name} = {made_with}, not {wanted}: set it back, or{once} "
                "start a new checkpoint (another storage.checkpoint) with `halfway resolve --adopt`"
            )


def verify_same_topics(storage: StorageSettings, manifest: Manifest, topic_ids: Mapping[str, str]) -> None:
    """Refuse other topics of the same names. Spark would skip what they hold before the offsets that it has read to.

    Raises:
        OwnershipError: Kafka's id of a topic is another one.
    """
    for topic, known in manifest.topic_ids.items():
        if topic_ids.get(topic, known) != known:
            raise OwnershipError(
                f"the topic {topic} is not the one that the checkpoint {storage.checkpoint} has read: it was deleted and recreated, or "
                "kafka.bootstrap_servers names another Kafka. Set that back, or start a new checkpoint (another storage.checkpoint) with "
                "`halfway resolve --adopt`: what is pending has no body there, and gets no outcome"
            )


def _verify_table(storage: StorageSettings, table: Table, found: Ownership, *, adopt: bool) -> None:
    place = "storage.catalog_schema" if storage.catalog_schema else "storage.warehouse"
    name, owner = table_name(storage, table), found.tables.get(table, Owner(None)).query_id
    if owner is not None and owner != found.query_id and not adopt:
        raise OwnershipError(
            f"the table {name} belongs to another checkpoint than {storage.checkpoint} (query {owner}): set storage.checkpoint to "
            f"that one, or {place} to a new one; if the old checkpoint is lost, `halfway resolve --adopt` takes the tables over"
        )
    if owner is None and found.last_batch_id is not None:
        raise missing_table(storage, name, "has no owner" if table in found.tables else "is missing", has_run=True)
