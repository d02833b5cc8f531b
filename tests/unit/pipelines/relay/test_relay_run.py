"""A relay from its start to its end, on a Kafka in memory, and a transaction that librdkafka's queue cannot hold."""

import gc
import os
import random
import signal
import threading
import weakref
from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from typer.testing import CliRunner

from halfway.pipelines.cli.app import app
from halfway.pipelines.relay import relay as module
from halfway.pipelines.relay import relay_producer
from halfway.pipelines.relay.active_relay import ActiveRelay
from halfway.pipelines.relay.position_reader import missing_relay_topic
from halfway.pipelines.relay.positions import PositionRecord
from halfway.pipelines.relay.relay import Begin, Relay
from halfway.pipelines.relay.relay_producer import RelayProducer, TransactionLostError
from halfway.pipelines.relay.route import RelayedRecord
from halfway.schemas.errors import KafkaUnavailableError, RelayError, TopicError
from tests.support.fake_relay_kafka import FakeKafka, fake_kafka, settings_for
from tests.support.relay_world import append_rows, row
from tests.support.waiting import LIMIT_S, until

NO_RIGHT = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, "no right", txn_requires_abort=True)


class Election:
    """Makes a relay the active one when it is told to."""

    may_lead = threading.Event()
    asked = threading.Event()
    """A relay runs, and handles signals."""

    def __init__(self, _: object) -> None:
        self.is_leader = False

    def serve(self, wait_s: float) -> bool:
        self.asked.set()
        self.is_leader = self.may_lead.wait(min(wait_s, 0.05))
        return self.is_leader

    def close(self) -> None:
        """Leave nothing."""


@pytest.fixture
def kafka(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKafka]:
    found = fake_kafka(random.Random(0), monkeypatch)
    found.losses = 0.0
    replaced: dict[str, Any] = {
        "read_positions": found.stored,
        "admin_client": lambda *_: None,
        "partition_counts": lambda _, topics: dict.fromkeys(topics, 1),
        "verify_rights": lambda *_, **__: None,
        "LeaderElection": Election,
    }
    for name, fake in replaced.items():
        monkeypatch.setattr(module, name, fake)
    append_rows(tmp_path, 0, 0, [row(f"m{number}", "orders") for number in range(3)])
    yield found
    Election.may_lead.clear()
    Election.asked.clear()


def test_a_relay_that_has_stood_by_does_not_send_all_again_if_the_bookmark_is_lost(
    tmp_path: Path, kafka: FakeKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two were started with `--begin`, when there was no bookmark."""
    settings = settings_for(tmp_path)
    active, standby = Relay(settings, Begin(None)), Relay(settings, Begin(None))
    standby._verify(None)  # type: ignore[arg-type]
    Election.may_lead.set()
    assert active.run(available_now=True)
    assert kafka.sent["orders"] == ["m0", "m1", "m2"]
    kafka.positions.clear()
    monkeypatch.setattr(module, "_BEGIN_COUNTS_S", 0.0)
    with pytest.raises(RelayError, match="Kafka holds no bookmark of relay relay"):
        standby.run(available_now=True)
    assert kafka.sent["orders"] == ["m0", "m1", "m2"]


def test_a_relay_of_what_there_is_now_that_is_ended_before_exits_as_ended_by_the_signal(tmp_path: Path, kafka: FakeKafka) -> None:
    arguments = ["relay", "--available-now", "--begin", "earliest", "--set", f"storage.warehouse={tmp_path}"]

    def end() -> None:
        if Election.asked.wait(60):
            os.kill(os.getpid(), signal.SIGTERM)

    begun = threading.Thread(target=end)
    begun.start()
    done = CliRunner().invoke(app, [*arguments, "--set", "kafka.bootstrap_servers=nowhere:1"])
    begun.join()
    assert (done.exit_code, kafka.sent) == (128 + signal.SIGTERM, {})


def test_a_place_to_begin_that_is_none_is_refused_with_those_that_are(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["relay", "--begin", "latest", "--set", f"storage.warehouse={tmp_path}"])
    said = " ".join(done.output.replace("│", " ").split())
    assert (done.exit_code, "give EPOCH.BATCH" in said, "or give earliest" in said) == (2, True, True)


def mocked_producer(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> RelayProducer:
    """Return a producer of librdkafka's mock cluster, whose topics are made as they are named."""
    monkeypatch.setattr(relay_producer, "librdkafka_config", lambda *_: {"test.mock.num.brokers": 1, "bootstrap.servers": "", **options})
    monkeypatch.setitem(relay_producer.PRODUCER_OPTIONS, "allow.auto.create.topics", True)
    return RelayProducer(settings_for(folder))


def test_a_transaction_may_have_more_records_than_librdkafka_queues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first one does after `relay.allow` was narrowed, where very many topics had been stopped."""
    producer = mocked_producer(tmp_path, monkeypatch, **{"queue.buffering.max.messages": 100})
    positions = [PositionRecord(b"relay none%d" % number, None) for number in range(1_000)]
    producer.write([], (), "transactions.relay", positions)
    producer.close()


def test_a_relay_that_another_one_has_fenced_leaves_no_producer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reports, which nobody serves, would hold a thread, a connection and what was in flight."""
    producer = mocked_producer(tmp_path, monkeypatch)
    producer._producer.begin_transaction()
    producer._produce(RelayedRecord("orders", 0, b"key", b"body", (), "orders", "id"), is_alone=False)
    left = [weakref.ref(producer), weakref.ref(producer._first)]
    producer.close()
    del producer
    gc.collect()
    assert [each() for each in left] == [None, None]


@pytest.mark.parametrize(
    ("reported", "cause"),
    [(None, "does not tell where transactions.relay ends"), (NO_RIGHT, "no right")],
    ids=["an unknown offset", "a refusal"],
)
def test_a_mark_that_tells_no_end_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reported: KafkaError | None, cause: str) -> None:
    """A relay would take whatever bookmark a broker tells it."""
    producer = mocked_producer(tmp_path, monkeypatch)
    assert producer.mark_end("transactions.relay") > 0
    record, aborts = SimpleNamespace(offset=lambda: None), list[float]()

    def commit(_: float) -> None:
        assert reported is not None
        raise KafkaException(reported)

    failing = SimpleNamespace(begin_transaction=lambda: None, commit_transaction=commit, abort_transaction=aborts.append)
    monkeypatch.setattr(producer, "_producer", failing)
    monkeypatch.setattr(producer, "_put", lambda *_, on_delivery: on_delivery(reported, record))
    monkeypatch.setattr(producer, "_wait", lambda: None)
    with pytest.raises(TransactionLostError, match=cause):
        producer.mark_end("transactions.relay")
    assert len(aborts) == 1


def test_a_relay_does_not_begin_on_a_topic_in_which_an_older_bookmark_may_come_last(
    tmp_path: Path, kafka: FakeKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partitions were added: its key is in another one now."""
    monkeypatch.setattr(module, "partition_counts", lambda _, topics: dict.fromkeys(topics, 3))
    with pytest.raises(TopicError, match="has 3 partitions, and the relay needs one"):
        Relay(settings_for(tmp_path), Begin(None)).run(available_now=True)
    assert not kafka.sent


def let_fail(monkeypatch: pytest.MonkeyPatch, failures: Iterable[Exception]) -> None:
    """Let a relay become active, and its first looks at its bookmark fail."""
    stored, left = ActiveRelay.stored, iter(failures)

    def failing(self: ActiveRelay) -> Any:
        if failure := next(left, None):
            raise failure
        return stored(self)

    monkeypatch.setattr(ActiveRelay, "stored", failing)
    Election.may_lead.set()


def test_a_broker_that_has_just_started_and_knows_no_topic_ends_no_relay(
    tmp_path: Path, kafka: FakeKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_fail(monkeypatch, [missing_relay_topic("transactions.relay")])
    relay = Relay(settings_for(tmp_path), Begin(None))
    assert relay.run(available_now=True)
    assert (relay.report.interruptions, kafka.sent["orders"]) == (1, ["m0", "m1", "m2"])


def test_a_relay_whose_topic_is_gone_ends(tmp_path: Path, kafka: FakeKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    let_fail(monkeypatch, repeat(missing_relay_topic("transactions.relay")))
    monkeypatch.setattr(module, "_UNKNOWN_LIMIT_S", 0.5)
    with pytest.raises(TopicError, match="halfway topics create --relay"):
        Relay(settings_for(tmp_path), Begin(None)).run(available_now=True)
    assert not kafka.sent


@pytest.mark.parametrize("between", ["another error", "it stood by", "it was active"])
def test_a_topic_that_is_unknown_again_hours_later_has_its_minute_again(
    tmp_path: Path, kafka: FakeKafka, monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    """The broker has started anew: it refuses connections, and then knows no topic for a moment."""
    unknown = missing_relay_topic("r")
    let_fail(monkeypatch, [unknown, KafkaUnavailableError("away"), unknown] if between == "another error" else [unknown, unknown])
    # Each try is a second after the one before.
    monkeypatch.setattr(module, "_UNKNOWN_LIMIT_S", 1.5 if between == "another error" else 0.5)
    serve, run_active, done = Election.serve, Relay._run_active, []

    def stand_by_once(self: Election, wait_s: float) -> bool:
        if done == ["failed"]:
            done.append("stood by")
            return False
        return serve(self, wait_s)

    def note(self: Relay, client: Any, election: Any, *, available_now: bool) -> None:
        try:
            run_active(self, client, election, available_now=available_now)
        except TopicError:
            if done == ["failed"] and between == "it was active":
                self.report.is_active = True
            done.append("failed")
            raise

    monkeypatch.setattr(Relay, "_run_active", note)
    if between == "it stood by":
        monkeypatch.setattr(Election, "serve", stand_by_once)
    assert Relay(settings_for(tmp_path), Begin(None)).run(available_now=True)
    assert kafka.sent["orders"] == ["m0", "m1", "m2"]


def test_a_relay_that_can_read_nothing_is_never_active(tmp_path: Path, kafka: FakeKafka) -> None:
    """The alert on a relay that is not active would not fire, nor another one, while nothing is sent."""
    settings = settings_for(tmp_path)
    table = Path(settings.storage.warehouse, "messages")
    [file] = table.rglob("*.parquet")
    file.rename(tmp_path / "lost")
    relay, states = Relay(settings, Begin(None)), list[bool]()
    thread = threading.Thread(target=relay.run)
    Election.may_lead.set()
    thread.start()
    try:
        until(lambda: states.append(relay.report.is_active) or relay.report.interruptions >= 2, "two tries")
        assert True not in states
        (tmp_path / "lost").rename(file)
        until(lambda: relay.report.is_active, "the table is read")
    finally:
        relay.stop()
        thread.join(LIMIT_S)
    assert kafka.sent["orders"] == ["m0", "m1", "m2"]
