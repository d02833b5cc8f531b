"""Tells what topics retain, for the job and the commands, and scans a topic from a time to its present end."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Self

from confluent_kafka import OFFSET_END, TIMESTAMP_LOG_APPEND_TIME, Consumer, Message
from confluent_kafka.admin import AclOperation

from halfway.pipelines.kafka.admin import Admin, admin_client
from halfway.pipelines.kafka.range_reader import READ_COMMITTED, OffsetRange, offsets_since, ranges_consumer, read_ranges, retained
from halfway.pipelines.kafka.rights import FETCH_GROUP, OPERATOR_GROUP, verify_rights
from halfway.schemas.settings import KafkaSettings

_PROGRESS_RECORDS = 4_096
NEVER = 2**63 - 1
"""Later than any time: the topic proves nothing."""


def retained_ranges(kafka: KafkaSettings, topics: list[str], group: str = OPERATOR_GROUP) -> dict[str, dict[int, OffsetRange]]:
    """Return the offsets that each partition of these topics retains.

    Args:
        kafka: where Kafka is.
        topics: their names.
        group: the consumer group to ask as, which this user may describe. It is never joined.

    Raises:
        TopicError: a topic is missing.
        AccessError: this user may not describe one of them.
        KafkaUnavailableError: Kafka cannot be reached.
    """
    client = admin_client(kafka)
    with ranges_consumer(kafka, group) as consumer:
        return {topic: retained(consumer, client, topic) for topic in topics}


def deleted_before_ms(kafka: KafkaSettings, topic: str) -> int:
    """Return a time before which Kafka has deleted every record of a topic; 0 if it may still hold an older one.

    Raises:
        TopicError: the topic is missing.
        AccessError: this user may not describe it.
        KafkaUnavailableError: Kafka cannot be reached.
    """
    client, first_ms = admin_client(kafka), []
    with ranges_consumer(kafka, FETCH_GROUP) as consumer:
        for partition, kept in retained(consumer, client, topic).items():
            if kept.first == 0:
                return 0
            for record in islice(read_ranges(consumer, topic, {partition: kept}), 1):
                kind, at_ms = record.timestamp()
                if kind != TIMESTAMP_LOG_APPEND_TIME:  # a later record may be older
                    return 0
                first_ms.append(int(at_ms))
    return min(first_ms, default=0)


class TopicScan:
    """What a topic holds when it is opened."""

    def __init__(self, consumer: Consumer, client: Admin, topic: str) -> None:
        """Read the offsets that the topic retains. Use `open`."""
        self._consumer = consumer
        self._topic = topic
        self.retained = retained(consumer, client, topic)

    @classmethod
    @contextmanager
    def open(cls, kafka: KafkaSettings, topic: str, isolation_level: str = READ_COMMITTED) -> Iterator[Self]:
        """Open a scan of everything that the topic holds now.

        Args:
            kafka: where Kafka is.
            topic: its name.
            isolation_level: Kafka's. `READ_COMMITTED` ends at an open transaction, as the job does (R18).

        Raises:
            TopicError: the topic is missing.
            AccessError: this user may not read it.
            KafkaUnavailableError: Kafka cannot be reached.
        """
        client = admin_client(kafka)
        verify_rights(client, {topic: (AclOperation.READ,)}, groups=(OPERATOR_GROUP,))
        with ranges_consumer(kafka, OPERATOR_GROUP, isolation_level) as consumer:
            yield cls(consumer, client, topic)

    @property
    def ends(self) -> dict[int, int]:
        """Return the offset after the last record of each partition."""
        return {partition: kept.end for partition, kept in self.retained.items()}

    def known_since_ms(self) -> int:
        """Return the time since which the topic holds every record; `NEVER` if it has none.

        Where nothing was deleted, the topic may be one that was made anew: it tells nothing of the time before its
        first record.
        """
        first_ms = {partition: self._first_ms(partition, kept) for partition, kept in self.retained.items()}
        cut_ms = [first_ms[partition] for partition, kept in self.retained.items() if kept.first > 0]
        return max([*cut_ms, min(first_ms.values(), default=NEVER)])

    def _first_ms(self, partition: int, kept: OffsetRange) -> int:
        """Return the time of the first record that a partition retains."""
        for record in read_ranges(self._consumer, self._topic, {partition: kept}):
            return int(record.timestamp()[1])
        return NEVER

    def beyond(self, read_to: Mapping[int, int]) -> Iterator[Message]:
        """Yield each record that is at or after an offset of its partition, up to the end at `open`.

        Args:
            read_to: by partition; of one that is missing, all that is retained.

        Raises:
            KafkaUnavailableError: Kafka does not answer for a minute.
        """
        ranges = {partition: OffsetRange(max(kept.first, read_to.get(partition, 0)), kept.end) for partition, kept in self.retained.items()}
        yield from read_ranges(self._consumer, self._topic, ranges)

    def since(self, at_ms: int, progress: Callable[[int, int], None]) -> Iterator[Message]:
        """Yield each record that may have a timestamp of `at_ms` or later, up to the end at `open`.

        Args:
            at_ms: by record timestamp.
            progress: called now and then with the number of records read, and the number of offsets in all.

        Raises:
            KafkaUnavailableError: Kafka does not answer for a minute.
        """
        starts = offsets_since(self._consumer, self._topic, dict.fromkeys(self.retained, at_ms))
        ranges = {number: OffsetRange(start, self.retained[number].end) for number, start in starts.items() if start != OFFSET_END}
        total = sum(max(0, end - start) for start, end in ranges.values())
        for done, record in enumerate(read_ranges(self._consumer, self._topic, ranges), start=1):
            yield record
            if done % _PROGRESS_RECORDS == 0:
                progress(done, total)
