"""The tick publisher writes ticks to every partition, also to those that are added later."""

from contextlib import suppress

from confluent_kafka import KafkaException
from confluent_kafka.admin import NewPartitions

from halfway.pipelines.kafka.admin import admin_client
from halfway.pipelines.resolve.ticks import TickPublisher
from tests.support.client_world import read
from tests.support.kafka_topics import MakeTopics
from tests.support.partition_records import headers_of
from tests.support.waiting import until


def test_an_added_partition_gets_ticks(topics: MakeTopics) -> None:
    settings = topics(partitions=1, overrides={"resolution.tick_interval": "100ms"})
    ticks = TickPublisher(settings, admin_client(settings.kafka))
    assert ticks.publish()
    topic = settings.kafka.op_topic
    ticks.start()
    try:
        client = admin_client(settings.kafka)
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
