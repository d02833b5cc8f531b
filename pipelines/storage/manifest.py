"""Reads and writes the checkpoint's manifest: what must not change as long as the checkpoint is used (decision 6)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from pydantic import TypeAdapter
from pyspark.sql import SparkSession

from halfway.pipelines.storage.file_systems import read_json, write_json
from halfway.schemas.errors import OwnershipError
from halfway.schemas.headers import SIGNED_WINDOW_MS
from halfway.schemas.settings import StorageSettings
from halfway.schemas.state_format import FORMAT_VERSION

MANIFEST_FILE = "halfway.json"
STATUS_FILE = "status.json"
METADATA_FILE = "metadata"
"""Spark's own: `{"id": …}`, the id of the query."""
SOURCES_FOLDER = "sources"
"""Spark's own: where the query begins to read."""


def checkpoint_file(storage: StorageSettings, name: str) -> str:
    """Return the URI of a file in the checkpoint."""
    return f"{storage.checkpoint.rstrip('/')}/{name}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint was made with."""

    format_version: int
    query_id: str
    epoch: int
    """How often the tables had been adopted when this checkpoint took them (docs/tables.md)."""
    buckets: int
    half_topic: str
    op_topic: str
    halves_since_ms: int
    """Verdicts before this time are of halves that Kafka had deleted by then, and that a former checkpoint settled."""
    taken_at: Mapping[str, Mapping[int, int]]
    """By topic and partition: where the topics ended when this checkpoint had taken the tables; empty if it took none.

    A former checkpoint may have read what is before, and has read nothing of what is later.
    """
    remembered_ms: int
    """`resolved_retention` then: for so long the messages in the tables are remembered (R11)."""
    bucket_keys: tuple[int, ...]
    """The keys that Spark groups the buckets by."""
    bucket_secret: str
    """In hexadecimal digits. Who does not know it cannot choose ids that fall into one bucket."""
    topic_ids: Mapping[str, str]
    """Kafka's id of each topic that it reads."""
    starting_offsets: str
    """Where it begins to read. Its first start may be killed before its first batch, and the settings change."""
    settled_ms: int = 0
    """When the last commit or discard was in the tables that this checkpoint took; 0 if it took none."""

    @property
    def copied_until_ms(self) -> int:
        """Until when a signed half may be a copy of one whose message is in the tables that were taken (R14)."""
        return self.settled_ms and self.settled_ms + 2 * SIGNED_WINDOW_MS

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Manifest":
        """Read a manifest. One of another format is not interpreted: `verify_ownership` refuses it.

        Raises:
            ValueError: it is damaged.
        """
        if content.get("format_version") != FORMAT_VERSION:
            known: dict[str, Any] = {each.name: content.get(each.name) for each in fields(cls)}
            return cls(**known)
        manifest = _MANIFEST.validate_python(content)
        if len(set(manifest.bucket_keys)) != manifest.buckets:
            raise ValueError(f"there are not {manifest.buckets} bucket_keys")
        return manifest


_MANIFEST = TypeAdapter(Manifest)


def read_manifest(spark: SparkSession, storage: StorageSettings) -> Manifest | None:
    """Return the checkpoint's manifest; None for a new checkpoint.

    Raises:
        OwnershipError: it is damaged.
    """
    content = read_checkpoint_file(spark, storage, MANIFEST_FILE)
    try:
        return Manifest.from_json(content) if content else None
    except ValueError as error:
        raise damaged(storage, MANIFEST_FILE) from error


def read_checkpoint_file(spark: SparkSession, storage: StorageSettings, name: str) -> dict[str, Any] | None:
    """Return what a JSON file of the checkpoint holds; None if it does not exist. A power cut may leave a part of it.

    Raises:
        OwnershipError: it is damaged.
    """
    try:
        return read_json(spark, checkpoint_file(storage, name))
    except ValueError as error:
        raise damaged(storage, name) from error


def damaged(storage: StorageSettings, name: str) -> OwnershipError:
    """Return the error that says that a file of the checkpoint is damaged."""
    what = "restore it, or start a new checkpoint (another storage.checkpoint) with `halfway resolve --adopt`"
    return OwnershipError(f"{checkpoint_file(storage, name)} is damaged: {what}")


def write_manifest(spark: SparkSession, storage: StorageSettings, manifest: Manifest) -> None:
    """Write the manifest of a new checkpoint."""
    write_json(spark, checkpoint_file(storage, MANIFEST_FILE), asdict(manifest))
