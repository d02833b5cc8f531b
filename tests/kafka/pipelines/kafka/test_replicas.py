"""With three brokers, requests go on when the broker dies that they went to."""

from collections.abc import Iterator
from contextlib import suppress
from typing import cast

import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import NewTopic
from pyspark.sql import SparkSession

from halfway.pipelines.kafka.admin import admin_client, partition_counts
from halfway.pipelines.kafka.java_admin import TopicPlace
from halfway.pipelines.kafka.range_reader import PartitionReader, ranges_consumer, retained
from halfway.pipelines.kafka.writer import RecordWriter
from halfway.pipelines.resolve.check_lag import CheckLag
from halfway.schemas.errors import KafkaUnavailableError
from halfway.schemas.settings import KafkaSettings
from tests.support.kafka_cluster import KafkaCluster
from tests.support.kafka_topics import patient_admin
from tests.support.waiting import until

TOPIC = "half"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    started = KafkaCluster(tmp_path_factory.mktemp("cluster"), size=3)
    try:
        started.start()
        client = patient_admin(settings(started))
        client.create_topics([NewTopic(TOPIC, num_partitions=3)])[TOPIC].result()
        yield started
    finally:
        started.kill()


@pytest.fixture(autouse=True)
def _all_run(cluster: KafkaCluster) -> None:
    cluster.start()
    cluster.wait_until_in_sync()


def settings(cluster: KafkaCluster) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)


def test_the_topics_are_described_when_the_controller_that_the_client_knew_is_dead(cluster: KafkaCluster) -> None:
    client = admin_client(settings(cluster))
    assert partition_counts(client, [TOPIC]) == {TOPIC: 3}
    cluster.nodes[client.list_topics(timeout=10).controller_id - 1].kill()
    assert partition_counts(client, [TOPIC]) == {TOPIC: 3}


def test_the_topics_are_described_when_the_controller_that_the_client_knew_is_frozen(cluster: KafkaCluster) -> None:
    client = admin_client(settings(cluster))
    for _ in range(3):  # it is chance which broker the client prefers
        controller = cluster.nodes[client.list_topics(timeout=10).controller_id - 1]
        controller.freeze()
        try:
            assert partition_counts(client, [TOPIC]) == {TOPIC: 3}
        finally:
            controller.thaw()
        cluster.wait_until_in_sync()


def test_a_record_is_read_back_when_its_leader_dies(cluster: KafkaCluster) -> None:
    write(RecordWriter(settings(cluster)), b"0", b"1", b"2")
    with ranges_consumer(settings(cluster)) as consumer:
        first, end = retained(consumer, admin_client(settings(cluster)), TOPIC)[0]
        assert read(consumer, first) == b"0"
        cluster.leader(TOPIC, 0).kill()
        assert read(consumer, end - 1) == b"2"


def test_records_are_written_and_read_back_when_their_leader_is_frozen(cluster: KafkaCluster) -> None:
    writer = RecordWriter(settings(cluster))
    write(writer, b"before")
    with ranges_consumer(settings(cluster)) as consumer:
        offset = retained(consumer, admin_client(settings(cluster)), TOPIC)[0].end - 1
        assert read(consumer, offset) == b"before"
        leader = cluster.leader(TOPIC, 0)
        leader.freeze()
        try:
            write(writer, b"after")
            assert [read(consumer, offset), read(consumer, offset + 1)] == [b"before", b"after"]
        finally:
            leader.thaw()


def test_r15_groups_that_share_a_check_topic_are_behind_while_a_partition_of_it_has_no_leader(
    cluster: KafkaCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka = settings(cluster).model_copy(update={"check_topic": "check"})
    client, no_spark = patient_admin(kafka), cast(SparkSession, None)
    client.create_topics([NewTopic("check", num_partitions=3, replication_factor=1)])["check"].result()
    lag = CheckLag(no_spark, kafka, client)
    monkeypatch.setattr(lag, "_committed", lambda groups, _: {group: {} for group in groups})

    def waits_at() -> list[TopicPlace] | None:
        with suppress(KafkaUnavailableError):  # it was the controller that died
            return [place for place, _ in lag.behind({"g"}, 1, 0.0, -1.0).values()]
        return None

    until(lambda: waits_at() == [], "all leaders, and no request")
    leader = cluster.leader("check", 0)
    leader.freeze()
    try:
        # On busy cores a process that is stopped may give one answer more.
        until(lambda: lag.behind({"g"}, 1, 0.0, -1.0).keys() == {"g"}, "its leader does not answer")
    finally:
        leader.kill()
    try:
        until(lambda: waits_at() == [("check", 0)], "its leader is known to be gone")
        cluster.start()
        until(lambda: waits_at() == [], "all leaders again")
    finally:
        client.delete_topics(["check"])["check"].result()


def write(writer: RecordWriter, *bodies: bytes) -> None:
    for body in bodies:
        writer.put(TOPIC, b"id", body, [], partition=0)
    writer.flush()


def read(consumer: Consumer, offset: int) -> bytes | None:
    """Return the body at an offset, asked for by a reader of its own, as each batch does."""
    with PartitionReader(consumer, TOPIC, 0) as reader:
        [record] = reader.records([offset])
        return None if record is None else record.value()
