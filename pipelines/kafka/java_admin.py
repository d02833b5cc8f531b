"""Asks Kafka's own admin client, in Spark's JVM, for what librdkafka cannot tell."""

import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, cast

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.sql import SparkSession

from halfway.pipelines.kafka.admin import REQUEST_LIMIT_S
from halfway.pipelines.kafka.spark_options import spark_options
from halfway.schemas.errors import KafkaUnavailableError
from halfway.schemas.settings import KafkaSettings

TopicPlace = tuple[str, int]
"""Topic and partition."""


@dataclass(frozen=True)
class ProducerOfTransaction:
    """The producer of an open transaction; without its `transactional_id` if this user may not Describe that."""

    producer_id: int
    transactional_id: str | None


class JavaAdmin:
    """An admin client in the JVM."""

    def __init__(self, spark: SparkSession, kafka: KafkaSettings) -> None:
        """Make a client. Connects in the background.

        Raises:
            KafkaUnavailableError: Kafka's classes are not in this JVM, or refuse the settings.
        """
        self._jvm = cast(Any, spark._jvm)
        self._gateway = cast(Any, spark.sparkContext._gateway)
        with _errors():
            # Databricks ships Kafka's classes in a package of its own.
            root = self._jvm.kafkashaded if "DATABRICKS_RUNTIME_VERSION" in os.environ else self._jvm
            self._classes = root.org.apache.kafka
            properties = self._jvm.java.util.Properties()
            own = {
                "client.id": "halfway-admin",
                "default.api.timeout.ms": str(int(REQUEST_LIMIT_S * 1000)),
                "request.timeout.ms": str(int(REQUEST_LIMIT_S * 500)),
                # While Kafka is down, each attempt makes a line in Spark's log.
                "reconnect.backoff.ms": "1000",
                "reconnect.backoff.max.ms": "5000",
            }
            for name, value in {**spark_options(kafka), **own}.items():
                properties.setProperty(name.removeprefix("kafka."), value)
            self._admin = self._classes.clients.admin.Admin.create(properties)

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the client."""
        self.close()

    def close(self) -> None:
        """Disconnect."""
        with _errors():
            self._admin.close()

    def committed(self, groups: Mapping[str, Collection[TopicPlace]]) -> dict[str, dict[TopicPlace, int] | KafkaUnavailableError]:
        """Return the offsets that consumer groups have committed. One request asks a broker for all of its groups.

        librdkafka's own request crashes the process when a group's coordinator moves (librdkafka #5040).

        Args:
            groups: id of a consumer group → the partitions to ask for. Those without a commit are left out.

        Returns:
            Group → place → offset; for a group that Kafka gives no answer for, why.

        Raises:
            KafkaUnavailableError: the client does not work.
        """
        found: dict[str, dict[TopicPlace, int] | KafkaUnavailableError] = {}
        with _errors():
            asked = {place: self._place(place) for places in groups.values() for place in places}
            specs = self._jvm.java.util.HashMap()
            for group, places in groups.items():
                wanted = self._jvm.java.util.ArrayList()
                for place in places:
                    wanted.add(asked[place])
                specs.put(group, self._classes.clients.admin.ListConsumerGroupOffsetsSpec().topicPartitions(wanted))
            answers = self._admin.listConsumerGroupOffsets(specs)
        ends_s = time.monotonic() + REQUEST_LIMIT_S + 1
        for group, places in groups.items():
            try:
                with _errors():
                    committed = self._answer(answers.partitionsToOffsetAndMetadata(group), ends_s)
                    offsets = {place: committed.get(asked[place]) for place in places}
                    found[group] = {place: offset.offset() for place, offset in offsets.items() if offset is not None}
            except KafkaUnavailableError as error:
                found[group] = error
        return found

    def open_transactions(self, places: Collection[TopicPlace]) -> dict[TopicPlace, ProducerOfTransaction]:
        """Return the producer of the first open transaction of each partition that has one.

        Raises:
            KafkaUnavailableError: Kafka does not answer, or this user may not Read one of the topics.
        """
        with _errors():
            asked = self._jvm.java.util.ArrayList()
            for place in places:
                asked.add(self._place(place))
            described = self._answer(self._admin.describeProducers(asked).all())
            ids: dict[TopicPlace, int] = {}
            for place in places:
                begun: Mapping[int, int] = {
                    producer.currentTransactionStartOffset().getAsLong(): producer.producerId()
                    for producer in described.get(self._place(place)).activeProducers()
                    if producer.currentTransactionStartOffset().isPresent()
                }
                if begun:
                    ids[place] = begun[min(begun)]
            options = self._classes.clients.admin.ListTransactionsOptions().filterProducerIds(self._longs(ids.values()))
            names = {each.producerId(): each.transactionalId() for each in self._answer(self._admin.listTransactions(options).all())}
        return {place: ProducerOfTransaction(producer_id, names.get(producer_id)) for place, producer_id in ids.items()}

    def _answer(self, future: Any, ends_s: float | None = None) -> Any:
        # An error in the client's own thread would leave the future open for ever.
        left_s = REQUEST_LIMIT_S + 1 if ends_s is None else max(0.0, ends_s - time.monotonic())
        return future.get(int(left_s * 1000), self._jvm.java.util.concurrent.TimeUnit.MILLISECONDS)

    def _longs(self, numbers: Collection[int]) -> Any:
        """Return a Set<Long>. Py4J would make a small number an Integer."""
        array = self._gateway.new_array(self._jvm.long, len(numbers))
        for index, number in enumerate(numbers):
            array[index] = number
        return self._jvm.java.util.Arrays.stream(array).boxed().collect(self._jvm.java.util.stream.Collectors.toSet())

    def _place(self, place: TopicPlace) -> Any:
        return self._classes.common.TopicPartition(*place)


@contextmanager
def _errors() -> Iterator[None]:
    """Raise errors of the JVM as `KafkaUnavailableError`, in one line."""
    try:
        yield
    except Py4JJavaError as error:
        cause = error.java_exception.getCause() or error.java_exception
        raise KafkaUnavailableError(f"Kafka's admin client has failed: {' '.join(str(cause.toString()).split())}") from None
    except (Py4JError, TypeError) as error:
        # A class that is missing is a package for Py4J, which cannot be called.
        raise KafkaUnavailableError(f"Kafka's admin client does not work in Spark's JVM: {type(error).__name__}") from None
