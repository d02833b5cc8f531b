"""R15: checks of a group without any instance are put off and not counted, until an instance is back."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient

from halfway import CheckRequest, HalfMessage, LocalTransactionState, TransactionProducer
from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.admin import admin_client
from halfway.pipelines.local.broker import LocalBroker
from halfway.pipelines.resolve.groups import ASK_EVERY_S, GRACE_S, GroupWatch, _Away
from halfway.pipelines.resolve.job import ResolveJob
from halfway.pipelines.storage.state_reader import read_state
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


def test_a_group_is_away_when_its_last_member_has_left_and_only_then(topics: MakeTopics) -> None:
    settings = topics()
    group = settings.kafka.half_topic
    watch = GroupWatch(settings.kafka)
    assert group not in watch.absent(), "an unknown group counts as present"
    with member(settings, group):
        assert group not in GroupWatch(settings.kafka).absent()
    assert group in GroupWatch(settings.kafka).absent(), "a new watch waits for its first answer"
    until(lambda: group in watch.absent(), "a later answer")
    with member(settings, group):
        until(lambda: group not in watch.absent(), "the group's return")
    watch.close()


def test_a_group_that_kafka_has_deleted_stays_away_for_a_minute(topics: MakeTopics) -> None:
    settings = topics()
    group = settings.kafka.half_topic
    with member(settings, group):
        pass
    now_s = 0.0
    watch = GroupWatch(settings.kafka, clock=lambda: now_s)
    assert group in watch.absent()
    client = admin_client(settings.kafka)
    for deleted in client.delete_consumer_groups([check_group(group)]).values():
        deleted.result()
    fresh = GroupWatch(settings.kafka)
    assert group not in fresh.absent(), "Kafka has deleted the group"
    for _ in range(int(GRACE_S)):
        now_s += ASK_EVERY_S
        assert group in watch.absent()
        watch.close()
    now_s += ASK_EVERY_S
    until(lambda: group not in watch.absent(), "the end of the grace")
    assert now_s == GRACE_S + ASK_EVERY_S


def test_a_slow_kafka_delays_no_tick_and_the_last_answer_stands(broker: LocalBroker, caplog: pytest.LogCaptureFixture) -> None:
    settings = load_settings(environ={}, overrides=unique_topics(broker))
    now_s = 0.0
    watch = GroupWatch(settings.kafka, clock=lambda: now_s)
    watch.absent()
    watch._away = {"gone": _Away(0.0, 0.0)}
    watch._client = AdminClient({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})  # type: ignore[assignment]
    caplog.set_level(logging.WARNING)
    longest_s = 0.0

    def has_failed() -> bool:
        nonlocal now_s, longest_s
        now_s += ASK_EVERY_S
        started_s = time.monotonic()
        assert watch.absent() == ["gone"]
        longest_s = max(longest_s, time.monotonic() - started_s)
        return any("event=absent_groups_not_known" in record.message for record in caplog.records)

    until(has_failed, "the failure of a question", limit_s=30)
    assert longest_s < 0.2
    watch.close()


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
    return view_pending(read_state(w.spark, w.settings.storage).rows)


@pytest.mark.timeout(240)
@pytest.mark.slow
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
def test_r15_a_group_that_kafka_does_not_know_counts_as_present(running: Callable[..., World]) -> None:
    quick = {"resolution.transactionTimeOut": "500ms", "resolution.transactionCheckInterval": "500ms", "resolution.transactionCheckMax": 1}
    w = running(**quick)
    w.half("a", PGROUP=w.settings.kafka.half_topic.encode())
    until(lambda: w.by_id(Table.DISCARDED).keys() == {"a"}, "the discard")
