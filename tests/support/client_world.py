"""Helpers of the client's tests: listeners, topics on a broker that may be stopped, and the content of topics."""

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from halfway import (
    CheckRequest,
    HalfMessage,
    LocalTransactionState,
    ProducerClosedError,
    SendError,
    TransactionProducer,
)
from halfway.pipelines.local.broker import LocalBroker
from halfway.schemas.headers import check_group, check_id
from halfway.schemas.settings import KafkaSettings
from tests.support.kafka_topics import unique_kafka_settings
from tests.support.partition_records import end_of, headers_of
from tests.support.waiting import LIMIT_S, until

COMMIT, ROLLBACK, UNKNOWN = LocalTransactionState.COMMIT, LocalTransactionState.ROLLBACK, LocalTransactionState.UNKNOWN
GROUP = "shop"


class Listener:
    """A listener that answers with two functions, and records the messages that it was called with."""

    def __init__(
        self, execute: Callable[[HalfMessage, Any], Any] = lambda *_: COMMIT, check: Callable[[CheckRequest], Any] = lambda _: COMMIT
    ) -> None:
        self._execute, self._check = execute, check
        self.executed: list[HalfMessage] = []
        self.checked: list[CheckRequest] = []

    def execute_local_transaction(self, message: HalfMessage, arg: object) -> LocalTransactionState | None:
        self.executed.append(message)
        answer: LocalTransactionState | None = self._execute(message, arg)
        return answer

    def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState | None:
        self.checked.append(message)
        answer: LocalTransactionState | None = self._check(message)
        return answer


def gets_through(producer: TransactionProducer, transaction_id: str | None = None) -> bool:
    """Send a message; return False if it is refused."""
    try:
        producer.send_in_transaction("orders", b"", transaction_id=transaction_id)
    except SendError:
        return False
    return True


class Gate:
    """A point at which listeners wait until the test opens it."""

    def __init__(self) -> None:
        self.entered: queue.Queue[str] = queue.Queue()
        self.opened = threading.Event()

    def pass_through(self, name: str) -> None:
        """Report `name` to the test, and wait until the gate is opened."""
        self.entered.put(name)
        assert self.opened.wait(LIMIT_S)

    def then(self, state: LocalTransactionState | None) -> Callable[..., LocalTransactionState | None]:
        """Return a listener's function, of either kind, that passes through with the id and answers `state`."""

        def answer(message: HalfMessage | CheckRequest, _: object = None) -> LocalTransactionState | None:
            self.pass_through(message.transaction_id)
            return state

        return answer


def own_topics(broker: LocalBroker, *leave_out: str) -> KafkaSettings:
    """Create topics on `broker` except those in `leave_out`, and return the settings that name all of them."""
    settings = unique_kafka_settings(broker)
    make_topics(settings, {settings.half_topic, settings.op_topic, settings.check_topic} - set(leave_out))
    return settings


def make_topics(settings: KafkaSettings, names: set[str], **config: str) -> None:
    """Create topics with two partitions, and wait until every partition has a leader that answers."""

    def are_made() -> bool:
        # A new client each time: one that finds a broker without a controller, as after a freeze, may never look again
        # (librdkafka #5301).
        client = AdminClient({"bootstrap.servers": settings.servers()})
        made = client.create_topics(
            [NewTopic(name, num_partitions=2, config=config) for name in names], operation_timeout=5, request_timeout=10
        )
        return all(_is_made(topic) for topic in made.values())

    until(are_made, "the topics are made")
    with Consumer({"bootstrap.servers": settings.servers(), "group.id": "reader"}) as consumer:

        def is_there(place: TopicPartition) -> bool:
            try:
                return consumer.get_watermark_offsets(place, timeout=LIMIT_S) is not None
            except KafkaException:
                return False

        for name in names:
            until(lambda name=name: all(is_there(TopicPartition(name, number)) for number in range(2)), f"{name} is there")


def _is_made(topic: Future[None]) -> bool:
    try:
        topic.result(LIMIT_S)
    except KafkaException as error:
        return bool(error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS)
    return True


def read(settings: KafkaSettings, topic: str, at_least: int = 0) -> list[Message]:
    """Return the records of a topic, once it has `at_least` as many."""
    config = {"bootstrap.servers": settings.servers(), "group.id": "reader", "enable.auto.commit": False, "fetch.wait.max.ms": 50}
    with Consumer(config) as consumer:
        places = [TopicPartition(topic, number, 0) for number in consumer.list_topics(topic, timeout=LIMIT_S).topics[topic].partitions]
        wanted = max(at_least, sum(end_of(consumer, topic, place.partition) for place in places))
        consumer.assign(places)
        found: list[Message] = []
        deadline_s = time.monotonic() + LIMIT_S
        while len(found) < wanted:
            assert time.monotonic() < deadline_s, f"{topic} has {len(found)} records after {LIMIT_S} s, {wanted} are expected"
            message = consumer.poll(0.1)
            if message is not None and message.error() is None:
                found.append(message)
        return sorted(found, key=lambda message: (message.partition() or 0, message.offset() or 0))


def ops(settings: KafkaSettings, at_least: int = 0) -> list[tuple[str, dict[str, str]]]:
    """Return the records of the op topic as (transaction id, headers)."""
    return [
        ((message.key() or b"").decode(), {name: value.decode() for name, value in headers_of(message).items()})
        for message in read(settings, settings.op_topic, at_least)
    ]


def check_of(name: str, times: int = 1, group: str = GROUP, incarnation: int = 0) -> CheckRequest:
    """Return the check request of a transaction."""
    return CheckRequest(
        transaction_id=name,
        topic="orders",
        body=b"\x00body of " + name.encode(),
        producer_group=group,
        properties={"colour": "red"},
        incarnation=incarnation,
        check_times=times,
        check_id=check_id(name, 0, 7, times),
    )


def send_checks(settings: KafkaSettings, *requests: CheckRequest, partition: int = 0) -> None:
    """Send check requests as the job does, and wait until they are stored."""
    producer = Producer({"bootstrap.servers": settings.servers()})
    for request in requests:
        record = request.to_record()
        producer.produce(settings.check_topic, record.value, record.key, partition=partition, headers=list(record.headers))
    assert producer.flush(LIMIT_S) == 0


def committed(settings: KafkaSettings, group: str = GROUP) -> dict[int, int]:
    """Return the group's committed offset of each partition of the check topic in which it has passed a record.

    A consumer that does not join asks for them: AdminClient.list_consumer_group_offsets crashes the process while the
    coordinator is being elected (librdkafka issue 5040).
    """
    found: dict[int, int] = {}
    with Consumer({"bootstrap.servers": settings.servers(), "group.id": check_group(group), "enable.auto.commit": False}) as consumer:
        numbers = consumer.list_topics(settings.check_topic, timeout=LIMIT_S).topics[settings.check_topic].partitions

        def answered() -> bool:
            try:
                places = consumer.committed([TopicPartition(settings.check_topic, number) for number in numbers], timeout=LIMIT_S)
            except KafkaException:  # the coordinator of a broker that has just started is still loading
                return False
            found.update({place.partition: place.offset for place in places if place.offset > 0})
            return True

        until(answered, "the coordinator answers")
    return found


def members(settings: KafkaSettings) -> list[int]:
    """Return how many partitions of the check topic each member of the group has, in ascending order."""
    client = AdminClient({"bootstrap.servers": settings.servers()})
    try:
        group = client.describe_consumer_groups([check_group(GROUP)])[check_group(GROUP)].result(LIMIT_S)
    except KafkaException as error:
        if error.args[0].code() == KafkaError.NOT_COORDINATOR:  # the first group of a broker
            return []
        raise
    return sorted(len(member.assignment.topic_partitions) for member in group.members)


def murmur2(data: bytes) -> int:
    """Return the hash of Java's default partitioner, computed independently of librdkafka."""
    mask, factor = 0xFFFFFFFF, 0x5BD1E995
    value = 0x9747B28C ^ len(data)
    for start in range(0, len(data) - 3, 4):
        word = int.from_bytes(data[start : start + 4], "little") * factor & mask
        value = value * factor & mask ^ (word ^ word >> 24) * factor & mask
    tail = data[len(data) & ~3 :]
    if tail:
        value = (value ^ int.from_bytes(tail, "little")) * factor & mask
    value = (value ^ value >> 13) * factor & mask
    return (value ^ value >> 15) & 0x7FFFFFFF


def fail(*_: object) -> LocalTransactionState:
    """Raise an error whose text is long and has a control character."""
    raise ValueError("no\x07 stock\n" + "ä" * 2000)


def is_closed(producer: TransactionProducer) -> bool:
    """Return True if the producer refuses to start because it is closed."""
    try:
        producer.start()
    except ProducerClosedError:
        return True
    return False


@contextmanager
def frozen(broker: LocalBroker) -> Iterator[None]:
    """Stop the broker's process, with its connections open.

    Of all failures, this is the one that a client can least tell from a slow network.
    """
    pid = broker.pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        kafka = AdminClient(KafkaSettings(bootstrap_servers=str(broker.status()["bootstrap_servers"])).as_librdkafka_dict())

        def is_silent() -> bool:
            try:
                kafka.list_topics(timeout=0.5)
            except KafkaException:
                return True
            return False

        until(is_silent, "the broker answers nothing")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
