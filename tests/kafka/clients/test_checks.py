"""The client answers each check once, by one instance of its group, and commits its offset after the answer."""

import itertools
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import Consumer, ConsumerGroupState, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from halfway import (
    CheckRequest,
    LocalTransactionState,
    TransactionProducer,
)
from halfway.clients import checks
from halfway.clients.kafka.config import PRODUCER_OPTIONS
from halfway.pipelines.local.broker import LocalBroker
from halfway.schemas.headers import check_group
from halfway.schemas.settings import KafkaSettings, Settings
from tests.support.client_world import (
    COMMIT,
    GROUP,
    LIMIT_S,
    ROLLBACK,
    UNKNOWN,
    Gate,
    Listener,
    check_of,
    committed,
    fail,
    frozen,
    is_closed,
    make_topics,
    members,
    ops,
    send_checks,
)
from tests.support.kafka_topics import MakeTopics, set_topic_config, unique_kafka_settings
from tests.support.paths import ROOT
from tests.support.raw_headers import send_raw
from tests.support.waiting import until


@pytest.mark.parametrize("state", list(LocalTransactionState))
def test_check_is_answered(kafka: KafkaSettings, state: LocalTransactionState) -> None:
    listener = Listener(check=lambda _: state)
    request = check_of("t1", times=3, incarnation=2)
    send_checks(kafka, request)  # before the group's first start
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
    ("check", "remark"), [(fail, "ValueError: no stock"), (lambda _: None, "the listener returned None"), (_exit, "SystemExit: 3")]
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
    listener = Listener(check=lambda request: UNKNOWN if request.transaction_id == "t1" else COMMIT)
    with TransactionProducer(kafka, GROUP, listener):
        send_checks(kafka, check_of("t1"))
        until(lambda: committed(kafka) == {0: 1}, "t1 is answered")
        send_checks(kafka, check_of("t1"), check_of("t1", times=2), check_of("end"))
        ops(kafka, at_least=3)
    sent = ops(kafka)
    assert sorted((name, headers["CHECK_TIMES"]) for name, headers in sent) == [("end", "1"), ("t1", "1"), ("t1", "2")]
    assert [request.check_id for request in listener.checked] == ["t1:0.7:1", "t1:0.7:2", "end:0.7:1"]
    assert committed(kafka) == {0: 4}


def test_a_known_verdict_is_given_without_asking_the_listener(kafka: KafkaSettings) -> None:
    listener = Listener(lambda message, _: UNKNOWN if message.transaction_id == "unknown" else COMMIT, lambda _: ROLLBACK)
    with TransactionProducer(kafka, GROUP, listener) as producer:
        for name in ("sent", "unknown"):
            producer.send_in_transaction("orders", b"", transaction_id=name)
        for times in (1, 2):
            send_checks(kafka, *(check_of(name, times) for name in ("sent", "unknown", "another's")))
        send_checks(kafka, check_of("sent", incarnation=1))
        ops(kafka, at_least=2 + 6 + 1)
    asked = [(request.transaction_id, request.incarnation) for request in listener.checked]
    assert asked == [("unknown", 0), ("another's", 0), ("sent", 1)]
    answers = [(name, headers["CHECK_TIMES"], headers["ACTION"]) for name, headers in ops(kafka) if "FROM_CHECK" in headers]
    states = {"sent": "COMMIT", "unknown": "ROLLBACK", "another's": "ROLLBACK"}
    assert sorted(answers) == sorted([("sent", "1", "ROLLBACK"), *((name, times, states[name]) for name in states for times in "12")])


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


def test_checks_of_other_groups_and_invalid_checks_are_skipped(kafka: KafkaSettings, caplog: pytest.LogCaptureFixture) -> None:
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


def test_the_names_of_headers_may_be_any_bytes(kafka: KafkaSettings, caplog: pytest.LogCaptureFixture) -> None:
    """Many, because Python finds out at once only in the first calls that confluent_kafka returns a broken list."""
    for _ in range(40):
        send_raw(kafka.servers(), kafka.check_topic, b"odd", b"s3cret", [(b"PGROUP", GROUP.encode()), (b"\xff", b"x")], 1_700_000_000_000)
    with TransactionProducer(kafka, GROUP, Listener()):
        send_checks(kafka, check_of("t1"))
        assert [name for name, _ in ops(kafka, at_least=1)] == ["t1"]
    assert committed(kafka) == {0: 41}
    assert caplog.text.count("detail='bad_header: the name of a header is not UTF-8'") == 40


def test_two_instances_share_the_checks(topics: MakeTopics) -> None:
    kafka = topics(partitions=4).kafka
    listeners = Listener(), Listener()
    with TransactionProducer(kafka, GROUP, listeners[0]), TransactionProducer(kafka, GROUP, listeners[1]):
        until(lambda: members(kafka) == [2, 2], "each instance has two partitions")
        for partition in range(4):
            send_checks(kafka, *(check_of(f"t{partition}-{number}") for number in range(10)), partition=partition)
        ops(kafka, at_least=40)
    sent = ops(kafka)
    names = {f"t{partition}-{number}" for partition in range(4) for number in range(10)}
    assert {name for name, _ in sent} == names
    assert len(sent) == 40
    assert [len(listener.checked) for listener in listeners] == [20, 20]
    assert committed(kafka) == dict.fromkeys(range(4), 10)


def test_an_instance_that_leaves_hands_over_its_unanswered_checks(topics: MakeTopics) -> None:
    kafka = topics(partitions=2).kafka
    gate = Gate()
    leaving, staying = Listener(check=gate.then(COMMIT)), Listener()
    first = TransactionProducer(kafka, GROUP, leaving)
    first.start()
    send_checks(kafka, *(check_of(f"t{number}") for number in range(5)))
    assert gate.entered.get(timeout=LIMIT_S) == "t0"
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(first.close)
        until(lambda: is_closed(first), "close has begun")
        gate.opened.set()
        assert closing.result(LIMIT_S) is True
    assert [request.transaction_id for request in leaving.checked] == ["t0"]
    assert committed(kafka) == {0: 1}
    with TransactionProducer(kafka, GROUP, staying):
        ops(kafka, at_least=5)
    assert [request.transaction_id for request in staying.checked] == ["t1", "t2", "t3", "t4"]
    assert committed(kafka) == {0: 5}


def test_reading_pauses_while_too_many_checks_are_open(kafka: KafkaSettings, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "halfway.clients")
    gate = Gate()
    names = [f"t{number}" for number in range(50)]
    listener = Listener(check=gate.then(COMMIT))
    with TransactionProducer(kafka, GROUP, listener, max_open_checks=4):
        send_checks(kafka, *(check_of(name) for name in names))
        until(lambda: "event=checks_paused open=4" in caplog.text, "reading is paused")
        gate.opened.set()
        ops(kafka, at_least=50)
    sent = ops(kafka)
    assert sorted(name for name, _ in sent) == sorted(names)
    assert [request.transaction_id for request in listener.checked] == names
    assert "event=checks_resumed" in caplog.text
    assert committed(kafka) == {0: 50}


@pytest.mark.parametrize("max_open", [1, 4])
def test_a_partition_that_was_lost_while_reading_paused_is_read_again(
    topics: MakeTopics, caplog: pytest.LogCaptureFixture, max_open: int
) -> None:
    caplog.set_level(logging.INFO, "halfway.clients")
    kafka = topics(partitions=2).kafka
    gate = Gate()
    staying, passing = Listener(check=gate.then(COMMIT)), Listener()
    with TransactionProducer(kafka, GROUP, staying, max_open_checks=max_open):
        until(lambda: members(kafka) == [2], "the first instance is a member")
        send_checks(kafka, *(check_of(f"first{number}") for number in range(max_open)))
        until(lambda: f"event=checks_paused open={max_open}" in caplog.text, "reading is paused")
        with TransactionProducer(kafka, GROUP, passing):
            until(lambda: members(kafka) == [1, 1], "each instance has a partition")
            gate.opened.set()
            until(lambda: "event=checks_resumed" in caplog.text, "reading goes on")
        until(lambda: members(kafka) == [2], "the second instance has left")
        send_checks(kafka, check_of("t1"), partition=0)
        send_checks(kafka, check_of("t2"), partition=1)
        until(lambda: {"t1", "t2"} <= {request.transaction_id for request in staying.checked}, "both partitions are read", LIMIT_S)
        ops(kafka, at_least=max_open + 2)


@pytest.mark.parametrize("joins", [True, False], ids=["joins", "is short"])
def test_kafka_knows_a_group_that_died_before_its_first_check(kafka: KafkaSettings, joins: bool) -> None:
    """A script has ended before Kafka gives it a partition, which takes seconds."""
    group = check_group(GROUP)
    with TransactionProducer(kafka, GROUP, Listener()) as producer:
        producer.send_in_transaction("orders", b"")
        if joins:
            until(lambda: members(kafka) == [2], "the instance is a member")
    with Consumer({"bootstrap.servers": kafka.servers(), "group.id": group}) as consumer:
        places = [TopicPartition(kafka.check_topic, number) for number in range(2)]
        assert [place.offset for place in consumer.committed(places, timeout=LIMIT_S)] == [0, 0]
    client = AdminClient({"bootstrap.servers": kafka.servers()})
    found = {each.group_id: each.state for each in client.list_consumer_groups().result(LIMIT_S).valid}
    assert found[group] == ConsumerGroupState.EMPTY


@pytest.mark.parametrize("join_within_s", [60.0, 0.0], ids=["has not joined", "has a partition"])
def test_kafka_knows_the_group_of_a_short_process_also_if_it_answers_late(
    kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch, join_within_s: float
) -> None:
    monkeypatch.setattr(checks, "_JOIN_WITHIN_S", join_within_s)
    calls = itertools.count()

    class Slow(Consumer):
        def committed(self, *args: Any, **options: Any) -> list[TopicPartition]:
            if next(calls) < 3:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
            return super().committed(*args, **options)

    monkeypatch.setattr(checks, "Consumer", Slow)
    with TransactionProducer(kafka, GROUP, Listener()) as producer:
        producer.send_in_transaction("orders", b"")
    monkeypatch.undo()
    with Consumer({"bootstrap.servers": kafka.servers(), "group.id": check_group(GROUP)}) as consumer:
        assert [place.offset for place in consumer.committed([TopicPartition(kafka.check_topic, 0)], timeout=LIMIT_S)] == [0]


def test_a_broker_that_dies_while_its_group_is_made_known_holds_no_close_up(
    own_broker: LocalBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The commit of a position would wait for its answer without a time limit."""
    kafka = unique_kafka_settings(own_broker)
    make_topics(kafka, {kafka.half_topic, kafka.op_topic, kafka.check_topic})
    is_frozen = threading.Event()

    with ExitStack() as stack:

        class Frozen(Consumer):
            def committed(self, *args: Any, **options: Any) -> list[TopicPartition]:
                found = super().committed(*args, **options)
                if not is_frozen.is_set():
                    stack.enter_context(frozen(own_broker))
                    is_frozen.set()
                return found

        monkeypatch.setattr(checks, "Consumer", Frozen)
        producer = TransactionProducer(kafka, GROUP, Listener())
        producer.start()
        assert is_frozen.wait(LIMIT_S)
        assert producer.close(5)
    assert "close_incomplete" not in caplog.text


def test_a_new_instance_does_not_put_its_group_back(kafka: KafkaSettings) -> None:
    send_checks(kafka, check_of("t1"))
    for _ in range(2):
        with TransactionProducer(kafka, GROUP, Listener()):
            until(lambda: committed(kafka) == {0: 1}, "the check is answered")
            with TransactionProducer(kafka, GROUP, Listener()) as other:
                other.send_in_transaction("orders", b"")
            assert committed(kafka) == {0: 1}


def test_checks_of_a_topic_that_was_made_anew_are_answered_and_committed(kafka: KafkaSettings) -> None:
    listener = Listener()
    with TransactionProducer(kafka, GROUP, listener):
        send_checks(kafka, *(check_of(f"t{number}") for number in range(5)))
        until(lambda: committed(kafka) == {0: 5}, "the checks are answered")
        client = AdminClient({"bootstrap.servers": kafka.servers()})
        [deleted] = client.delete_topics([kafka.check_topic]).values()
        deleted.result(LIMIT_S)
        until(lambda: is_made_anew(kafka), "the topic is there again")
        send_checks(kafka, *(check_of(f"u{number}") for number in range(2)))
        until(lambda: committed(kafka) == {0: 2}, "the new topic's checks are answered")
    assert {f"u{number}" for number in range(2)} <= {request.transaction_id for request in listener.checked}


def is_made_anew(kafka: KafkaSettings) -> bool:
    try:
        make_topics(kafka, {kafka.check_topic})
    except KafkaException as error:
        return error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS  # it is not deleted yet
    return True


def test_a_large_check_of_another_group_does_not_stop_this_one(kafka: KafkaSettings) -> None:
    """librdkafka refuses a response of more than 100 MB by default, and then asks for it for ever."""
    set_topic_config(Settings(kafka=kafka), kafka.check_topic, "max.message.bytes", 110_000_000)
    producer = Producer({"bootstrap.servers": kafka.servers(), **PRODUCER_OPTIONS})
    large = replace(check_of("t1", group="another"), body=os.urandom(102_000_000)).to_record()
    producer.produce(kafka.check_topic, large.value, large.key, partition=0, headers=list(large.headers))
    assert producer.flush(LIMIT_S) == 0
    with TransactionProducer(kafka, GROUP, Listener()):
        send_checks(kafka, check_of("t2"))
        assert [name for name, _ in ops(kafka, at_least=1)] == ["t2"]


def test_answer_that_fails_is_resent(broker: LocalBroker, caplog: pytest.LogCaptureFixture) -> None:
    kafka = unique_kafka_settings(broker)
    make_topics(kafka, {kafka.half_topic, kafka.check_topic})
    send_checks(kafka, check_of("t1"))
    listener = Listener()
    with TransactionProducer(kafka, GROUP, listener, send_timeout_ms=1000):
        until(lambda: "event=answer_not_sent transaction_id='t1' check=1" in caplog.text, "the answer failed")
        assert committed(kafka) == {}
        make_topics(kafka, {kafka.op_topic})
        assert [name for name, _ in ops(kafka, at_least=1)] == ["t1"]
    assert len(listener.checked) == 1
    assert committed(kafka) == {0: 1}


KILLED = """
import sys, threading
from halfway import LocalTransactionState, TransactionProducer
from halfway.schemas.settings import KafkaSettings

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
        until(lambda: committed(kafka) == {0: 1}, "t1's offset is committed")
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
