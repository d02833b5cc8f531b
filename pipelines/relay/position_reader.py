"""Reads where the relays are, from their own topic."""

import time
from collections.abc import Iterator

from confluent_kafka import Consumer

from halfway.pipelines.kafka.admin import Admin
from halfway.pipelines.kafka.range_reader import READ_UNCOMMITTED, ranges_consumer, read_ranges, retained
from halfway.pipelines.kafka.rights import OPERATOR_GROUP
from halfway.pipelines.relay.positions import RelayPositions, positions_of
from halfway.schemas.errors import KafkaUnavailableError, TopicError
from halfway.schemas.settings import KafkaSettings

_POLL_S = 0.05


def missing_relay_topic(topic: str) -> TopicError:
    """Return the error for the relay's own topic that does not exist."""
    return TopicError(f"no topic {topic}: `halfway topics create --relay` makes it")


def read_positions(client: Admin, kafka: KafkaSettings, group: str = OPERATOR_GROUP, wait_s: float = 0.0) -> dict[str, RelayPositions]:
    """Return where each relay is, by its name.

    Args:
        client: an admin client.
        kafka: where Kafka is.
        group: see `ranges_consumer`.
        wait_s: how long to wait for transactions that are open, so that everything before them is seen: a relay that
            becomes active must see what the former one committed, also behind an open transaction of another relay.

    Raises:
        TopicError: the relay's own topic is missing.
        RelayError: it holds something else.
        KafkaUnavailableError: Kafka cannot be reached, or a transaction is open for too long.
    """
    topic = kafka.relay_topic
    try:
        with ranges_consumer(kafka, group) as consumer:
            if wait_s:
                with ranges_consumer(kafka, group, READ_UNCOMMITTED) as whole:
                    ends = {partition: kept.end for partition, kept in retained(whole, client, topic).items()}
                _wait_for(consumer, client, topic, ends, time.monotonic() + wait_s)
            return positions_of(_records(consumer, topic, client))
    except TopicError:
        raise missing_relay_topic(topic) from None


def _wait_for(consumer: Consumer, client: Admin, topic: str, ends: dict[int, int], deadline_s: float) -> None:
    while any(kept.end < ends[partition] for partition, kept in retained(consumer, client, topic).items()):
        if time.monotonic() >= deadline_s:
            raise KafkaUnavailableError(
                f"a transaction in {topic} stays open, so that the bookmark cannot be read: end its producer, or abort it with "
                "kafka-transactions.sh"
            )
        time.sleep(_POLL_S)


def _records(consumer: Consumer, topic: str, client: Admin) -> Iterator[tuple[bytes | None, bytes | None]]:
    ranges = retained(consumer, client, topic)
    for record in read_ranges(consumer, topic, ranges):
        yield record.key(), record.value()
