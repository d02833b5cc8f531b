"""Where a partition begins and ends, told by a leader that has just changed."""

from collections.abc import Iterator

import pytest
from confluent_kafka.admin import NewTopic

from halfway.pipelines.kafka.range_reader import PartitionReader, ranges_consumer, retained
from halfway.pipelines.kafka.writer import RecordWriter
from tests.support.kafka_topics import patient_admin, unique_kafka_settings
from tests.support.moved_leader import MovedLeaderBroker

TIMES = 20
"""librdkafka mixed the two answers up if both came before its caller woke: in about every second case."""


@pytest.fixture
def moved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MovedLeaderBroker]:
    with MovedLeaderBroker(tmp_path_factory.mktemp("moved")) as broker:
        yield broker


def test_a_partition_is_not_taken_for_emptied_when_its_new_leader_refuses_to_tell_its_beginning(moved: MovedLeaderBroker) -> None:
    """Its halves would be lost ones to a read-back, and the bookmark of a relay would be gone."""
    kafka = unique_kafka_settings(moved)
    client, writer = patient_admin(kafka), RecordWriter(kafka)
    client.create_topics([NewTopic(kafka.half_topic, num_partitions=1)])[kafka.half_topic].result()
    for number in range(3):
        writer.put(kafka.half_topic, b"t1", str(number).encode(), [], partition=0)
    writer.flush()
    with ranges_consumer(kafka) as consumer:
        for _ in range(TIMES):
            moved.refuse_begin()
            assert retained(consumer, client, kafka.half_topic) == {0: (0, 3)}
            assert moved.has_refused()
            moved.refuse_begin()
            with PartitionReader(consumer, kafka.half_topic, 0) as reader:
                assert [record and record.value() for record in reader.records([0, 2])] == [b"0", b"2"]
            assert moved.has_refused()
