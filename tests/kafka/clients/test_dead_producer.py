"""A producer that librdkafka has declared dead is replaced, and until that works its instance is not in the group."""

import logging
import os
import signal
import threading
from pathlib import Path

import pytest

from halfway import LocalTransactionState, SendError, TransactionProducer
from halfway.clients.kafka.sender import Sender
from halfway.pipelines.local.broker import LocalBroker
from halfway.schemas.settings import KafkaSettings
from tests.support.client_world import (
    GROUP,
    LIMIT_S,
    Gate,
    Listener,
    check_of,
    committed,
    gets_through,
    members,
    murmur2,
    ops,
    own_topics,
    read,
    send_checks,
)
from tests.support.dead_producer import declare_dead
from tests.support.waiting import until


def kill(producer: TransactionProducer) -> None:
    assert producer._instance._sender is not None
    declare_dead(producer._instance._sender._producer)


def test_a_dead_producer_is_made_anew(kafka: KafkaSettings, caplog: pytest.LogCaptureFixture) -> None:
    with TransactionProducer(kafka, GROUP, Listener()) as producer:
        assert gets_through(producer, "before")
        for round_ in range(3):
            kill(producer)
            until(lambda number=round_: gets_through(producer, f"after{number}"), "the producer sends again", LIMIT_S)
            send_checks(kafka, check_of(f"asked{round_}"))
            until(lambda number=round_: committed(kafka) == {0: number + 1}, "the check is answered", LIMIT_S)
        assert producer.close() is True
    assert "event=producer_failed" in caplog.text
    assert {name for name, _ in ops(kafka)} >= {f"asked{number}" for number in range(3)}
    assert {half.key() for half in read(kafka, kafka.half_topic)} == {b"before", *(b"after%d" % number for number in range(3))}


def test_an_instance_leaves_the_group_until_its_new_producer_works(kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    renew, gate = Sender._renew, Gate()

    def renew_at_the_gate(sender: Sender) -> None:
        if gate.opened.is_set():
            renew(sender)

    monkeypatch.setattr(Sender, "_renew", renew_at_the_gate)
    dead, healthy = Listener(), Listener()
    with TransactionProducer(kafka, GROUP, dead) as first:
        until(lambda: members(kafka) == [2], "the first instance is a member", LIMIT_S)
        with TransactionProducer(kafka, GROUP, healthy):
            until(lambda: members(kafka) == [1, 1], "both instances are members", LIMIT_S)
            kill(first)
            until(lambda: members(kafka) == [2], "the instance with the dead producer has left", LIMIT_S)
            send_checks(kafka, check_of("t0"), partition=0)
            send_checks(kafka, check_of("t1"), partition=1)
            assert {name for name, _ in ops(kafka, at_least=2)} == {"t0", "t1"}
            assert (len(dead.checked), len(healthy.checked)) == (0, 2)
            with pytest.raises(SendError, match="the test says so"):
                first.send_in_transaction("orders", b"")
            gate.opened.set()
            until(lambda: members(kafka) == [1, 1], "the instance is back", LIMIT_S)
        send_checks(kafka, check_of("t2"))
        ops(kafka, at_least=3)
    assert [request.transaction_id for request in dead.checked] == ["t2"]
    assert dead.executed == []
    assert read(kafka, kafka.half_topic) == []


def test_an_instance_that_left_the_group_while_reading_paused_reads_again(
    kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "halfway.clients")
    renew, renewing, gate = Sender._renew, threading.Event(), Gate()
    monkeypatch.setattr(Sender, "_renew", lambda sender: renew(sender) if renewing.is_set() else None)
    names = [f"t{number}" for number in range(10)]
    with TransactionProducer(kafka, GROUP, Listener(check=gate.then(LocalTransactionState.COMMIT)), max_open_checks=4) as producer:
        until(lambda: members(kafka) == [2], "the instance is a member", LIMIT_S)
        send_checks(kafka, *map(check_of, names))
        until(lambda: "event=checks_paused" in caplog.text, "reading is paused", LIMIT_S)
        kill(producer)
        until(lambda: members(kafka) == [], "the instance has left", LIMIT_S)
        gate.opened.set()
        until(lambda: "event=checks_resumed" in caplog.text, "nothing is open any more", LIMIT_S)
        renewing.set()
        until(lambda: {name for name, _ in ops(kafka)} == set(names), "all checks are answered", LIMIT_S)


def test_an_answer_that_died_with_the_producer_is_given_by_another_instance(kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sender, "_renew", lambda _: None)
    gate = Gate()
    dying = TransactionProducer(kafka, GROUP, Listener(check=gate.then(None)))
    dying.start()
    send_checks(kafka, check_of("t1"))
    gate.entered.get(timeout=LIMIT_S)
    kill(dying)
    healthy = Listener()
    with TransactionProducer(kafka, GROUP, healthy):
        until(lambda: members(kafka) == [2], "only the healthy instance is a member", LIMIT_S)
        gate.opened.set()
        assert [name for name, _ in ops(kafka, at_least=1)] == ["t1"]
        dying.close()
    assert [request.transaction_id for request in healthy.checked] == ["t1"]
    assert committed(kafka) == {0: 1}


def test_a_broker_that_lost_acknowledged_records_kills_the_producer_and_gets_a_new_one(
    own_broker: LocalBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker's next sequence is lower than the producer's: an error that librdkafka cannot repair."""
    kafka = own_topics(own_broker)
    names = [name for name in (f"t{number}" for number in range(40)) if murmur2(name.encode()) % 2 == 0]
    with TransactionProducer(kafka, GROUP, Listener(), session_timeout_ms=6000) as producer:
        for name in names[:3]:
            assert gets_through(producer, name)
        read(kafka, kafka.op_topic, at_least=3)
        pid = own_broker.pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: own_broker.pid() is None, "the broker is dead")
        cut_last_batch(own_broker.directory / "data" / f"{kafka.half_topic}-0" / "00000000000000000000.log")
        own_broker.start()
        assert not gets_through(producer, names[3])
        until(lambda: gets_through(producer, names[4]), "the producer sends again", LIMIT_S)
        send_checks(kafka, check_of("asked"))
        until(lambda: committed(kafka) == {0: 1}, "the check is answered", LIMIT_S)
    assert "event=producer_failed" in caplog.text
    assert "event=producer_replaced" in caplog.text


def cut_last_batch(log: Path) -> None:
    """Take the last batch off a segment. A batch begins with its offset (8 bytes) and the length of its rest (4)."""
    content, begin, last = log.read_bytes(), 0, 0
    while begin + 12 <= len(content) and (length := int.from_bytes(content[begin + 8 : begin + 12])):
        last, begin = begin, begin + 12 + length
    os.truncate(log, last)
