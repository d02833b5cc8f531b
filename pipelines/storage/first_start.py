"""The first start of a checkpoint: it gets an id, becomes the owner of the tables, and is described by its manifest.

Each step can be repeated, and the manifest comes last. So a start that was killed anywhere is simply done again.
"""

import logging
import secrets
import uuid
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from halfway.pipelines.storage.adopted_rows import last_settled_ms
from halfway.pipelines.storage.delta_tables import claim_tables
from halfway.pipelines.storage.file_systems import delete_folder, write_json
from halfway.pipelines.storage.manifest import METADATA_FILE, SOURCES_FOLDER, Manifest, checkpoint_file, write_manifest
from halfway.pipelines.storage.ownership import Ownership
from halfway.schemas.settings import Settings, StateSettings
from halfway.schemas.state_format import FORMAT_VERSION

log = logging.getLogger(__name__)


class TopicFacts(NamedTuple):
    """What Kafka says of the half and op topics."""

    ids: Mapping[str, str]
    """Kafka's id of each topic."""
    deleted_before_ms: int
    """The time before which Kafka has deleted every half; 0 if it may hold an older one."""
    ends: Callable[[], Mapping[str, Mapping[int, int]]]
    """Returns, by topic and partition, the offset after the last record that there is now."""


def begin_checkpoint(spark: SparkSession, settings: Settings, found: Ownership, topics: TopicFacts) -> Manifest:
    """Make a checkpoint the owner of the tables, and return its manifest. It has run no batch yet.

    Args:
        spark: the session.
        settings: what the checkpoint is made with.
        found: what checkpoint and tables say about themselves. `verify_ownership` has accepted it.
        topics: what Kafka says of the topics.
    """
    storage, query_id = settings.storage, found.query_id
    if query_id is None or found.others(query_id):
        # If this start was killed once, another one may have taken the tables from it since. Its id is then fenced.
        query_id = str(uuid.uuid4())
        # Spark gives a query the id that it finds here. So the tables have their owner before the query starts.
        write_json(spark, checkpoint_file(storage, METADATA_FILE), {"id": query_id})
    # A start without a batch may have left Spark's note of where to begin, such as the end of the topics at that time.
    # Spark goes by it, whatever the options say.
    delete_folder(spark, checkpoint_file(storage, SOURCES_FOLDER))
    epoch = found.next_epoch(query_id)
    claim_tables(spark, storage, query_id, epoch)
    settled_ms = last_settled_ms(spark, storage) if epoch else 0
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        query_id=query_id,
        epoch=epoch,
        buckets=settings.state.buckets,
        half_topic=settings.kafka.half_topic,
        op_topic=settings.kafka.op_topic,
        halves_since_ms=min(_halves_since_ms(settings, topics.deleted_before_ms), settled_ms),
        # After the former owner is fenced: what it has read, and can append, was in the topics before.
        taken_at=topics.ends() if epoch else {},
        remembered_ms=settings.resolution.resolved_retention,
        bucket_keys=_even_keys(spark, settings.state),
        bucket_secret=secrets.token_hex(16),
        topic_ids=topics.ids,
        # An adoption that was killed is done again by a start without `--adopt`.
        starting_offsets="earliest" if epoch else settings.kafka.starting_offsets,
        settled_ms=settled_ms,
    )
    write_manifest(spark, storage, manifest)
    if epoch:
        log.info("event=tables_adopted epoch=%d effect=what_they_hold_is_not_written_again", epoch)
    return manifest


def _halves_since_ms(settings: Settings, deleted_before_ms: int) -> int:
    """Return the time before which a verdict without a half is one of a half that Kafka has deleted.

    A verdict that is older by its time-out would be an orphan anyhow (R10). The brokers' clocks may differ.
    """
    numbers = settings.resolution
    return max(0, deleted_before_ms - numbers.transactionTimeOut - numbers.max_clock_skew)


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
