"""Reads the records of a partition with a plain consumer, independently of the product's readers."""

from collections.abc import Iterator
from contextlib import suppress
from typing import cast

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaException, Message, TopicPartition

from tests.support.waiting import LIMIT_S, until

_REQUEST_S = 10.0


def retained_of(consumer: Consumer, topic: str, partition: int) -> tuple[int, int]:
    """Return the first offset that a partition holds, and the one after its last. Waits for a leader.

    `get_watermark_offsets` asks for both at once, and may mix up what a new leader answers.
    """
    begin = _offset_at(consumer, TopicPartition(topic, partition, OFFSET_BEGINNING))
    return begin, end_of(consumer, topic, partition)


def end_of(consumer: Consumer, topic: str, partition: int) -> int:
    """Return the offset after the last record of a partition. Waits for a leader."""
    return _offset_at(consumer, TopicPartition(topic, partition, OFFSET_END))


def _offset_at(consumer: Consumer, place: TopicPartition) -> int:
    told: list[TopicPartition] = []

    def is_told() -> bool:
        with suppress(KafkaException):
            told[:] = consumer.offsets_for_times([place], timeout=_REQUEST_S)
            if told[0].error is None:
                return True
        with suppress(KafkaException):  # It trusts its metadata for 5 minutes.
            consumer.list_topics(place.topic, timeout=_REQUEST_S)
        return False

    until(is_told, f"Kafka tells the offsets of {place.topic}")
    return told[0].offset


def records_of(consumer: Consumer, topic: str, partition: int, since: int = 0) -> Iterator[Message]:
    """Yield the records that a partition holds now, from the offset `since` on."""
    low, high = retained_of(consumer, topic, partition)
    position = max(low, since)
    if position < high:
        consumer.assign([TopicPartition(topic, partition, position)])
    while position < high:
        messages = consumer.consume(min(10_000, high - position), timeout=LIMIT_S)
        assert messages, f"{topic} does not answer"
        for message in messages:
            assert message.error() is None, message.error()
            position = (message.offset() or 0) + 1
            yield message


def topic_records(servers: str, topic: str) -> list[Message]:
    """Return the records that a topic holds now, by partition and offset."""
    options = {"bootstrap.servers": servers, "group.id": "reader", "enable.auto.commit": False, "receive.message.max.bytes": 2**31 - 1}
    with Consumer(options) as consumer:
        partitions = consumer.list_topics(topic, timeout=LIMIT_S).topics[topic].partitions
        return [message for partition in partitions for message in records_of(consumer, topic, partition)]


def headers_of(message: Message) -> dict[str, bytes]:
    """Return a record's headers, without those that are null; of two with one name, the last."""
    pairs = cast("list[tuple[str, bytes | None]]", message.headers() or [])
    return {name: value for name, value in pairs if value is not None}
