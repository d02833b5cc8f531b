"""With three brokers, requests go on when the broker dies that they went to."""

from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import NewTopic

from halfway.pipelines.kafka.admin import admin_client, partition_counts
from halfway.pipelines.kafka.range_reader import PartitionReader, operator_consumer, retained
from halfway.pipelines.kafka.writer import RecordWriter
from halfway.schemas.settings import KafkaSettings
from tests.support.kafka_cluster import KafkaCluster

TOPIC = "half"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    started = KafkaCluster(tmp_path_factory.mktemp("cluster"), size=3)
    try:
        started.start()
        client = admin_client(settings(started))
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


def test_a_record_is_read_back_when_its_leader_dies(cluster: KafkaCluster) -> None:
    write(RecordWriter(settings(cluster)), b"0", b"1", b"2")
    with operator_consumer(settings(cluster)) as consumer:
        first, end = retained(consumer, admin_client(settings(cluster)), TOPIC)[0]
        assert read(consumer, first) == b"0"
        cluster.leader(TOPIC, 0).kill()
        assert read(consumer, end - 1) == b"2"


def test_records_are_written_and_read_back_when_their_leader_is_frozen(cluster: KafkaCluster) -> None:
    writer = RecordWriter(settings(cluster))
    write(writer, b"before")
    with operator_consumer(settings(cluster)) as consumer:
        offset = retained(consumer, admin_client(settings(cluster)), TOPIC)[0].end - 1
        assert read(consumer, offset) == b"before"
        leader = cluster.leader(TOPIC, 0)
        leader.freeze()
        try:
            write(writer, b"after")
            assert [read(consumer, offset), read(consumer, offset + 1)] == [b"before", b"after"]
        finally:
            leader.thaw()


def write(writer: RecordWriter, *bodies: bytes) -> None:
    for body in bodies:
        writer.put(TOPIC, b"id", body, [], partition=0)
    writer.flush()


def read(consumer: Consumer, offset: int) -> bytes | None:
    """Return the body at an offset, asked for by a reader of its own, as each batch does."""
    with PartitionReader(consumer, TOPIC, 0) as reader:
        [record] = reader.records([offset])
        return None if record is None else record.value()
