"""One pass over a topic, from a time to where it ends now: how a command learns what was sent already."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AclOperation

from halfway.pipelines.kafka.admin import OPERATOR_GROUP, REQUEST_LIMIT_S, admin, check_rights, librdkafka_log, partition_counts
from halfway.schemas.errors import KafkaUnavailableError, TopicError
from halfway.schemas.settings import Settings

_BATCH_RECORDS = 4_096
_POLL_S = 0.5
_SILENCE_LIMIT_S = 60.0
NEVER = 2**63 - 1
"""Later than any time: the topic tells nothing."""

Range = tuple[int, int]
"""The first offset that is retained, and the one after the last."""


@contextmanager
def _reader(settings: Settings) -> Iterator[Consumer]:
    options = {
        "group.id": OPERATOR_GROUP,  # required, and never joined: partitions are assigned, offsets not committed
        "enable.auto.commit": "false",
        "enable.partition.eof": "true",
        "auto.offset.reset": "earliest",
        # As the job reads.
        "isolation.level": "read_uncommitted",
        "fetch.message.max.bytes": "4194304",
        # 1000 by default: a full queue would be empty again before that is over.
        "fetch.queue.backoff.ms": "10",
    }
    consumer = Consumer({**settings.kafka.as_librdkafka_dict(), **options}, logger=librdkafka_log)
    try:
        yield consumer
    except KafkaException as error:
        raise KafkaUnavailableError(f"cannot read from Kafka: {error.args[0].str()}") from None
    finally:
        consumer.close()


def ranges(settings: Settings, topics: list[str]) -> dict[str, dict[int, Range]]:
    """Return what each partition of these topics retains.

    Raises:
        TopicError: a topic is missing.
        KafkaUnavailableError: Kafka cannot be reached.
    """
    with _reader(settings) as consumer:
        return {topic: _ranges(settings, consumer, topic) for topic in topics}


def _ranges(settings: Settings, consumer: Consumer, topic: str) -> dict[int, Range]:
    count = partition_counts(admin(settings), [topic]).get(topic)
    if count is None:
        raise TopicError(f"no topic {topic}: `halfway topics create` makes it")
    return {number: consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=REQUEST_LIMIT_S) for number in range(count)}


class TopicScan:
    """What a topic holds at the time of the call of `open`."""

    def __init__(self, consumer: Consumer, topic: str, retained: dict[int, Range]) -> None:
        """Use `open`."""
        self._consumer = consumer
        self._topic = topic
        self.retained = retained

    @classmethod
    @contextmanager
    def open(cls, settings: Settings, topic: str) -> Iterator[Self]:
        """Take note of where the topic begins and ends now.

        Raises:
            TopicError: it is missing.
            AccessError: this user may not read it.
            KafkaUnavailableError: Kafka cannot be reached.
        """
        check_rights(admin(settings), {topic: (AclOperation.READ,)}, groups=(OPERATOR_GROUP,))
        with _reader(settings) as consumer:
            yield cls(consumer, topic, _ranges(settings, consumer, topic))

    def known_since_ms(self) -> int:
        """Return the time from which on the topic holds every record: 0 if nothing was ever deleted."""
        cut = {number: low for number, (low, high) in self.retained.items() if 0 < low < high}
        if any(0 < low == high for low, high in self.retained.values()):
            return NEVER
        first_ms: dict[int, int] = {}
        for record in self._read(cut, {number: self.retained[number][1] for number in cut}):
            first_ms.setdefault(record.partition() or 0, record.timestamp()[1])
            if len(first_ms) == len(cut):
                return max(first_ms.values())
        return NEVER if cut else 0

    def since(self, at_ms: int, progress: Callable[[int, int], None]) -> Iterator[Message]:
        """Yield each record that may be of `at_ms` or later, up to where the topic ended at `open`.

        Args:
            at_ms: by record timestamp.
            progress: is told now and then how many offsets are done, of how many.

        Raises:
            KafkaUnavailableError: Kafka does not answer for a minute.
        """
        asked = [TopicPartition(self._topic, number, at_ms) for number in self.retained]
        found = self._consumer.offsets_for_times(asked, timeout=REQUEST_LIMIT_S)
        ends = {number: high for number, (_, high) in self.retained.items()}
        starts = {place.partition: place.offset for place in found if place.offset not in (OFFSET_END, -1)}
        starts = {number: start for number, start in starts.items() if start < ends[number]}
        total = sum(ends[number] - start for number, start in starts.items())
        for done, record in enumerate(self._read(starts, ends), start=1):
            yield record
            if done % _BATCH_RECORDS == 0:
                progress(done, total)

    def _read(self, starts: dict[int, int], ends: dict[int, int]) -> Iterator[Message]:
        """Yield the records of each partition between two offsets."""
        if not starts:
            return
        left = set(starts)
        self._consumer.assign([TopicPartition(self._topic, number, start) for number, start in starts.items()])
        deadline = time.monotonic() + _SILENCE_LIMIT_S
        while left:
            for record in self._consumer.consume(_BATCH_RECORDS, _POLL_S):
                deadline = time.monotonic() + _SILENCE_LIMIT_S
                number, offset, error = record.partition() or 0, record.offset() or 0, record.error()
                if error is None and number in left and offset < ends[number]:
                    yield record
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    if error.fatal() or not error.retriable():
                        raise KafkaUnavailableError(f"cannot read {self._topic}: {error.str()}")
                    continue
                # At the partition's end the error tells the offset after the last record.
                if number in left and offset + (error is None) >= ends[number]:
                    left.discard(number)
                    self._consumer.incremental_unassign([TopicPartition(self._topic, number)])
            if time.monotonic() > deadline:
                raise KafkaUnavailableError(f"Kafka has sent nothing of {self._topic} for {_SILENCE_LIMIT_S:.0f} s")
        self._consumer.unassign()
