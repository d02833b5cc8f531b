"""The tick publisher writes ticks to every partition, also to those that are added later."""

import time
from contextlib import suppress

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import NewPartitions

from halfway.pipelines.kafka.admin import admin_client
from halfway.pipelines.resolve import ticks as ticks_module
from halfway.pipelines.resolve.sent_checks import SentChecks
from halfway.pipelines.resolve.ticks import TickPublisher
from halfway.schemas.errors import KafkaUnavailableError
from tests.support.client_world import read
from tests.support.kafka_topics import MakeTopics, patient_admin
from tests.support.partition_records import headers_of
from tests.support.waiting import until


def test_an_added_partition_gets_ticks(topics: MakeTopics) -> None:
    settings = topics(partitions=1, overrides={"resolution.tick_interval": "100ms"})
    ticks = TickPublisher(settings, admin_client(settings.kafka), SentChecks(1_000))
    assert ticks.known_s() is None, "nobody has told who is absent: no check counts"
    assert ticks.publish() is None
    topic = settings.kafka.op_topic
    ticks.start()
    try:
        client = patient_admin(settings.kafka)
        [added] = client.create_partitions([NewPartitions(topic, 3)]).values()
        added.result(30)

        def heard() -> set[tuple[int | None, bytes]]:
            # The new partitions have no leader at first.
            with suppress(KafkaException):
                return {(message.partition(), headers_of(message)["PARTITIONS"]) for message in read(settings.kafka, topic)}
            return set()

        until(lambda: {(0, b"3"), (1, b"3"), (2, b"3")} <= heard(), "ticks in all partitions, with their number")
    finally:
        ticks.stop()


def test_a_failure_that_nobody_foresaw_ends_no_ticks(topics: MakeTopics, caplog: pytest.LogCaptureFixture) -> None:
    settings = topics(partitions=1, overrides={"resolution.tick_interval": "50ms"})
    ticks = TickPublisher(settings, admin_client(settings.kafka), SentChecks(1_000))
    calls = 0

    def fail_twice() -> tuple[str, ...]:
        nonlocal calls
        calls += 1
        if calls <= 2:
            raise RuntimeError("a defect")
        return ()

    caplog.set_level("INFO")
    ticks.absent_groups = fail_twice
    ticks.start()
    try:
        until(lambda: any("event=ticks_resumed" in record.message for record in caplog.records), "ticks", limit_s=30)
    finally:
        ticks.stop()
    assert [record.message for record in caplog.records if "event=tick" in record.message] == [
        "event=tick_failed",
        "event=tick_not_published effect=time_stands_still cause='RuntimeError: a defect'",
        "event=ticks_resumed",
    ]


def test_a_first_tick_that_fails_is_an_error(topics: MakeTopics, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = topics(partitions=1)
    monkeypatch.setattr(ticks_module, "_FIRST_LIMIT_S", 0.5)
    ticks = TickPublisher(settings, admin_client(settings.kafka), SentChecks(1_000))

    def unknown() -> tuple[str, ...]:
        raise KafkaUnavailableError("the groups are not known")

    ticks.absent_groups = unknown
    with pytest.raises(KafkaUnavailableError, match=r"^no tick could be published, .*: the groups are not known$"):
        ticks.publish_first()
    ticks.absent_groups = tuple
    ticks.publish_first()
    assert abs(ticks.now_ms() - time.time() * 1000) < 2_000


def test_the_time_is_that_of_kafkas_records(topics: MakeTopics, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = topics(partitions=1, timestamps="LogAppendTime")
    ticks = TickPublisher(settings, admin_client(settings.kafka), SentChecks(1_000))
    real_ns = time.time_ns
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: real_ns() - 100_000_000_000)
        assert ticks.publish() is None
        assert abs(ticks.now_ms() - real_ns() // 1_000_000) < 2_000
