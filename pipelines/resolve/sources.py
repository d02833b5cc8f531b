"""Reads the half and op topics as one stream, so that each batch sees both."""

import json
from collections.abc import Callable, Mapping, Sequence

from pyspark import Broadcast
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.listener import StreamingQueryProgress

from halfway.pipelines.kafka.range_reader import READ_COMMITTED, OffsetRange
from halfway.pipelines.kafka.spark_options import spark_options
from halfway.pipelines.storage.adopted_rows import former_records
from halfway.pipelines.storage.manifest import Manifest
from halfway.pipelines.storage.state_reader import last_read
from halfway.schemas.headers import Source
from halfway.schemas.settings import KafkaSettings, Settings
from halfway.transforms.former import FormerRecords


def read_records(spark: SparkSession, kafka: KafkaSettings, starting_offsets: str) -> DataFrame:
    """Return the stream of Kafka records of the half and op topics, with headers.

    Args:
        spark: the session.
        kafka: where Kafka is, and how much a batch reads.
        starting_offsets: where a checkpoint begins that has read nothing yet: `earliest` or `latest`.
    """
    options = source_options(kafka) | {"startingOffsets": starting_offsets}
    if kafka.max_offsets_per_trigger:
        options["maxOffsetsPerTrigger"] = str(kafka.max_offsets_per_trigger)
    return spark.readStream.format("kafka").options(**options).load()


def former_records_to_read(
    spark: SparkSession, settings: Settings, manifest: Manifest, retained: Callable[[], Mapping[str, Mapping[int, OffsetRange]]]
) -> Broadcast[FormerRecords] | None:
    """Return what former checkpoints have dealt with; None if this one reads nothing of it again (decision 6).

    Args:
        spark: the session.
        settings: the job's.
        manifest: of the new checkpoint.
        retained: returns the offsets that Kafka still holds of the half and op topics.
    """
    kafka, storage, read_to = settings.kafka, settings.storage, last_read(spark, settings.storage)
    to_read = any(
        read_to.get(topic, {}).get(partition, 0) < end for topic, ends in manifest.taken_at.items() for partition, end in ends.items()
    )
    if not to_read:
        return None
    first = {
        topic: {partition: max(kept.first, read_to.get(topic, {}).get(partition, 0)) for partition, kept in ranges.items()}
        for topic, ranges in retained().items()
    }
    records = former_records(spark, storage, kafka, manifest.epoch, first)
    ends = {Source.HALF: manifest.taken_at.get(kafka.half_topic, {}), Source.OP: manifest.taken_at.get(kafka.op_topic, {})}
    found = FormerRecords.of(records, manifest.halves_since_ms, ends)
    return spark.sparkContext.broadcast(found)


def source_options(kafka: KafkaSettings) -> dict[str, str]:
    """Return the options with which Spark's Kafka source reads both topics quickly."""
    return {
        **spark_options(kafka),
        "kafka.isolation.level": READ_COMMITTED,
        "subscribe": f"{kafka.half_topic},{kafka.op_topic}",
        "includeHeaders": "true",
        # Fail if Kafka has deleted records that were not read.
        "failOnDataLoss": "true",
        # Kafka waits 500 ms by default for more records, in each partition of a nearly idle batch.
        "kafka.fetch.max.wait.ms": "10",
        # A leader that froze is given up after this time, by default 30 s, and a request is tried twice and more.
        "kafka.request.timeout.ms": "15000",
        "kafka.max.partition.fetch.bytes": str(8 * 1024 * 1024),
        "kafka.max.poll.records": "10000",
        "kafka.receive.buffer.bytes": str(1024 * 1024),
    }


def records_since(spark: SparkSession, kafka: KafkaSettings, topics: Sequence[str], since_ms: int) -> DataFrame:
    """Return the records of these topics since `since_ms`, with Spark's Kafka columns and headers.

    Raises:
        SettingsError: no Kafka is configured.
    """
    options = {
        **spark_options(kafka),
        "kafka.isolation.level": READ_COMMITTED,
        "subscribe": ",".join(topics),
        "startingTimestamp": str(max(0, since_ms)),
        # Reads nothing from a partition that has no record since then.
        "startingOffsetsByTimestampStrategy": "latest",
        "includeHeaders": "true",
        "failOnDataLoss": "false",
    }
    return spark.read.format("kafka").options(**options).load()


def unread_records(progress: StreamingQueryProgress | None) -> dict[str, int] | None:
    """Return the backlog that the batch of this progress left: by topic, the records above its limit.

    Spark asks Kafka for the ends when it plans a batch, so that this is 0 wherever no rate limit cuts the batch short:
    ticks that come meanwhile are no backlog. Among the records of a backlog ticks count too, as Spark tells offsets.

    Returns None before the first batch and for a trigger without data, for which Spark reports no offsets.
    """
    source = progress.sources[0] if progress is not None and progress.sources else None
    read, latest = (_offsets(source.endOffset), _offsets(source.latestOffset)) if source is not None else (None, None)
    if not read or not latest:
        return None
    return {
        topic: sum(max(0, offset - read.get(topic, {}).get(partition, 0)) for partition, offset in partitions.items())
        for topic, partitions in latest.items()
    }


def _offsets(text: str) -> Mapping[str, Mapping[str, int]] | None:
    """Read `{"topic": {"0": 12}}`, or null for unknown offsets."""
    offsets: Mapping[str, Mapping[str, int]] | None = json.loads(text)
    return offsets
