"""Reads where the relays are, from their own topic."""

import time
from collections.abc import Callable

from confluent_kafka import Consumer

from halfway.pipelines.kafka.admin import Admin
from halfway.pipelines.kafka.range_reader import OffsetRange, ranges_consumer, read_ranges, retained
from halfway.pipelines.kafka.rights import OPERATOR_GROUP
from halfway.pipelines.kafka.topic_setup import verify_one_partition
from halfway.pipelines.relay.positions import RelayPositions, positions_of
from halfway.schemas.errors import KafkaUnavailableError, TopicError
from halfway.schemas.settings import KafkaSettings

_POLL_S = 0.05


def missing_relay_topic(topic: str) -> TopicError:
    """Return the error for the relay's own topic that does not exist."""
    return TopicError(f"no topic {topic}: `halfway topics create --relay` makes it")


def read_positions(
    client: Admin, kafka: KafkaSettings, group: str = OPERATOR_GROUP, mark_end: Callable[[str], int] | None = None, wait_s: float = 0.0
) -> dict[str, RelayPositions]:
    """Return where each relay is, by its name.

    Args:
        client: an admin client.
        kafka: where Kafka is.
        group: see `ranges_consumer`.
        mark_end: returns the offset up to which all is to be read: a relay that becomes active must see what the former
            one committed, also behind an open transaction of another relay, and whichever broker answers.
        wait_s: how long to wait for that.

    Raises:
        TopicError: the relay's own topic is missing, or has several partitions.
        AccessError: this user may not describe it.
        RelayError: it holds something else.
        KafkaUnavailableError: Kafka cannot be reached, or the topic cannot be read up to there within `wait_s`.
    """
    topic = kafka.relay_topic
    with ranges_consumer(kafka, group) as consumer:
        ranges = _retained(consumer, client, topic)  # First: a producer waits for a topic that is missing.
        if mark_end is not None:
            verify_one_partition(topic, len(ranges))
            ranges = _past(mark_end(topic), consumer, client, topic, time.monotonic() + wait_s)
        return positions_of((record.key(), record.value()) for record in read_ranges(consumer, topic, ranges))


def _retained(consumer: Consumer, client: Admin, topic: str) -> dict[int, OffsetRange]:
    try:
        return retained(consumer, client, topic)
    except TopicError:
        raise missing_relay_topic(topic) from None


def _past(end: int, consumer: Consumer, client: Admin, topic: str, deadline_s: float) -> dict[int, OffsetRange]:
    """Wait until the topic's only partition can be read up to `end`, and return the offsets that it retains."""
    while True:
        ranges = _retained(consumer, client, topic)
        if ranges[0].end >= end:
            return ranges
        if time.monotonic() >= deadline_s:
            raise KafkaUnavailableError(
                f"the bookmark cannot be read: a transaction in {topic} stays open (end its producer, or abort it with "
                "kafka-transactions.sh), or a broker that was cut off answers for it"
            )
        time.sleep(_POLL_S)
