"""Notices a log that has lost its end, and may have grown again: new records are then where the job has read others.

Kafka cuts a log at an unclean election, after a power cut of a broker whose replica was the only one, and when a disk
is put back. Spark notices it only while the log is shorter than what was read, and the job's own ticks lengthen it: so
a start looks before its first tick.
"""

from collections.abc import Iterator, Mapping
from itertools import islice

from confluent_kafka import OFFSET_BEGINNING, TIMESTAMP_LOG_APPEND_TIME, Consumer, Message

from halfway.pipelines.kafka.admin import Admin
from halfway.pipelines.kafka.range_reader import (
    READ_LIMIT_S,
    READ_UNCOMMITTED,
    OffsetRange,
    PartitionReader,
    offsets_since,
    ranges_consumer,
    read_ranges,
    retained,
)
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

    A record that Kafka may have deleted proves nothing. A log that is shorter than what was read is waited for.

    Args:
        kafka: where Kafka is.
        client: an admin client.
        read_to: by topic and partition, the offset after the last record that was read.
        last_ms: by topic and partition, the time of the last record that was read; with CreateTime, of the last tick.

    Raises:
        RecordsLostError: a record is not there any more.
        TopicError: a topic is missing.
        AccessError: this user may not describe one of them.
        KafkaUnavailableError: Kafka cannot be reached, or a log is still shorter than what was read after a minute.
    """
    with ranges_consumer(kafka, FETCH_GROUP, READ_UNCOMMITTED) as consumer:
        for topic, times_ms in last_ms.items():
            kept = retained(consumer, client, topic)
            ends = {partition: end for partition, end in read_to.get(topic, {}).items() if partition in kept}
            for partition in (each for each, end in ends.items() if kept[each].end < end):
                with PartitionReader(consumer, topic, partition, READ_LIMIT_S) as reader:
                    reader.wait_for(ends[partition] - 1)
            known_ms = {partition: at_ms for partition, at_ms in times_ms.items() if partition in ends}
            for partition, found in offsets_since(consumer, topic, known_ms, READ_LIMIT_S).items():
                end, at_ms = ends[partition], times_ms[partition]
                begin = end if found < 0 else found
                if _may_hold(consumer, topic, partition, OffsetRange(begin, end), at_ms):
                    continue
                # Asked after the search: what was deleted while a start waited and looked is not lost.
                first = offsets_since(consumer, topic, {partition: OFFSET_BEGINNING})[partition]
                if not _may_be_deleted(consumer, topic, partition, OffsetRange(first, min(begin, end))):
                    raise RecordsLostError(
                        f"partition {partition} of {topic} has lost records that this job had read, and new ones are in their place, "
                        f"before where it would go on: {READ_WHAT_IS_THERE}"
                    )


def _may_be_deleted(consumer: Consumer, topic: str, partition: int, older: OffsetRange) -> bool:
    """Return True if Kafka may have deleted a record, by the range of older ones that are kept: it deletes them first.

    With CreateTime only ticks have the time of their offset. The last ones that were not lost are at the range's end.
    """
    last = OffsetRange(max(older.first, older.end - _SEARCHED), older.end)
    records = read_ranges(consumer, topic, {partition: last})
    return older.first > 0 and not any(_has_kafkas_time(record) or is_tick(record) for record in records)


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
    return record.timestamp()[1] == at_ms and (_has_kafkas_time(record) or headers_of(record) is None or is_tick(record))


def _is_later(record: Message, at_ms: int) -> bool:
    return _has_kafkas_time(record) and record.timestamp()[1] > at_ms


def _has_kafkas_time(record: Message) -> bool:
    return bool(record.timestamp()[0] == TIMESTAMP_LOG_APPEND_TIME)
