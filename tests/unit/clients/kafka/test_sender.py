"""A dead producer is replaced. Without a broker, no replacement ever works."""

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError

from halfway.clients.kafka import sender as module
from halfway.clients.kafka.sender import DeliveryReport, Sender
from halfway.schemas.errors import SendError
from halfway.schemas.records import Record
from halfway.schemas.settings import KafkaSettings
from tests.support.dead_producer import declare_dead
from tests.support.waiting import until

RECORD = Record(b"id", b"body", [])
LIMIT_S = 10.0


@pytest.fixture
def sender() -> Iterator[Sender]:
    nowhere = KafkaSettings(bootstrap_servers="127.0.0.1:1")
    made = Sender(nowhere, max_in_flight=10, send_timeout_ms=30_000, linger_ms=0, max_body_bytes=1_000)
    yield made
    assert made.close(time.monotonic() + LIMIT_S)


def kill(sender: Sender) -> None:
    """Let the producer die, and wait until the sender knows."""
    declare_dead(sender._producer)
    until(lambda: sender._fatal is not None and len(sender._producer) == 0, "the sender knows", LIMIT_S)


def test_a_record_fails_with_its_producer(sender: Sender) -> None:
    report = DeliveryReport()
    sender.send("half", RECORD, report)
    kill(sender)
    assert report.wait(LIMIT_S)
    assert report.error is not None
    assert "the test says so" in sender.explain("half", report.error)


def test_a_dead_producer_is_replaced_at_once_and_the_next_one_later(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    first = sender._producer
    assert sender.works()
    kill(sender)
    until(lambda: sender._producer is not first, "the first one is replaced", LIMIT_S)
    second = sender._producer
    kill(sender)
    until(lambda: sender._renew_at_s is not None, "the second one's death is noted", LIMIT_S)
    with pytest.raises(SendError, match="the test says so"):
        sender.send("half", RECORD, DeliveryReport())
    assert sender._producer is second
    now_s += 1
    until(lambda: sender._producer is not second, "the second one is replaced", LIMIT_S)
    assert not sender.works()


def test_a_new_producer_works_once_kafka_has_registered_it_and_never_after_its_death(sender: Sender) -> None:
    kill(sender)
    for statistics in ('{"eos": {"idemp_state": "WaitPID"}}', '{"eos": {"idemp_state": "Assigned"}, "fatal": {"error": "…"}}'):
        sender._on_statistics(statistics)
        assert not sender.works()
    sender._on_statistics('{"eos": {"idemp_state": "Assigned"}}')
    assert sender.works()


def test_what_a_closed_sender_holds_fails_with_its_producer(sender: Sender) -> None:
    report = DeliveryReport()
    sender.send("half", RECORD, report)
    declare_dead(sender._producer)
    assert sender.close(time.monotonic() + LIMIT_S)
    assert report.error is not None
    assert report.error.code() == KafkaError._PURGE_QUEUE


def test_a_closed_sender_is_closed_whatever_librdkafka_queues_then(sender: Sender) -> None:
    """Without Kafka, it queues an error for each connection that fails."""
    assert sender.close(time.monotonic() + LIMIT_S)
    until(lambda: len(sender._producer) > 0, "an error that nobody reads", LIMIT_S)
    assert sender.close(time.monotonic() + LIMIT_S)
