"""With three brokers, requests go on when the broker dies that they went to."""

from collections.abc import Iterator
from contextlib import suppress
from typing import cast

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import NewTopic
from pyspark.sql import SparkSession

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka import range_reader
from halfway.pipelines.kafka.admin import Admin, admin_client, partition_counts
from halfway.pipelines.kafka.java_admin import TopicPlace
from halfway.pipelines.kafka.open_transactions import open_transactions
from halfway.pipelines.kafka.range_reader import PartitionReader, ranges_consumer, retained
from halfway.pipelines.kafka.writer import RecordWriter
from halfway.pipelines.relay.position_reader import read_positions
from halfway.pipelines.relay.positions import RelayPositions, TablePosition, changes
from halfway.pipelines.relay.relay_producer import RelayProducer
from halfway.pipelines.resolve.check_lag import CheckLag
from halfway.schemas.errors import KafkaUnavailableError, SetupError
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


def led_apart_from_controller(cluster: KafkaCluster, client: Admin) -> int:
    """Return a partition whose leader is not the controller: that would hold up other requests, too."""
    controller = client.list_topics(timeout=10).controller_id
    return next(partition for partition in range(3) if cluster.leader(TOPIC, partition).number != controller)


@pytest.mark.parametrize("ending", ["kill", "freeze"])
def test_what_a_partition_retains_is_told_when_its_leader_has_just_ended(cluster: KafkaCluster, ending: str) -> None:
    client = admin_client(settings(cluster))
    partition = led_apart_from_controller(cluster, client)
    leader = cluster.leader(TOPIC, partition)
    with ranges_consumer(settings(cluster)) as consumer:
        getattr(leader, ending)()
        try:
            assert retained(consumer, client, TOPIC).keys() == {0, 1, 2}
        finally:
            if ending == "freeze":
                leader.thaw()


def test_r18_an_open_transaction_is_not_overlooked_while_its_leader_is_frozen(cluster: KafkaCluster) -> None:
    client, kafka = admin_client(settings(cluster)), settings(cluster)
    partition = led_apart_from_controller(cluster, client)
    leader = cluster.leader(TOPIC, partition)
    writer = Producer({"bootstrap.servers": kafka.servers(), "transactional.id": "holder", "transaction.timeout.ms": 300_000})
    writer.init_transactions(60)
    writer.begin_transaction()
    writer.produce(TOPIC, b"", partition=partition)
    assert writer.flush(60) == 0

    def no_spark() -> SparkSession:
        raise SetupError("no Java")

    leader.freeze()
    try:
        with suppress(KafkaUnavailableError):
            assert [each.partition for each in open_transactions(client, kafka, [TOPIC], no_spark)] == [partition]
    finally:
        leader.thaw()
    writer.abort_transaction(60)


def test_a_relay_takes_no_old_bookmark_from_a_leader_that_was_cut_off(cluster: KafkaCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not know that another one leads, and a reader may ask it."""
    overrides = {"kafka.bootstrap_servers": cluster.bootstrap_servers, "kafka.relay_topic": "relay", "relay.name": "one"}
    own = load_settings(environ={}, overrides=overrides)
    client = patient_admin(own.kafka)
    client.create_topics([NewTopic("relay", num_partitions=1, config={"cleanup.policy": "compact"})])["relay"].result()
    bookmarks = [RelayPositions("table", TablePosition(1, batch_id, 0)) for batch_id in (7, 8)]

    def write(before: RelayPositions | None, after: RelayPositions) -> int:
        producer = RelayProducer(own)
        producer.write([], (), "relay", changes("one", before, after, ()))
        return producer.mark_end("relay")

    def read_past(end: int) -> RelayPositions:
        return read_positions(client, own.kafka, mark_end=lambda _: end, wait_s=10)["one"]

    def is_told(end: int, expected: RelayPositions) -> bool:
        with suppress(KafkaUnavailableError):
            return read_past(end) == expected
        return False

    former = write(None, bookmarks[0])
    until(lambda: is_told(former, bookmarks[0]), "the end of the transaction, which Kafka writes after its answer")
    cut_off = cluster.leader("relay", 0)
    others = [node for node in cluster.nodes if node is not cut_off]
    cut_off.freeze()
    until(lambda: not cluster.leads(cut_off, "relay", 0), "another leader")
    end = write(*bookmarks)
    # It is chance which of the brokers is asked for the topic that the one which was cut off takes for running.
    monkeypatch.setattr(range_reader, "partition_counts", lambda *_: {"relay": 1})
    for node in others:
        node.freeze()
    cut_off.thaw()
    try:
        until(lambda: is_told(former, bookmarks[0]), "the old one, from the leader that was cut off")
        with pytest.raises(KafkaUnavailableError, match="a broker that was cut off answers"):
            read_past(end)
    finally:
        for node in others:
            node.thaw()
    until(lambda: is_told(end, bookmarks[1]), "the last one")


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
