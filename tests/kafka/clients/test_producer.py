"""The client against a real broker: it sends the records of docs/contract.md in order, and reports failures."""

import logging
import os
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from halfway import (
    HalfMessage,
    LocalTransactionState,
    QueueFullError,
    SendError,
    SendResult,
    TransactionProducer,
)
from halfway.pipelines.local.broker import LocalBroker
from halfway.schemas.records import RecordError
from halfway.schemas.settings import KafkaSettings
from tests.support.client_world import (
    COMMIT,
    GROUP,
    LIMIT_S,
    ROLLBACK,
    UNKNOWN,
    Listener,
    check_of,
    fail,
    frozen,
    gets_through,
    make_topics,
    murmur2,
    ops,
    own_topics,
    read,
    send_checks,
)
from tests.support.kafka_topics import MakeTopics, unique_kafka_settings
from tests.support.partition_records import headers_of
from tests.support.waiting import until

# Sends that succeed


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
    born = headers_of(half)["BORN_TIMESTAMP"]
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
    assert result == SendResult("tx-ä", half.partition() or 0, half.offset() or 0, half.timestamp()[1], COMMIT)


@pytest.mark.parametrize("state", list(LocalTransactionState))
def test_each_state_is_sent_as_the_listener_returned_it(kafka: KafkaSettings, state: LocalTransactionState) -> None:
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


def test_all_records_of_an_id_are_in_javas_partition_for_it(topics: MakeTopics) -> None:
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


@pytest.mark.parametrize(
    ("execute", "remark"),
    [
        (fail, "ValueError: no stock " + "ä" * 501),
        (lambda *_: None, "the listener returned None, not a LocalTransactionState"),
        (lambda *_: "COMMIT", "the listener returned a str, not a LocalTransactionState"),
    ],
)
def test_a_missing_answer_is_unknown_with_a_remark(
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
    kafka = unique_kafka_settings(broker)
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


@pytest.mark.parametrize("send_timeout_ms", [1_000, 30_000])
def test_a_topic_that_does_not_exist_is_named_soon_and_used_once_it_does(broker: LocalBroker, send_timeout_ms: int) -> None:
    kafka = unique_kafka_settings(broker)
    listener = Listener()
    with TransactionProducer(kafka, GROUP, listener, send_timeout_ms=send_timeout_ms) as producer:
        for _ in range(2):
            begin_s = time.monotonic()
            with pytest.raises(SendError, match=f"no topic {kafka.half_topic}: `halfway topics create` makes it"):
                producer.send_in_transaction("orders", b"")
            assert time.monotonic() - begin_s < 15
        make_topics(kafka, {kafka.half_topic, kafka.op_topic, kafka.check_topic})

        until(lambda: gets_through(producer), "the new topic is used")
    assert len(listener.executed) == 1
    assert len(ops(kafka)) == 1


def test_a_topic_that_is_made_a_moment_after_the_send_takes_the_half(broker: LocalBroker) -> None:
    kafka = unique_kafka_settings(broker)
    with TransactionProducer(kafka, GROUP, Listener()) as producer, ThreadPoolExecutor() as pool:
        sent = pool.submit(producer.send_in_transaction, "orders", b"")
        until(lambda: len(producer._instance.sender._producer) > 0, "the half is queued")
        make_topics(kafka, {kafka.half_topic, kafka.op_topic, kafka.check_topic})
        assert sent.result(LIMIT_S).state is COMMIT


def test_half_with_too_large_headers_is_not_sent(kafka: KafkaSettings) -> None:
    listener = Listener()
    with TransactionProducer(kafka, GROUP, listener) as producer, pytest.raises(RecordError, match="headers_too_large"):
        producer.send_in_transaction("orders", b"", transaction_id="t1", properties={"large": "x" * 40_000})
    assert listener.executed == []
    assert read(kafka, kafka.half_topic) == read(kafka, kafka.op_topic) == []


def test_unreachable_kafka(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    listener = Listener()
    with TransactionProducer(KafkaSettings(bootstrap_servers="127.0.0.1:1"), GROUP, listener, send_timeout_ms=1000) as producer:
        with pytest.raises(SendError, match=r"may be stored, so a ROLLBACK is queued$") as caught:
            producer.send_in_transaction("orders", b"")
        assert isinstance(caught.value.__cause__, KafkaException)
        assert caught.value.__cause__.args[0].code() == KafkaError._MSG_TIMED_OUT
        with pytest.raises(SendError, match="a ROLLBACK is queued: send it again under another transaction id"):
            producer.send_in_transaction("orders", b"", transaction_id="mine")
    assert listener.executed == []
    assert "event=op_not_sent" in caplog.text
    assert "event=kafka_error code=_TRANSPORT" in caplog.text
    assert any(record.name == "halfway.clients.librdkafka" for record in caplog.records)
    assert capfd.readouterr() == ("", "")


def test_full_queue_is_waited_for_and_then_refused() -> None:
    listener = Listener()
    producer = TransactionProducer(KafkaSettings(bootstrap_servers="127.0.0.1:1"), GROUP, listener, send_timeout_ms=1000, max_in_flight=1)

    def send(_: int) -> SendError:
        with pytest.raises(SendError) as caught:
            producer.send_in_transaction("orders", b"")
        return caught.value

    with producer, ThreadPoolExecutor(8) as pool:
        errors = list(pool.map(send, range(8)))
    # The queue holds one record. Before the others time out, at most one of them finds it free.
    refused = [str(error) for error in errors if isinstance(error, QueueFullError)]
    assert len(refused) >= 6
    assert all("the queue stayed full for 1 s" in error for error in refused)
    assert listener.executed == []


def test_half_that_times_out_is_rolled_back(own_broker: LocalBroker) -> None:
    kafka = own_topics(own_broker)
    listener = Listener()
    with TransactionProducer(kafka, GROUP, listener, send_timeout_ms=3000) as producer:
        producer.send_in_transaction("orders", b"", transaction_id="t1")
        read(kafka, kafka.op_topic, at_least=1)
        with frozen(own_broker), pytest.raises(SendError, match="may be stored, so a ROLLBACK is queued"):
            producer.send_in_transaction("orders", b"", transaction_id="t2", incarnation=4)
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

        until(lambda: gets_through(producer), "the producer sends again")
        send_checks(kafka, check_of("another's"))
        until(lambda: len(listener.checked) > 0, "the producer answers checks again")
    assert "t2" not in [message.transaction_id for message in listener.executed]
