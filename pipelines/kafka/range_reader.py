"""The one reader of Kafka's records by offset: ranges of a partition, or single records by their pointers.

The executors use it to read halves back (decision 3), the commands to look at a topic's end or to scan it. It reads
through dense pointers and drops the records between them, and seeks sparse ones.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import Any, NamedTuple, Self

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, OFFSET_INVALID, Consumer, KafkaError, KafkaException, Message, TopicPartition

from halfway.clients.kafka.config import FOLLOW_LEADERS, READ_ANY_SIZE
from halfway.clients.kafka.diagnosis import missing_topics
from halfway.pipelines.kafka.admin import FAILOVER_LIMIT_S, REQUEST_LIMIT_S, Admin, librdkafka_log, partition_counts
from halfway.pipelines.kafka.rights import OPERATOR_GROUP
from halfway.schemas.errors import KafkaUnavailableError, TopicError
from halfway.schemas.settings import KafkaSettings

DENSE_GAP = 1_000
"""Up to this many records, reading on costs little more than a seek: at most 7 ms (140,000 records of 1 KiB a second)
against 4 ms."""
READ_COMMITTED = "read_committed"
"""A partition then ends, for a reader, before the first open transaction (R18). Where records of aborted transactions
and the marks of their ends are, offsets have gaps."""
READ_UNCOMMITTED = "read_uncommitted"
READ_LIMIT_S = 60.0
_END_POLL_S = 0.1
_LOOK_UP_LIMIT_S = 5.0
_POLL_S = 0.05
_AT_ONCE = 4_096
_MOVED = (
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._DESTROY_BROKER,
    KafkaError._RESOLVE,
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.UNKNOWN_LEADER_EPOCH,
)
"""The leader of a partition died, froze or changed. librdkafka asks the new one as soon as it knows it. Where it had no
connection in time, as on a busy machine, it says that all brokers are down (librdkafka #3528). A container that is
stopped may take its name in the DNS along."""
_NO_TOPIC = (KafkaError._UNKNOWN_PARTITION, KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)


class OffsetRange(NamedTuple):
    """Offsets of one partition: the first one, and the one after the last."""

    first: int
    end: int


def reading_options(group: str) -> dict[str, Any]:
    """Return librdkafka's options for a consumer that reads assigned offsets and reports where a partition ends.

    Args:
        group: librdkafka requires a group id. The group is never joined, and no offset is committed.
    """
    return {
        "group.id": group,
        "isolation.level": READ_COMMITTED,
        "enable.auto.commit": "false",
        "enable.auto.offset.store": "false",
        "enable.partition.eof": "true",
        "auto.offset.reset": "error",
        **FOLLOW_LEADERS,
        "fetch.wait.max.ms": "10",
        "fetch.message.max.bytes": "4194304",
        **READ_ANY_SIZE,
        # librdkafka waits 1000 ms by default before it fetches again after its queue was full; the queue is empty long
        # before that.
        "fetch.queue.backoff.ms": "10",
    }


@contextmanager
def ranges_consumer(kafka: KafkaSettings, group: str = OPERATOR_GROUP, isolation_level: str = READ_COMMITTED) -> Iterator[Consumer]:
    """Open a consumer that reads offset ranges, and close it when the block ends.

    Args:
        kafka: where Kafka is.
        group: see `reading_options`.
        isolation_level: Kafka's.

    Raises:
        KafkaUnavailableError: a request fails inside the block.
    """
    options = {**kafka.as_librdkafka_dict(), **reading_options(group), "isolation.level": isolation_level}
    consumer = Consumer(options, logger=librdkafka_log)
    try:
        yield consumer
    except KafkaException as error:
        raise KafkaUnavailableError(f"cannot read from Kafka: {error.args[0].str()}") from None
    finally:
        consumer.close()


def retained(consumer: Consumer, client: Admin, topic: str) -> dict[int, OffsetRange]:
    """Return the offsets that each partition retains; for a consumer with READ_COMMITTED, up to an open transaction.

    Raises:
        TopicError: the topic is missing.
        AccessError: this user may not describe it.
        KafkaUnavailableError: Kafka cannot be reached, refuses the request, or does not answer in time.
    """
    count = partition_counts(client, [topic]).get(topic)
    if count is None:
        raise TopicError(missing_topics([topic]))
    return _retained_of(consumer, topic, range(count), FAILOVER_LIMIT_S)


def _retained_of(consumer: Consumer, topic: str, partitions: Iterable[int], limit_s: float) -> dict[int, OffsetRange]:
    """Return the offsets that partitions retain.

    `get_watermark_offsets` asks for both at once. Where a new leader refuses the first request and answers the second,
    librdkafka may report an emptied partition, as if retention had deleted everything.

    Raises:
        KafkaUnavailableError: Kafka refuses a request, or does not answer within `limit_s`, or some seconds more if it
            has told the beginning late.
    """
    deadline_s = monotonic() + limit_s
    firsts = offsets_since(consumer, topic, dict.fromkeys(partitions, OFFSET_BEGINNING), limit_s)
    left_s = max(min(limit_s, _LOOK_UP_LIMIT_S), deadline_s - monotonic())
    ends = offsets_since(consumer, topic, dict.fromkeys(firsts, OFFSET_END), left_s)
    return {partition: OffsetRange(first, ends[partition]) for partition, first in firsts.items()}


def offsets_since(consumer: Consumer, topic: str, times_ms: Mapping[int, int], limit_s: float = READ_LIMIT_S) -> dict[int, int]:
    """Return the offset of each partition's first record of a time or later; OFFSET_END where there is none.

    Waits while a partition has no leader, or another one than this client knows, while a broker that has just started
    knows no topic, and after any other error of a single partition.

    Args:
        consumer: a consumer; with READ_COMMITTED a partition ends at an open transaction.
        topic: a topic that exists.
        times_ms: by partition. OFFSET_BEGINNING asks for its first offset, OFFSET_END for the one after its last.
        limit_s: how long to wait.

    Raises:
        KafkaUnavailableError: Kafka refuses the request, or a partition has no answer within `limit_s`.
    """
    places = [TopicPartition(topic, partition, at_ms) for partition, at_ms in times_ms.items()]
    deadline_s = monotonic() + limit_s
    while places:
        try:
            found = consumer.offsets_for_times(places, timeout=min(limit_s, REQUEST_LIMIT_S))
            failed = [f"partition {place.partition}: {place.error.str()}" for place in found if place.error is not None]
            if not failed:
                return {place.partition: place.offset for place in found}
            is_waited_for, cause = True, failed[0]
        except KafkaException as error:
            is_waited_for, cause = error.args[0].code() in (*_MOVED, *_NO_TOPIC), error.args[0].str()
        if not is_waited_for or monotonic() >= deadline_s:
            raise KafkaUnavailableError(f"cannot read {topic}: {cause}")
        sleep(_END_POLL_S)
        with suppress(KafkaException):  # The client would trust its metadata for 5 minutes, and for 15 if the topic was gone.
            consumer.list_topics(topic, timeout=_LOOK_UP_LIMIT_S)
    return {}


def read_ranges(consumer: Consumer, topic: str, ranges: Mapping[int, OffsetRange], limit_s: float = READ_LIMIT_S) -> Iterator[Message]:
    """Yield the records of each partition's range, one partition after the other.

    Raises:
        KafkaUnavailableError: Kafka does not answer within `limit_s`.
    """
    for partition, (first, end) in ranges.items():
        if first < end:
            with PartitionReader(consumer, topic, partition, limit_s) as reader:
                yield from reader.range(first, end)


class PartitionReader:
    """Reads one partition forward. Offsets only grow from call to call.

    Args:
        consumer: made with `reading_options`; it is assigned to this partition until the block ends.
        topic: the topic.
        partition: its partition.
        limit_s: how long Kafka may take to answer; a wait for an end that is too low may take twice as long.
    """

    def __init__(self, consumer: Consumer, topic: str, partition: int, limit_s: float = READ_LIMIT_S) -> None:
        """Store the partition. Does not connect."""
        self._consumer = consumer
        self._place, self._limit_s = (topic, partition), limit_s
        self._low = self._high = 0
        self._position = OFFSET_INVALID
        self._fetched: Iterator[Message] = iter(())
        self._ahead: Message | None = None

    def __enter__(self) -> Self:
        """Ask Kafka where the partition begins and ends."""
        self._position = OFFSET_INVALID
        self._ask()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the partition."""
        self._consumer.unassign()

    def range(self, first: int, end: int) -> Iterator[Message]:
        """Yield the records from offset `first` to before `end`, as far as the partition still holds them.

        Raises:
            KafkaUnavailableError: Kafka does not answer within the limit, or the partition ends before `first`.
        """
        if not self._is_kept(first):
            first = self._low
        self._seek(first)
        while self._position < end:
            record = self._next(self._position, end - 1)
            if record is None:
                if self._low <= self._position and end <= self._high:
                    return
                self.wait_for(end - 1)
                self._seek(max(self._position, self._low))
                continue
            self._position = (record.offset() or 0) + 1
            if self._position <= end:
                yield record

    def records(self, offsets: Sequence[int]) -> Iterator[Message | None]:
        """Return the record at each of these offsets; None where the partition does not hold it.

        Raises:
            KafkaUnavailableError: Kafka does not answer within the limit, or the partition ends too early.
        """
        lasts = list(offsets)
        for place in range(len(lasts) - 2, -1, -1):
            if offsets[place + 1] - offsets[place] <= DENSE_GAP:
                lasts[place] = lasts[place + 1]
        return map(self._record_at, offsets, lasts)

    def _record_at(self, offset: int, last: int) -> Message | None:
        """Return the record at `offset`. Fetches on up to `last`, the last offset of the same dense stretch."""
        if not self._is_kept(offset):
            return None
        if self._position < 0 or offset - self._position > DENSE_GAP:
            self._seek(offset)
        while True:
            # A message without a value is false, as an empty string is.
            record = self._ahead if self._ahead is not None else self._next(offset, last)
            found = OFFSET_INVALID if record is None else record.offset() or 0
            if record is None or found > offset:
                self._ahead = record
                return None
            self._ahead = None
            self._position = found + 1
            if found == offset:
                return record

    def _ask(self) -> None:
        """Ask Kafka where the partition begins and ends."""
        topic, partition = self._place
        self._low, self._high = _retained_of(self._consumer, topic, [partition], self._limit_s)[partition]

    def wait_for(self, offset: int) -> None:
        """Wait until the partition's end is past an offset that was read before.

        An end before it proves nothing. After a crash, or as a new leader, a broker reports an end that is too low
        until its replicas agree (KAFKA-16452).

        Raises:
            KafkaUnavailableError: the end has not come back within the limit, or Kafka does not answer.
        """
        deadline_s = monotonic() + self._limit_s
        while offset >= self._high:
            if monotonic() >= deadline_s:
                raise KafkaUnavailableError(
                    f"{self._place[0]} ends at offset {self._high} of partition {self._place[1]}, and {offset} was read from there before: "
                    "is a broker still down, or has one lost records?"
                )
            sleep(_END_POLL_S)
            self._ask()

    def _is_kept(self, offset: int) -> bool:
        """Return True if the partition holds an offset that was read before; False if its beginning is past it."""
        self.wait_for(offset)
        return offset >= self._low

    def _seek(self, offset: int) -> None:
        self._consumer.assign([TopicPartition(*self._place, offset)])
        self._position, self._fetched, self._ahead = offset, iter(()), None

    def _next(self, offset: int, last: int) -> Message | None:
        """Return the next record; None at the partition's end, or where retention has just deleted the offset."""
        deadline_s = monotonic() + self._limit_s
        while monotonic() < deadline_s:
            record = next(self._fetched, None)
            if record is None:
                self._fetched = iter(self._consumer.consume(max(1, min(last + 1 - self._position, _AT_ONCE)), timeout=_POLL_S))
                continue
            error = record.error()
            if error is None:
                return record
            if error.code() == KafkaError._PARTITION_EOF:
                if (record.offset() or 0) < self._high:
                    continue
                return None
            if error.code() in _MOVED:
                continue
            if error.code() not in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                raise KafkaUnavailableError(f"cannot read {self._place[0]}: {error.str()}")
            self._ask()
            if not self._is_kept(offset):
                return None
            self._seek(offset)
        raise KafkaUnavailableError(f"no answer from Kafka for {self._place[0]} in {self._limit_s:.0f} s: are all its brokers up?")
