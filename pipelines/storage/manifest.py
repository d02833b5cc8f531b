"""Reads and writes the checkpoint's manifest: what must not change as long as the checkpoint is used (decision 6)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from pyspark.sql import SparkSession

from halfway.pipelines.storage.file_systems import read_json, write_json
from halfway.schemas.settings import StorageSettings
from halfway.schemas.state_format import FORMAT_VERSION

MANIFEST_FILE = "halfway.json"
STATUS_FILE = "status.json"
METADATA_FILE = "metadata"
"""Spark's own: `{"id": …}`, the id of the query."""


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
    adopted: Mapping[str, Mapping[int, int]]
    """By topic and partition: the offset up to which the tables held records when this checkpoint took them."""
    halves_since_ms: int
    """Verdicts before this time are of halves that Kafka had deleted by then, and that a former checkpoint settled."""
    bucket_keys: tuple[int, ...]
    """The keys that Spark groups the buckets by."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Read a manifest. One of another format is not interpreted: `verify_ownership` refuses it."""
        known: dict[str, Any] = {field.name: content.get(field.name) for field in fields(cls)}
        if known["format_version"] == FORMAT_VERSION and known["epoch"] is not None:
            known["adopted"] = {
                topic: {int(partition): end for partition, end in ends.items()} for topic, ends in content["adopted"].items()
            }
            known["bucket_keys"] = tuple(content["bucket_keys"])
        return cls(**known)


def read_manifest(spark: SparkSession, storage: StorageSettings) -> Manifest | None:
    """Return the checkpoint's manifest; None for a new checkpoint."""
    content = read_json(spark, checkpoint_file(storage, MANIFEST_FILE))
    return Manifest.from_json(content) if content else None


def write_manifest(spark: SparkSession, storage: StorageSettings, manifest: Manifest) -> None:
    """Write the manifest of a new checkpoint."""
    write_json(spark, checkpoint_file(storage, MANIFEST_FILE), asdict(manifest))
