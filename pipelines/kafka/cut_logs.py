"""Notices a log that has lost its end and has grown again: new records are then where the job has read others.

Kafka cuts a log at an unclean election, after a power cut of a broker whose replica was the only one, and when a disk
is put back. Spark notices it only while the log is shorter than what was read.
"""

from collections.abc import Iterator, Mapping
from itertools import islice

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, Consumer, Message, TopicPartition

from halfway.pipelines.kafka.admin import REQUEST_LIMIT_S, Admin
from halfway.pipelines.kafka.range_reader import READ_UNCOMMITTED, OffsetRange, ranges_consumer, read_ranges, retained
from halfway.pipelines.kafka.rights import FETCH_GROUP
from halfway.pipelines.kafka.tick_records import is_tick
from halfway.schemas.errors import READ_WHAT_IS_THERE, RecordsLostError
from halfway.schemas.records import headers_of
from halfway.schemas.settings import KafkaSettings

_SEARCHED = 10_000

ByPartition = Mapping[str, Mapping[int, int]]
"""By topic and partition."""


def verify_not_cut(kafka: KafkaSettings, client: Admin, read_to: ByPartition, last_ms: ByPartition) -> None:
    """Look for the last record that was read of each partition: it must still be before what is read next.

    A record that Kafka may have deleted, and a log that is shorter than what was read, prove nothing here.

    Args:
        kafka: where Kafka is.
        client: an admin client.
        read_to: by topic and partition, the offset after the last record that was read.
        last_ms: by topic and partition, the time of the last record that was read; with CreateTime, of the last tick.

    Raises:
        RecordsLostError: a record is not there any more.
        TopicError: a topic is missing.
        KafkaUnavailableError: Kafka cannot be reached.
    """
    with ranges_consumer(kafka, FETCH_GROUP, READ_UNCOMMITTED) as consumer:
        for topic, times_ms in last_ms.items():
            kept, ends = retained(consumer, client, topic), read_to.get(topic, {})
            asked = [TopicPartition(topic, number, at_ms) for number, at_ms in times_ms.items() if number in kept and number in ends]
            for place in consumer.offsets_for_times(asked, timeout=REQUEST_LIMIT_S) if asked else ():
                first, end = kept[place.partition].first, ends[place.partition]
                if place.error is not None or kept[place.partition].end < end:
                    continue
                begin = place.offset if place.offset >= 0 else end
                may_be_deleted = first >= end or (first > 0 and begin <= first)
                at_ms = times_ms[place.partition]
                if not may_be_deleted and not _may_hold(consumer, topic, place.partition, OffsetRange(begin, end), at_ms):
                    raise RecordsLostError(
                        f"partition {place.partition} of {topic} has lost records that this job had read, and new ones are in their place, "
                        f"before where it would go on: {READ_WHAT_IS_THERE}"
                    )


def _may_hold(consumer: Consumer, topic: str, partition: int, offsets: OffsetRange, at_ms: int) -> bool:
    """Return True if a range has a record of this time, or does not tell: of a long one, both ends are searched.

    A longer range begins before the record only if a clock was put back. Then the record is near the end, and what
    follows it is refused records. Where all that is there came later by Kafka's clock, it has taken the record's place.
    """

    def records(some: OffsetRange) -> Iterator[Message]:
        return islice(read_ranges(consumer, topic, {partition: some}), _SEARCHED)

    searched = 0
    for record in records(offsets):
        searched += 1
        if _is_of(record, at_ms):
            return True
    if searched < _SEARCHED:
        return False
    last = OffsetRange(max(offsets.first, offsets.end - _SEARCHED), offsets.end)
    return any(_is_of(record, at_ms) or not _is_later(record, at_ms) for record in records(last))


def _is_of(record: Message, at_ms: int) -> bool:
    """Return True if a record has this time by Kafka, or may be a tick that has it by a producer."""
    kind, its_ms = record.timestamp()
    return its_ms == at_ms and (kind == TIMESTAMP_LOG_APPEND_TIME or headers_of(record) is None or is_tick(record))


def _is_later(record: Message, at_ms: int) -> bool:
    kind, its_ms = record.timestamp()
    return kind == TIMESTAMP_LOG_APPEND_TIME and its_ms > at_ms
