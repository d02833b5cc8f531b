"""The client against a real broker (design §7): what it writes byte for byte, when, and how it answers checks."""

import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from clients import (
    CheckRequest,
    HalfMessage,
    LocalTransactionState,
    ProducerClosedError,
    SendError,
    SendResult,
    TransactionProducer,
)
from pipelines.broker import LocalBroker
from schemas.headers import check_group, check_id
from schemas.settings import KafkaSettings
from tests.conftest import MakeTopics, unique_topics

COMMIT, ROLLBACK, UNKNOWN = LocalTransactionState.COMMIT, LocalTransactionState.ROLLBACK, LocalTransactionState.UNKNOWN
LIMIT_S = 30.0
GROUP = "shop"
ROOT = Path(__file__).parents[2]


class Listener:
    """Answers by two functions, and keeps what it was asked."""

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


class Gate:
    """A place where listeners wait until the test lets them on."""

    def __init__(self) -> None:
        self.entered: queue.Queue[str] = queue.Queue()
        self.opened = threading.Event()

    def pass_through(self, name: str) -> None:
        self.entered.put(name)
        assert self.opened.wait(LIMIT_S)


@pytest.fixture
def kafka(topics: MakeTopics) -> KafkaSettings:
    return topics(partitions=2).kafka


@pytest.fixture(scope="module")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    """A broker that these tests may stop and freeze."""
    local = LocalBroker(tmp_path_factory.mktemp("own"))
    local.start()
    yield local
    local.stop()


def own_topics(broker: LocalBroker, *leave_out: str) -> KafkaSettings:
    """Make topics on `broker`, and return the settings that name them."""
    names = unique_topics(broker)
    settings = KafkaSettings.model_validate({name.removeprefix("kafka."): value for name, value in names.items()})
    make_topics(settings, {settings.half_topic, settings.op_topic, settings.check_topic} - set(leave_out))
    return settings


def make_topics(settings: KafkaSettings, names: set[str], **config: str) -> None:
    client = AdminClient({"bootstrap.servers": settings.servers()})
    for made in client.create_topics([NewTopic(name, num_partitions=2, config=config) for name in names]).values():
        made.result(LIMIT_S)


def read(settings: KafkaSettings, topic: str, at_least: int = 0) -> list[Message]:
    """Return the records a topic has, waiting until there are `at_least` so many."""
    config = {"bootstrap.servers": settings.servers(), "group.id": "reader", "enable.auto.commit": False, "fetch.wait.max.ms": 50}
    with Consumer(config) as consumer:
        places = [TopicPartition(topic, number, 0) for number in consumer.list_topics(topic, timeout=LIMIT_S).topics[topic].partitions]
        wanted = max(at_least, sum(consumer.get_watermark_offsets(place, timeout=LIMIT_S)[1] for place in places))
        consumer.assign(places)
        found: list[Message] = []
        deadline_s = time.monotonic() + LIMIT_S
        while len(found) < wanted:
            assert time.monotonic() < deadline_s, f"{topic} has {len(found)} records after {LIMIT_S} s, {wanted} are awaited"
            message = consumer.poll(0.1)
            if message is not None and message.error() is None:
                found.append(message)
        return sorted(found, key=lambda message: (message.partition() or 0, message.offset() or 0))


def ops(settings: KafkaSettings, at_least: int = 0) -> list[tuple[str, dict[str, str]]]:
    """Return the ops as (transaction id, headers)."""
    return [
        ((message.key() or b"").decode(), {name: value.decode() for name, value in headers_of(message)})
        for message in read(settings, settings.op_topic, at_least)
    ]


def headers_of(message: Message) -> list[tuple[str, bytes]]:
    return [(name, value) for name, value in cast(list[tuple[str, object]], message.headers() or []) if isinstance(value, bytes)]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Look until `condition` holds."""
    deadline_s = time.monotonic() + LIMIT_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s, f"not so after {LIMIT_S} s: {what}"
        pause.wait(0.05)


def check_of(name: str, times: int = 1, group: str = GROUP, incarnation: int = 0) -> CheckRequest:
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
    """Write check requests as the job does, and wait until they are stored."""
    producer = Producer({"bootstrap.servers": settings.servers()})
    for request in requests:
        record = request.to_record()
        producer.produce(settings.check_topic, record.value, record.key, partition=partition, headers=list(record.headers))
    assert producer.flush(LIMIT_S) == 0


def committed(settings: KafkaSettings, group: str = GROUP) -> dict[int, int]:
    """Return the group's committed offset of each partition of this check topic that has one.

    Asked by a consumer that does not join: AdminClient.list_consumer_group_offsets crashes the process where the coordinator is
    just being elected (librdkafka issue 5040).
    """
    found: dict[int, int] = {}
    with Consumer({"bootstrap.servers": settings.servers(), "group.id": check_group(group), "enable.auto.commit": False}) as consumer:
        numbers = consumer.list_topics(settings.check_topic, timeout=LIMIT_S).topics[settings.check_topic].partitions

        def answered() -> bool:
            try:
                places = consumer.committed([TopicPartition(settings.check_topic, number) for number in numbers], timeout=LIMIT_S)
            except KafkaException:  # the coordinator of a broker that just started is still loading
                return False
            found.update({place.partition: place.offset for place in places if place.offset >= 0})
            return True

        wait_until(answered, "the coordinator answers")
    return found


def members(settings: KafkaSettings) -> list[int]:
    """Return how many partitions of the check topic each member of the group has."""
    client = AdminClient({"bootstrap.servers": settings.servers()})
    group = client.describe_consumer_groups([check_group(GROUP)])[check_group(GROUP)].result(LIMIT_S)
    return sorted(len(member.assignment.topic_partitions) for member in group.members)


def murmur2(data: bytes) -> int:
    """Java's default partitioner, written down independently of librdkafka's."""
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


# Sending


def test_half_and_op_byte_for_byte(kafka: KafkaSettings) -> None:
    body = bytes(range(256)) * 5
    before_ms = time.time_ns() // 1_000_000
    with TransactionProducer(kafka, "größe", Listener()) as producer:
        result = producer.send_in_transaction(
            "orders",
            body,
            transaction_id="tx-ä",
            tags="a || b",
            keys="k1 k2",
            properties={"colour": "röt", "empty": ""},
            queue_id=3,
            immunity_s=9,
            incarnation=2,
        )
    [half] = read(kafka, kafka.half_topic)
    [op] = read(kafka, kafka.op_topic)
    born = dict(headers_of(half))["BORN_TIMESTAMP"]
    assert before_ms <= int(born) <= time.time_ns() // 1_000_000
    assert (half.key(), half.value()) == ("tx-ä".encode(), body)
    assert half.headers() == [
        ("REAL_TOPIC", b"orders"),
        ("PGROUP", "größe".encode()),
        ("REAL_QID", b"3"),
        ("TAGS", b"a || b"),
        ("KEYS", b"k1 k2"),
        ("CHECK_IMMUNITY_TIME_IN_SECONDS", b"9"),
        ("BORN_TIMESTAMP", born),
        ("INCARNATION", b"2"),
        ("colour", "röt".encode()),
        ("empty", b""),
    ]
    assert (op.key(), op.value()) == ("tx-ä".encode(), None)
    assert op.headers() == [("ACTION", b"COMMIT"), ("PGROUP", "größe".encode()), ("INCARNATION", b"2")]
    assert result == SendResult("tx-ä", half.partition() or 0, half.offset() or 0, COMMIT)


@pytest.mark.parametrize("state", list(LocalTransactionState))
def test_each_state_is_sent_as_said(kafka: KafkaSettings, state: LocalTransactionState) -> None:
    said: list[object] = []

    def execute(message: HalfMessage, arg: object) -> LocalTransactionState:
        said.append((message.transaction_id, message.body, arg))
        return state

    with TransactionProducer(kafka, GROUP, Listener(execute)) as producer:
        result = producer.send_in_transaction("orders", b"", arg=17)
    [half] = read(kafka, kafka.half_topic)
    assert half.value() == b""
    assert said == [(result.transaction_id, b"", 17)]
    assert uuid.UUID(result.transaction_id).hex == result.transaction_id
    assert result.state is state
    assert ops(kafka) == [(result.transaction_id, {"ACTION": str(state), "PGROUP": GROUP, "INCARNATION": "0"})]


def test_all_of_an_id_lies_in_javas_partition_of_it(topics: MakeTopics) -> None:
    kafka = topics(partitions=5).kafka
    names = [f"tx-{number}" + "é" * (number % 4) for number in range(40)]
    with TransactionProducer(kafka, GROUP, Listener()) as producer:
        for incarnation in range(2):
            for name in names:
                result = producer.send_in_transaction("orders", b"", transaction_id=name, incarnation=incarnation)
                assert result.half_partition == murmur2(name.encode()) % 5
    for topic in (kafka.half_topic, kafka.op_topic):
        records = read(kafka, topic)
        assert len(records) == 2 * len(names)
        assert all(record.partition() == murmur2(record.key() or b"") % 5 for record in records)


def test_half_is_stored_and_no_op_sent_when_the_listener_runs(kafka: KafkaSettings) -> None:
    seen: list[tuple[list[bytes | None], int]] = []

    def execute(*_: object) -> LocalTransactionState:
        seen.append(([half.key() for half in read(kafka, kafka.half_topic)], len(read(kafka, kafka.op_topic))))
        return COMMIT

    with TransactionProducer(kafka, GROUP, Listener(execute)) as producer:
        producer.send_in_transaction("orders", b"", transaction_id="t1")
    assert seen == [([b"t1"], 0)]


def _fail(*_: object) -> LocalTransactionState:
    raise ValueError("no\x07 stock\n" + "ä" * 2000)


@pytest.mark.parametrize(
    ("execute", "remark"),
    [
        (_fail, "ValueError: no stock " + "ä" * 501),
        (lambda *_: None, "the listener returned None, not a LocalTransactionState"),
        (lambda *_: "COMMIT", "the listener returned a str, not a LocalTransactionState"),
    ],
)
def test_no_answer_is_unknown_with_a_remark(
    kafka: KafkaSettings, execute: Callable[..., Any], remark: str, caplog: pytest.LogCaptureFixture
) -> None:
    with TransactionProducer(kafka, GROUP, Listener(execute)) as producer:
        result = producer.send_in_transaction("orders", b"s3cret", transaction_id="t1", properties={"token": "s3cret"})
    assert result.state is UNKNOWN
    assert ops(kafka) == [("t1", {"ACTION": "UNKNOWN", "PGROUP": GROUP, "INCARNATION": "0", "REMARK": remark})]
    assert "event=listener_gave_no_answer transaction_id='t1'" in caplog.text
    assert "s3cret" not in caplog.text


def test_many_threads(topics: MakeTopics) -> None:
    kafka = topics(partitions=4).kafka
    states = (COMMIT, ROLLBACK, UNKNOWN)

    def execute(message: HalfMessage, arg: int) -> LocalTransactionState:
        assert message.body == b"%d" % arg
        return states[arg % 3]

    def send(number: int) -> SendResult:
        return producer.send_in_transaction("orders", b"%d" % number, transaction_id=f"t{number}", arg=number)

    numbers = range(3200)
    with TransactionProducer(kafka, GROUP, Listener(execute), max_in_flight=20) as producer, ThreadPoolExecutor(32) as pool:
        results = list(pool.map(send, numbers))
    assert [(result.transaction_id, result.state) for result in results] == [(f"t{number}", states[number % 3]) for number in numbers]
    halves = {(half.partition(), half.offset()): (half.key(), half.value()) for half in read(kafka, kafka.half_topic)}
    assert halves == {
        (result.half_partition, result.half_offset): (result.transaction_id.encode(), b"%d" % number)
        for number, result in enumerate(results)
    }
    sent = ops(kafka)
    assert len(sent) == len(numbers)
    assert {name: headers["ACTION"] for name, headers in sent} == {f"t{number}": str(states[number % 3]) for number in numbers}


# Sends that fail


def test_half_that_the_broker_refuses(broker: LocalBroker) -> None:
    names = unique_topics(broker)
    kafka = KafkaSettings.model_validate({name.removeprefix("kafka."): value for name, value in names.items()})
    make_topics(kafka, {kafka.half_topic}, **{"max.message.bytes": "1000"})
    make_topics(kafka, {kafka.op_topic, kafka.check_topic})
    listener = Listener()
    with TransactionProducer(kafka, GROUP, listener) as producer:
        with pytest.raises(SendError, match=r"'t1'.*was not run") as caught:
            producer.send_in_transaction("orders", os.urandom(5000), transaction_id="t1")
        assert isinstance(caught.value.__cause__, KafkaException)
        assert caught.value.__cause__.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE
        producer.send_in_transaction("orders", b"small", transaction_id="t2")
    assert [message.transaction_id for message in listener.executed] == ["t2"]
    assert [name for name, _ in ops(kafka)] == ["t2"]


def test_half_that_librdkafka_refuses(kafka: KafkaSettings) -> None:
    listener = Listener()
    with (
        TransactionProducer(kafka, GROUP, listener, max_body_bytes=1000) as producer,
        pytest.raises(SendError, match="Message size too large"),
    ):
        producer.send_in_transaction("orders", b"", transaction_id="t1", properties={"large": "x" * 2 * 1024 * 1024})
    assert listener.executed == []
    assert read(kafka, kafka.half_topic) == read(kafka, kafka.op_topic) == []


def test_unreachable_kafka(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    listener = Listener()
    with TransactionProducer(KafkaSettings(bootstrap_servers="127.0.0.1:1"), GROUP, listener, send_timeout_ms=1000) as producer:
        with pytest.raises(SendError, match="use a new transaction id") as caught:
            producer.send_in_transaction("orders", b"")
        assert isinstance(caught.value.__cause__, KafkaException)
        assert caught.value.__cause__.args[0].code() == KafkaError._MSG_TIMED_OUT
    assert listener.executed == []
    assert "event=op_not_sent" in caplog.text
    assert "event=kafka_error code=_TRANSPORT" in caplog.text
    assert any(record.name == "clients.librdkafka" for record in caplog.records)
    assert capfd.readouterr() == ("", "")


def test_full_queue_is_waited_for_and_then_refused() -> None:
    listener = Listener()
    producer = TransactionProducer(KafkaSettings(bootstrap_servers="127.0.0.1:1"), GROUP, listener, send_timeout_ms=1000, max_in_flight=1)

    def send(_: int) -> str:
        with pytest.raises(SendError) as caught:
            producer.send_in_transaction("orders", b"")
        return str(caught.value)

    with producer, ThreadPoolExecutor(8) as pool:
        errors = list(pool.map(send, range(8)))
    # The one place is free again for one of the others at most before their time is up.
    assert sum("wait to be sent and none got through in 1 s" in error for error in errors) >= 6
    assert listener.executed == []


def test_half_that_times_out_is_rolled_back(own_broker: LocalBroker) -> None:
    kafka = own_topics(own_broker)
    listener = Listener()
    with TransactionProducer(kafka, GROUP, listener, send_timeout_ms=3000) as producer:
        producer.send_in_transaction("orders", b"", transaction_id="t1")
        read(kafka, kafka.op_topic, at_least=1)
        pid = own_broker.pid()
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(SendError, match="may be stored, so a ROLLBACK was sent"):
                producer.send_in_transaction("orders", b"", transaction_id="t2", incarnation=4)
        finally:
            os.kill(pid, signal.SIGCONT)
        read(kafka, kafka.op_topic, at_least=2)
        producer.send_in_transaction("orders", b"", transaction_id="t3")
    assert [message.transaction_id for message in listener.executed] == ["t1", "t3"]
    sent = dict(ops(kafka))
    assert {name: headers["ACTION"] for name, headers in sent.items()} == {"t1": "COMMIT", "t2": "ROLLBACK", "t3": "COMMIT"}
    assert sent["t2"]["INCARNATION"] == "4"
    assert "timed out" in sent["t2"]["REMARK"]


def test_stopped_broker_and_its_return(own_broker: LocalBroker) -> None:
    kafka = own_topics(own_broker)
    listener = Listener()
    with TransactionProducer(kafka, GROUP, listener, send_timeout_ms=2000, session_timeout_ms=6000) as producer:
        producer.send_in_transaction("orders", b"", transaction_id="t1")
        own_broker.stop()
        try:
            with pytest.raises(SendError):
                producer.send_in_transaction("orders", b"", transaction_id="t2")
        finally:
            own_broker.start()

        def gets_through() -> bool:
            try:
                producer.send_in_transaction("orders", b"")
            except SendError:
                return False
            return True

        wait_until(gets_through, "the producer sends again")
        send_checks(kafka, check_of("t1"))
        wait_until(lambda: len(listener.checked) > 0, "the producer answers checks again")
    assert "t2" not in [message.transaction_id for message in listener.executed]


def test_close_without_a_broker_ends(own_broker: LocalBroker) -> None:
    kafka = own_topics(own_broker)
    gate = Gate()

    def check(request: CheckRequest) -> LocalTransactionState:
        gate.pass_through(request.transaction_id)
        return COMMIT

    with TransactionProducer(kafka, GROUP, Listener(check=check), send_timeout_ms=2000) as producer:
        producer.send_in_transaction("orders", b"", transaction_id="t1")
        send_checks(kafka, check_of("t1"))
        assert gate.entered.get(timeout=LIMIT_S) == "t1"
        own_broker.stop()
        gate.opened.set()
        try:
            start_s = time.monotonic()
            assert producer.close() is False
            assert time.monotonic() - start_s < LIMIT_S
        finally:
            own_broker.start()
    assert committed(kafka) == {}


# Closing


def test_close_sends_what_waits_and_refuses_the_rest(kafka: KafkaSettings) -> None:
    producer = TransactionProducer(kafka, GROUP, Listener(), linger_ms=1000)
    result = producer.send_in_transaction("orders", b"")
    assert producer.close() is True
    assert [name for name, _ in ops(kafka)] == [result.transaction_id]
    assert producer.close() is True
    with pytest.raises(ProducerClosedError):
        producer.send_in_transaction("orders", b"")
    with pytest.raises(ProducerClosedError):
        producer.start()


def test_close_waits_for_a_running_local_transaction(kafka: KafkaSettings) -> None:
    gate = Gate()

    def execute(message: HalfMessage, _: object) -> LocalTransactionState:
        gate.pass_through(message.transaction_id)
        return ROLLBACK

    producer = TransactionProducer(kafka, GROUP, Listener(execute))
    with ThreadPoolExecutor(3) as pool:
        sending = pool.submit(producer.send_in_transaction, "orders", b"", transaction_id="t1")
        gate.entered.get(timeout=LIMIT_S)
        closing = [pool.submit(producer.close) for _ in range(2)]
        wait_until(lambda: _is_closed(producer), "close has begun")
        assert not any(close.done() for close in closing)
        gate.opened.set()
        assert sending.result(LIMIT_S).state is ROLLBACK
        assert [close.result(LIMIT_S) for close in closing] == [True, True]
    assert [(name, headers["ACTION"]) for name, headers in ops(kafka)] == [("t1", "ROLLBACK")]


def test_close_gives_up_in_time_and_the_op_still_goes_out(kafka: KafkaSettings) -> None:
    gate = Gate()

    def execute(message: HalfMessage, _: object) -> LocalTransactionState:
        gate.pass_through(message.transaction_id)
        return COMMIT

    producer = TransactionProducer(kafka, GROUP, Listener(execute))
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(producer.send_in_transaction, "orders", b"", transaction_id="t1")
        gate.entered.get(timeout=LIMIT_S)
        assert producer.close(0.5) is False
        gate.opened.set()
        assert sending.result(LIMIT_S).state is COMMIT
    assert [name for name, _ in ops(kafka, at_least=1)] == ["t1"]


def test_close_by_a_listener_is_refused(kafka: KafkaSettings) -> None:
    def execute(*_: object) -> LocalTransactionState:
        producer.close()
        return COMMIT

    listener = Listener(execute, lambda _: execute())
    with TransactionProducer(kafka, GROUP, listener) as producer:
        producer.send_in_transaction("orders", b"", transaction_id="t1")
        send_checks(kafka, check_of("t1"))
        sent = ops(kafka, at_least=2)
    assert [headers["ACTION"] for _, headers in sent] == ["UNKNOWN", "UNKNOWN"]
    assert all(headers["REMARK"].startswith("RuntimeError: close() cannot be called by a listener") for _, headers in sent)


def _is_closed(producer: TransactionProducer) -> bool:
    try:
        producer.start()
    except ProducerClosedError:
        return True
    return False


# Checks


@pytest.mark.parametrize("state", list(LocalTransactionState))
def test_check_is_answered(kafka: KafkaSettings, state: LocalTransactionState) -> None:
    listener = Listener(check=lambda _: state)
    request = check_of("t1", times=3, incarnation=2)
    send_checks(kafka, request)  # before the group first came
    with TransactionProducer(kafka, GROUP, listener):
        ops(kafka, at_least=1)
    sent = ops(kafka)
    answer = {"ACTION": str(state), "PGROUP": GROUP, "INCARNATION": "2", "FROM_CHECK": "true", "CHECK_TIMES": "3"}
    assert sent == [("t1", answer)]
    assert listener.checked == [request]
    assert committed(kafka) == {0: 1}


def _exit(_: object) -> LocalTransactionState:
    sys.exit(3)


@pytest.mark.parametrize(
    ("check", "remark"), [(_fail, "ValueError: no stock"), (lambda _: None, "the listener returned None"), (_exit, "SystemExit: 3")]
)
def test_check_without_an_answer_is_unknown(kafka: KafkaSettings, check: Callable[[CheckRequest], Any], remark: str) -> None:
    listener = Listener(check=lambda request: check(request) if request.transaction_id == "t1" else COMMIT)
    with TransactionProducer(kafka, GROUP, listener):
        send_checks(kafka, check_of("t1"), check_of("t2"))
        ops(kafka, at_least=2)
    answers = dict(ops(kafka))
    assert answers["t2"]["ACTION"] == "COMMIT"
    answer = answers["t1"]
    assert answer["ACTION"] == "UNKNOWN"
    assert answer["REMARK"].startswith(remark)


def test_check_delivered_twice_is_answered_once(kafka: KafkaSettings) -> None:
    listener = Listener()
    with TransactionProducer(kafka, GROUP, listener):
        send_checks(kafka, check_of("t1"))
        wait_until(lambda: committed(kafka) == {0: 1}, "t1 is answered")
        send_checks(kafka, check_of("t1"), check_of("t1", times=2), check_of("end"))
        ops(kafka, at_least=3)
    sent = ops(kafka)
    assert sorted((name, headers["CHECK_TIMES"]) for name, headers in sent) == [("end", "1"), ("t1", "1"), ("t1", "2")]
    assert [request.check_id for request in listener.checked] == ["t1:0.7:1", "t1:0.7:2", "end:0.7:1"]
    assert committed(kafka) == {0: 4}


def test_check_delivered_again_while_it_is_answered(kafka: KafkaSettings) -> None:
    gate = Gate()

    def check(request: CheckRequest) -> LocalTransactionState:
        if request.transaction_id == "t1":
            gate.pass_through(request.transaction_id)
        return COMMIT

    listener = Listener(check=check)
    with TransactionProducer(kafka, GROUP, listener, check_threads=2):
        send_checks(kafka, check_of("t1"))
        gate.entered.get(timeout=LIMIT_S)
        send_checks(kafka, check_of("t1"), check_of("end"))
        assert [name for name, _ in ops(kafka, at_least=1)] == ["end"]
        gate.opened.set()
        ops(kafka, at_least=2)
    assert [request.transaction_id for request in listener.checked] == ["t1", "end"]
    assert sorted(name for name, _ in ops(kafka)) == ["end", "t1"]
    assert committed(kafka) == {0: 3}


def test_checks_of_others_and_broken_ones_are_passed_over(kafka: KafkaSettings, caplog: pytest.LogCaptureFixture) -> None:
    broken = Producer({"bootstrap.servers": kafka.servers()})
    broken.produce(kafka.check_topic, b"s3cret", b"t3", partition=0, headers=[("PGROUP", GROUP.encode()), ("REAL_TOPIC", b"orders")])
    broken.produce(kafka.check_topic, b"s3cret", None, partition=0)
    assert broken.flush(LIMIT_S) == 0
    listener = Listener()
    with TransactionProducer(kafka, GROUP, listener):
        send_checks(kafka, check_of("t1", group="shop2"), check_of("t2", group="Shop"), check_of("t4"))
        ops(kafka, at_least=1)
    sent = ops(kafka)
    assert [name for name, _ in sent] == ["t4"]
    assert [request.transaction_id for request in listener.checked] == ["t4"]
    assert committed(kafka) == {0: 5}
    skipped = [record.getMessage() for record in caplog.records if "event=check_skipped" in record.getMessage()]
    assert skipped == [
        "event=check_skipped partition=0 offset=0 detail='missing_header: TRANSACTION_CHECK_TIMES'",
        "event=check_skipped partition=0 offset=1 detail='missing_header: REAL_TOPIC'",
    ]


def test_two_instances_share_the_checks(topics: MakeTopics) -> None:
    kafka = topics(partitions=4).kafka
    listeners = Listener(), Listener()
    with TransactionProducer(kafka, GROUP, listeners[0]), TransactionProducer(kafka, GROUP, listeners[1]):
        wait_until(lambda: members(kafka) == [2, 2], "each instance has two partitions")
        for partition in range(4):
            send_checks(kafka, *(check_of(f"t{partition}-{number}") for number in range(10)), partition=partition)
        ops(kafka, at_least=40)
    sent = ops(kafka)
    names = {f"t{partition}-{number}" for partition in range(4) for number in range(10)}
    assert {name for name, _ in sent} == names
    assert len(sent) == 40
    assert [len(listener.checked) for listener in listeners] == [20, 20]
    assert committed(kafka) == dict.fromkeys(range(4), 10)


def test_an_instance_that_leaves_hands_over_what_it_did_not_answer(topics: MakeTopics) -> None:
    kafka = topics(partitions=2).kafka
    gate = Gate()

    def check(request: CheckRequest) -> LocalTransactionState:
        gate.pass_through(request.transaction_id)
        return COMMIT

    leaving, staying = Listener(check=check), Listener()
    first = TransactionProducer(kafka, GROUP, leaving)
    first.start()
    send_checks(kafka, *(check_of(f"t{number}") for number in range(5)))
    assert gate.entered.get(timeout=LIMIT_S) == "t0"
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(first.close)
        wait_until(lambda: _is_closed(first), "close has begun")
        gate.opened.set()
        assert closing.result(LIMIT_S) is True
    assert [request.transaction_id for request in leaving.checked] == ["t0"]
    assert committed(kafka) == {0: 1}
    with TransactionProducer(kafka, GROUP, staying):
        ops(kafka, at_least=5)
    assert [request.transaction_id for request in staying.checked] == ["t1", "t2", "t3", "t4"]
    assert committed(kafka) == {0: 5}


def test_reading_pauses_while_too_many_are_open(kafka: KafkaSettings, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "clients")
    gate = Gate()

    def check(request: CheckRequest) -> LocalTransactionState:
        gate.pass_through(request.transaction_id)
        return COMMIT

    names = [f"t{number}" for number in range(50)]
    listener = Listener(check=check)
    with TransactionProducer(kafka, GROUP, listener, max_open_checks=4):
        send_checks(kafka, *(check_of(name) for name in names))
        wait_until(lambda: "event=checks_paused open=4" in caplog.text, "reading is paused")
        gate.opened.set()
        ops(kafka, at_least=50)
    sent = ops(kafka)
    assert sorted(name for name, _ in sent) == sorted(names)
    assert [request.transaction_id for request in listener.checked] == names
    assert "event=checks_resumed" in caplog.text
    assert committed(kafka) == {0: 50}


def test_answer_that_fails_is_sent_again(broker: LocalBroker, caplog: pytest.LogCaptureFixture) -> None:
    names = unique_topics(broker)
    kafka = KafkaSettings.model_validate({name.removeprefix("kafka."): value for name, value in names.items()})
    make_topics(kafka, {kafka.half_topic, kafka.check_topic})
    send_checks(kafka, check_of("t1"))
    listener = Listener()
    with TransactionProducer(kafka, GROUP, listener, send_timeout_ms=1000):
        wait_until(lambda: "event=answer_not_sent transaction_id='t1' check=1" in caplog.text, "the answer failed")
        assert committed(kafka) == {}
        make_topics(kafka, {kafka.op_topic})
        assert [name for name, _ in ops(kafka, at_least=1)] == ["t1"]
    assert len(listener.checked) == 1
    assert committed(kafka) == {0: 1}


KILLED = """
import sys, threading
from clients import LocalTransactionState, TransactionProducer
from schemas.settings import KafkaSettings

class Listener:
    def execute_local_transaction(self, message, arg): raise AssertionError
    def check_local_transaction(self, message):
        if message.transaction_id == "t2":
            sys.stdout.write("t2 is asked\\n")
            sys.stdout.flush()
            threading.Event().wait()
        return LocalTransactionState.COMMIT

settings = KafkaSettings.model_validate_json(sys.argv[1])
TransactionProducer(settings, "shop", Listener(), check_threads=2, session_timeout_ms=6000).start()
threading.Event().wait()
"""


def test_offsets_are_committed_only_after_the_answer(kafka: KafkaSettings) -> None:
    send_checks(kafka, check_of("t1"), check_of("t2"), check_of("t3"))
    process = subprocess.Popen([sys.executable, "-c", KILLED, kafka.model_dump_json()], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "t2 is asked\n"
        wait_until(lambda: committed(kafka) == {0: 1}, "t1's offset is committed")
        assert sorted(name for name, _ in ops(kafka, at_least=2)) == ["t1", "t3"]
        assert committed(kafka) == {0: 1}
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)
    listener = Listener()
    with TransactionProducer(kafka, GROUP, listener, session_timeout_ms=6000):
        ops(kafka, at_least=4)
    sent = ops(kafka)
    assert [request.transaction_id for request in listener.checked] == ["t2", "t3"]
    assert sorted(name for name, _ in sent) == ["t1", "t2", "t3", "t3"]
    assert committed(kafka) == {0: 3}
