"""R15: checks of a group without any instance are put off and not counted, until an instance is back."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import Consumer
from pyspark.sql import SparkSession

from halfway import CheckRequest, HalfMessage, LocalTransactionState, TransactionProducer
from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.admin import Admin, admin_client
from halfway.pipelines.local.broker import LocalBroker
from halfway.pipelines.resolve import groups
from halfway.pipelines.resolve.groups import ASK_EVERY_S, GRACE_S, GroupWatch
from halfway.pipelines.resolve.job import ResolveJob
from halfway.pipelines.storage.state_reader import read_state
from halfway.schemas.errors import KafkaUnavailableError
from halfway.schemas.headers import check_group
from halfway.schemas.outcomes import Count
from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table
from halfway.transforms.views.pending import PendingView, view_pending
from tests.support.job_world import MakeWorld, World
from tests.support.kafka_topics import MakeTopics, unique_topics
from tests.support.waiting import until


@contextmanager
def member(settings: Settings, group: str) -> Iterator[None]:
    """Join the consumer group of a producer group."""
    consumer = Consumer({"bootstrap.servers": settings.kafka.servers(), "group.id": check_group(group), "session.timeout.ms": 6_000})
    consumer.subscribe([settings.kafka.check_topic])
    try:
        until(lambda: consumer.poll(0.1) is None and bool(consumer.assignment()), f"{group}'s membership")
        yield
    finally:
        consumer.close()


def new_watch(spark: SparkSession, settings: Settings, clock: Callable[[], float] = time.monotonic) -> GroupWatch:
    return GroupWatch(spark, settings.kafka, 30_000, lambda: time.time_ns() // 1_000_000, clock)


@contextmanager
def watching(spark: SparkSession, settings: Settings) -> Iterator[GroupWatch]:
    """Open a watch that asks in the background."""
    watch = new_watch(spark, settings)
    watch.start()
    yield watch
    watch.close()


def test_a_group_is_away_when_its_last_member_has_left_and_only_then(spark: SparkSession, topics: MakeTopics) -> None:
    settings = topics()
    group = settings.kafka.half_topic
    with watching(spark, settings) as watch:
        assert group not in watch.absent(), "an unknown group counts as present"
        with member(settings, group), watching(spark, settings) as other:
            assert group not in other.absent()
        with watching(spark, settings) as other:
            assert group in other.absent(), "a new watch waits for its first answer"
        until(lambda: group in watch.absent(), "a later answer")
        with member(settings, group):
            until(lambda: group not in watch.absent(), "the group's return")


def test_a_group_that_kafka_has_deleted_stays_away_for_a_minute(spark: SparkSession, topics: MakeTopics) -> None:
    settings = topics()
    group = settings.kafka.half_topic
    with member(settings, group):
        pass
    now_s = 0.0
    watch = new_watch(spark, settings, clock=lambda: now_s)
    watch.ask()
    assert group in watch.absent()
    client = admin_client(settings.kafka)
    for deleted in client.delete_consumer_groups([check_group(group)]).values():
        deleted.result()
    fresh = new_watch(spark, settings)
    fresh.ask()
    assert group not in fresh.absent(), "Kafka has deleted the group"
    for _ in range(int(GRACE_S)):
        now_s += ASK_EVERY_S
        watch.ask()
        assert group in watch.absent()
    now_s += ASK_EVERY_S
    watch.ask()
    assert group not in watch.absent(), "the end of the grace"


def test_a_slow_kafka_delays_no_tick_and_the_last_answer_stands(
    spark: SparkSession, broker: LocalBroker, caplog: pytest.LogCaptureFixture
) -> None:
    settings = load_settings(environ={}, overrides=unique_topics(broker))
    watch = new_watch(spark, settings)
    watch.ask()
    watch.take_up({"gone": 0})
    watch._absent = ["gone"]
    watch._client = Admin({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})
    caplog.set_level(logging.WARNING)
    longest_s = 0.0

    def has_failed() -> bool:
        nonlocal longest_s
        started_s = time.monotonic()
        assert watch.absent() == ["gone"]
        longest_s = max(longest_s, time.monotonic() - started_s)
        return any("event=absent_groups_not_known" in record.message for record in caplog.records)

    watch.start()
    until(has_failed, "the failure of a question", limit_s=30)
    watch.close()
    assert longest_s < 2, "a tick has waited for the question, which takes 5 s to fail"


def test_without_a_first_answer_nothing_is_said(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick without the groups that are away could discard their messages: no tick is published."""
    monkeypatch.setattr(groups, "_FIRST_ANSWER_LIMIT_S", 0.1)
    watch = new_watch(spark, load_settings(environ={}, overrides={"kafka.bootstrap_servers": "127.0.0.1:1"}))
    with pytest.raises(KafkaUnavailableError, match="Kafka has not listed its consumer groups yet"):
        watch.absent()


class Service:
    """Answers UNKNOWN at first, and COMMIT to a check."""

    def execute_local_transaction(self, message: HalfMessage, arg: object) -> LocalTransactionState:  # noqa: ARG002
        return LocalTransactionState.UNKNOWN

    def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState:  # noqa: ARG002
        return LocalTransactionState.COMMIT


@pytest.fixture
def running(world: MakeWorld) -> Iterator[Callable[..., World]]:
    """`running(**overrides)`: a world whose job runs in a thread and publishes ticks."""
    jobs: list[tuple[ResolveJob, threading.Thread]] = []

    def make(**overrides: object) -> World:
        own = {"trigger.available_now": False, "trigger.interval": "100ms", "resolution.tick_interval": "200ms"}
        w = world(timestamps="LogAppendTime", **{**own, **overrides})
        job = ResolveJob(w.settings, on_batch=w.reports.append)
        thread = threading.Thread(target=job.run, args=(lambda: w.spark,))
        jobs.append((job, thread))
        thread.start()
        until(lambda: bool(w.reports), "the first batch")
        return w

    yield make
    for job, thread in jobs:
        job.stop()
        thread.join(60)
        assert job.failure is None


def view(w: World) -> PendingView:
    return view_pending(read_state(lambda: w.spark, w.settings.storage).rows)


@pytest.mark.timeout(240)
@pytest.mark.long
def test_r15_checks_of_an_absent_group_are_not_counted_until_it_is_back(running: Callable[..., World]) -> None:
    w = running(
        **{
            "resolution.transactionTimeOut": "2s",
            "resolution.transactionCheckInterval": "1s",
            "resolution.transactionCheckMax": 2,
        }
    )
    group = w.settings.kafka.half_topic
    with TransactionProducer(w.settings.kafka, group, Service()) as service:
        service.send_in_transaction("orders", b"first", transaction_id="first")
        until(lambda: w.by_id(Table.MESSAGES).keys() == {"first"}, "the answer to a check, by a present group")
    until(lambda: group in view(w).absent_groups, "the tick that says the group is away")
    w.half("second", PGROUP=group.encode())
    # If these checks counted, the message would be discarded by now.
    until(lambda: view(w).totals[Count.PUT_OFF] >= 4, "checks put off")
    assert view(w).transactions.select(["transaction_id", "check_times"]).to_pylist() == [{"transaction_id": "second", "check_times": 0}]
    assert {check[0] for check in w.checks()} == {"first"}
    with TransactionProducer(w.settings.kafka, group, Service()):
        until(lambda: "second" in w.by_id(Table.MESSAGES), "the answer once the group is back")
    assert w.by_id(Table.MESSAGES)["second"].check_times >= 1
    assert w.rows(Table.DISCARDED) == []


@pytest.mark.timeout(240)
def test_r15_a_member_that_passes_no_check_loses_nothing(running: Callable[..., World]) -> None:
    w = running(
        **{
            "resolution.transactionTimeOut": "500ms",
            "resolution.transactionCheckInterval": "1500ms",
            "resolution.transactionCheckMax": 4,
        }
    )
    group = w.settings.kafka.half_topic
    options = {"bootstrap.servers": w.settings.kafka.servers(), "group.id": check_group(group), "auto.offset.reset": "earliest"}
    stuck = Consumer({**options, "enable.auto.commit": False})
    stuck.subscribe([w.settings.kafka.check_topic])
    until(lambda: stuck.poll(0.1) is None and bool(stuck.assignment()), "the membership")
    w.half("a", PGROUP=group.encode())
    until(lambda: group in view(w).absent_groups, "a tick that names the group")
    # If these checks counted, the message would be discarded by now.
    until(lambda: view(w).totals[Count.PUT_OFF] >= 5, "checks put off")
    [(counted,)] = view(w).transactions.select(["check_times"]).to_pandas().to_numpy().tolist()
    assert 1 <= counted < 4
    assert w.rows(Table.DISCARDED) == []
    read = [check for check in iter(lambda: stuck.poll(5.0), None) if check.error() is None]
    assert len(read) == counted
    stuck.commit(asynchronous=False)
    until(lambda: len(w.checks()) > counted, "the next check, once the group has passed those before")
    w.op("a", b"COMMIT", PGROUP=group.encode())
    until(lambda: "a" in w.by_id(Table.MESSAGES), "the message")
    stuck.close()


@pytest.mark.timeout(240)
def test_r15_a_group_that_kafka_does_not_know_counts_as_present(running: Callable[..., World]) -> None:
    quick = {"resolution.transactionTimeOut": "500ms", "resolution.transactionCheckInterval": "500ms", "resolution.transactionCheckMax": 1}
    w = running(**quick)
    w.half("a", PGROUP=w.settings.kafka.half_topic.encode())
    until(lambda: w.by_id(Table.DISCARDED).keys() == {"a"}, "the discard")
