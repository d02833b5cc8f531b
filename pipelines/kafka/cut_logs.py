"""Notices a log that has lost its end and has grown again: new records are then where the job has read others.

Kafka cuts a log at an unclean election, after a power cut of a broker whose replica was the only one, and when a disk
is put back. Spark notices it only while the log is shorter than what was read.
"""

from collections.abc import Mapping
from itertools import islice

from confluent_kafka import Consumer, TopicPartition

from halfway.pipelines.kafka.admin import REQUEST_LIMIT_S, Admin
from halfway.pipelines.kafka.range_reader import READ_UNCOMMITTED, OffsetRange, ranges_consumer, read_ranges, retained
from halfway.pipelines.kafka.rights import FETCH_GROUP
from halfway.schemas.errors import RecordsLostError
from halfway.schemas.headers import TICK
from halfway.schemas.records import headers_of
from halfway.schemas.settings import KafkaSettings

_SEARCHED = 10_000
"""The tick is among the first records of its time. Only after a clock was put back are there others, however many."""

Places = Mapping[str, Mapping[int, int]]


def verify_not_cut(kafka: KafkaSettings, client: Admin, read_to: Places, ticked_ms: Places) -> None:
    """Look for the last tick that was read of each partition: it must still be before what is read next.

    A tick that Kafka may have deleted, and a log that is shorter than what was read, prove nothing here.

    Args:
        kafka: where Kafka is.
        client: an admin client.
        read_to: by topic and partition, the offset after the last record that was read.
        ticked_ms: by topic and partition, the time of the last tick that was read.

    Raises:
        RecordsLostError: a tick is not there any more.
        TopicError: a topic is missing.
        KafkaUnavailableError: Kafka cannot be reached.
    """
    with ranges_consumer(kafka, FETCH_GROUP, READ_UNCOMMITTED) as consumer:
        for topic, ticks in ticked_ms.items():
            kept, ends = retained(consumer, client, topic), read_to.get(topic, {})
            asked = [TopicPartition(topic, number, at_ms) for number, at_ms in ticks.items() if number in kept and number in ends]
            for place in consumer.offsets_for_times(asked, timeout=REQUEST_LIMIT_S) if asked else ():
                first, end = kept[place.partition].first, ends[place.partition]
                if place.error is not None or kept[place.partition].end < end:
                    continue
                begin = place.offset if place.offset >= 0 else end
                may_be_deleted = first > 0 and begin <= first
                if not may_be_deleted and not _has_tick(consumer, topic, place.partition, OffsetRange(begin, end), ticks[place.partition]):
                    raise RecordsLostError(
                        f"partition {place.partition} of {topic} has lost records that this job had read, and new ones are in their place, "
                        "before where it would go on: a broker lost its disk, or was elected without them. To read what is there, set "
                        "storage.checkpoint to a new folder and start once with `halfway resolve --adopt`, which writes nothing that the "
                        "tables hold"
                    )


def _has_tick(consumer: Consumer, topic: str, partition: int, offsets: OffsetRange, at_ms: int) -> bool:
    """Return True if a range has a tick of this time, or is too long to tell."""
    left = _SEARCHED
    for record in islice(read_ranges(consumer, topic, {partition: offsets}), _SEARCHED):
        left -= 1
        if record.timestamp()[1] == at_ms and any(name == TICK for name, _ in headers_of(record) or ()):
            return True
    return not left
