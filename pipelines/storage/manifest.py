"""Reads and writes the checkpoint's manifest: what must not change as long as the checkpoint is used (decision 6)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from halfway.pipelines.storage.delta_tables import ends_of_halves
from halfway.pipelines.storage.file_systems import read_json, write_json
from halfway.schemas.settings import Settings, StateSettings, StorageSettings
from halfway.schemas.state_format import FORMAT_VERSION

MANIFEST_FILE = "halfway.json"
STATUS_FILE = "status.json"


def checkpoint_file(storage: StorageSettings, name: str) -> str:
    """Return the URI of a file in the checkpoint."""
    return f"{storage.checkpoint.rstrip('/')}/{name}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint was made with."""

    format_version: int
    buckets: int
    half_topic: str
    op_topic: str
    adopted: Mapping[int, int]
    """By partition of the half topic: the offset up to which the adopted tables may hold halves. Empty if none were
    adopted."""
    bucket_keys: tuple[int, ...]
    """The keys that Spark groups the buckets by."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Read a manifest. One of another format is not interpreted: `verify_ownership` refuses it."""
        known: dict[str, Any] = {field.name: content.get(field.name) for field in fields(cls)}
        if known["format_version"] == FORMAT_VERSION:
            known["adopted"] = {int(partition): end for partition, end in content["adopted"].items()}
            known["bucket_keys"] = tuple(content["bucket_keys"])
        return cls(**known)


def read_manifest(spark: SparkSession, storage: StorageSettings) -> Manifest | None:
    """Return the checkpoint's manifest; None for a new checkpoint."""
    content = read_json(spark, checkpoint_file(storage, MANIFEST_FILE))
    return Manifest.from_json(content) if content else None


def write_manifest(spark: SparkSession, settings: Settings, *, adopt: bool) -> Manifest:
    """Write and return the manifest of a new checkpoint.

    Args:
        spark: the session.
        settings: what the checkpoint is made with.
        adopt: record how far into the half topic the tables reach: they may hold the outcomes of halves before that.
    """
    manifest = Manifest(
        FORMAT_VERSION,
        settings.state.buckets,
        settings.kafka.half_topic,
        settings.kafka.op_topic,
        ends_of_halves(spark, settings.storage) if adopt else {},
        _even_keys(spark, settings.state),
    )
    write_json(spark, checkpoint_file(settings.storage, MANIFEST_FILE), asdict(manifest))
    return manifest


def _even_keys(spark: SparkSession, state: StateSettings) -> tuple[int, ...]:
    """Return keys for the buckets that Spark spreads evenly over its tasks.

    Spark places a group by a hash of its key. Of 64 buckets numbered from 0, one of eight tasks would get 12, and the
    others would wait for it.
    """
    room = [len(range(task, state.buckets, state.shuffle_partitions)) for task in range(state.shuffle_partitions)]
    keys: list[int] = []
    begin = 0
    while any(room):
        placed = spark.range(begin, begin + 1024).select("id", F.pmod(F.hash(F.col("id").cast("int")), F.lit(len(room))))
        for key, task in sorted(placed.collect()):
            if room[task]:
                room[task] -= 1
                keys.append(key)
        begin += 1024
    return tuple(keys)
