"""The read-back of bodies by pointer, with a reader that outlives its metadata of a topic."""

from contextlib import closing
from time import monotonic

import pytest
from confluent_kafka import Message, Producer
from confluent_kafka.admin import NewPartitions

from halfway.pipelines.kafka.admin import admin_client, partition_counts
from halfway.pipelines.kafka.range_reader import DENSE_GAP
from halfway.pipelines.resolve.read_back import Pointer, RecordFetcher
from halfway.schemas.headers import Source
from halfway.schemas.settings import Settings
from tests.support.kafka_topics import MakeTopics
from tests.support.waiting import until


def send(settings: Settings, partition: int, value: bytes) -> Pointer:
    """Send a half, and return its pointer."""
    sent: list[Message] = []
    producer = Producer(settings.kafka.as_librdkafka_dict())
    producer.produce(settings.kafka.half_topic, value, b"id", partition, on_delivery=lambda _, message: sent.append(message))
    assert producer.flush(20) == 0
    [message] = sent
    assert message.error() is None
    return int(Source.HALF), partition, message.offset() or 0, message.timestamp()[1], "id"


def fetcher_of(settings: Settings) -> RecordFetcher:
    kafka = settings.kafka
    return RecordFetcher(kafka.as_librdkafka_dict(), {Source.HALF: kafka.half_topic, Source.OP: kafka.op_topic})


@pytest.mark.timeout(60)
def test_an_added_partition_is_read_at_once(topics: MakeTopics) -> None:
    settings = topics(partitions=1)
    half_topic, admins = settings.kafka.half_topic, admin_client(settings.kafka)
    with closing(fetcher_of(settings)) as fetcher:
        [before] = fetcher.records([send(settings, 0, b"before")])
        for made in admins.create_partitions([NewPartitions(half_topic, 2)]).values():
            made.result(20)
        until(lambda: partition_counts(admins, [half_topic]) == {half_topic: 2}, "the new partition", 20)
        [after] = fetcher.records([send(settings, 1, b"after")])
    assert [record.value for record in (before, after) if record is not None] == [b"before", b"after"]


@pytest.mark.timeout(60)
def test_records_that_lie_far_apart_are_read_by_seeking(topics: MakeTopics) -> None:
    settings = topics(partitions=1)
    kafka = settings.kafka
    sent: list[Message] = []
    producer = Producer(kafka.as_librdkafka_dict() | {"linger.ms": 20, "queue.buffering.max.messages": 1_000_000})
    apart = DENSE_GAP * 3 // 2
    for _ in range(30 * apart):
        producer.produce(kafka.half_topic, bytes(1024), b"id", 0, on_delivery=lambda _, message: sent.append(message))
    assert producer.flush(30) == 0
    pointers = [(int(Source.HALF), 0, message.offset() or 0, message.timestamp()[1], "id") for message in sent[::apart]]
    began_s = monotonic()
    with closing(fetcher_of(settings)) as fetcher:
        assert [record is not None for record in fetcher.records(pointers)] == [True] * 30
    # It takes 0.2 s here. A full queue that is polled once a second, or a wait for more records than wanted, takes 7 s.
    assert monotonic() - began_s < 5
