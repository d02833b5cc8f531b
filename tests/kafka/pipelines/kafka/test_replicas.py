"""With three brokers, requests go on when the broker dies that they went to."""

from collections.abc import Iterator

import pytest
from confluent_kafka.admin import NewTopic

from halfway.pipelines.kafka.admin import admin_client, partition_counts
from halfway.pipelines.kafka.range_reader import PartitionReader, operator_consumer
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
    writer = RecordWriter(settings(cluster))
    for number in range(10):
        writer.put(TOPIC, b"id", b"%d" % number, [], partition=0)
    writer.flush()
    with operator_consumer(settings(cluster)) as consumer:
        with PartitionReader(consumer, TOPIC, 0) as reader:
            assert [record is not None and record.value() for record in reader.records([2])] == [b"2"]
        cluster.leader(TOPIC, 0).kill()
        with PartitionReader(consumer, TOPIC, 0) as reader:
            assert [record is not None and record.value() for record in reader.records([2, 9])] == [b"2", b"9"]
