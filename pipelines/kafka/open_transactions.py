"""Finds open Kafka transactions: no tick behind one is read, so that they hold the horizon (R18)."""

import logging
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec
from pyspark.sql import SparkSession

from halfway.pipelines.kafka.admin import REQUEST_LIMIT_S, Admin, partition_counts, unavailable
from halfway.pipelines.kafka.java_admin import JavaAdmin
from halfway.pipelines.kafka.range_reader import READ_UNCOMMITTED, OffsetRange, ranges_consumer, read_ranges
from halfway.pipelines.kafka.rights import OPERATOR_GROUP
from halfway.schemas.errors import HalfwayError
from halfway.schemas.settings import KafkaSettings

log = logging.getLogger(__name__)

_READ_LIMIT_S = 5.0


@dataclass(frozen=True)
class OpenTransaction:
    """An open transaction in a partition. What Kafka does not tell is None."""

    topic: str
    partition: int
    offset: int
    """Where it begins: nothing from there on is read."""
    since_ms: int | None = None
    """The time of its first record."""
    producer_id: int | None = None
    transactional_id: str | None = None

    def __str__(self) -> str:
        """Return what an operator has to know."""
        of = "an unknown producer" if self.producer_id is None else f"producer {self.producer_id}"
        name = "" if self.transactional_id is None else f", transactional.id {self.transactional_id}"
        return f"{self.topic} partition {self.partition} from offset {self.offset} on ({of}{name})"


def open_transactions(
    client: Admin, kafka: KafkaSettings, topics: Collection[str], session: Callable[[], SparkSession]
) -> list[OpenTransaction]:
    """Return the first open transaction of each partition that has one.

    Args:
        client: an admin client.
        kafka: where Kafka is.
        topics: the topics to look at.
        session: returns a Spark session, whose JVM names the producers: librdkafka cannot. Only called if it is needed.

    Raises:
        AccessError: this user may not describe one of the topics.
        KafkaUnavailableError: Kafka cannot be reached or does not answer in time.
    """
    places = [TopicPartition(topic, number) for topic, count in partition_counts(client, topics).items() for number in range(count)]
    try:
        # The ends first: what is appended between the two requests must not look like a transaction.
        ends = _ends(client, places, IsolationLevel.READ_UNCOMMITTED)
        stable = _ends(client, places, IsolationLevel.READ_COMMITTED)
    except KafkaException as error:
        raise unavailable(client, error.args[0]) from None
    found = [OpenTransaction(*place, stable[place]) for place in ends if stable[place] < ends[place]]
    if not found:
        return []
    found = _with_times(kafka, found)
    try:
        with JavaAdmin(session(), kafka) as admin:
            producers = admin.open_transactions([(each.topic, each.partition) for each in found])
    except HalfwayError as error:
        log.info("event=producers_not_known cause=%r", str(error))
        return found
    named = [(each, producers.get((each.topic, each.partition))) for each in found]
    return [each if by is None else replace(each, producer_id=by.producer_id, transactional_id=by.transactional_id) for each, by in named]


def _ends(client: Admin, places: Iterable[TopicPartition], isolation_level: IsolationLevel) -> dict[tuple[str, int], int]:
    specs = {place: OffsetSpec.latest() for place in places}  # type: ignore[no-untyped-call]
    futures = client.list_offsets(specs, isolation_level=isolation_level, request_timeout=REQUEST_LIMIT_S) if specs else {}
    return {(place.topic, place.partition): client.offset(future) for place, future in futures.items()}


def _with_times(kafka: KafkaSettings, found: Iterable[OpenTransaction]) -> list[OpenTransaction]:
    timed = []
    with ranges_consumer(kafka, OPERATOR_GROUP, READ_UNCOMMITTED) as consumer:
        for each in found:
            first, record = OffsetRange(each.offset, each.offset + 1), None
            with suppress(HalfwayError):  # Who may not read the topic still sees what holds it.
                record = next(read_ranges(consumer, each.topic, {each.partition: first}, _READ_LIMIT_S), None)
            timed.append(each if record is None else replace(each, since_ms=record.timestamp()[1]))
    return timed
