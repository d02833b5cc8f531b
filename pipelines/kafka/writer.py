"""The producer of the job and its commands: idempotent, and partitioned as services' producers are."""

import time
from collections.abc import Callable
from typing import Any, Literal

from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import AclOperation

from halfway.clients.kafka.config import PRODUCER_OPTIONS
from halfway.clients.kafka.diagnosis import alter_topic, missing_topics
from halfway.pipelines.kafka.admin import admin_client, librdkafka_log, partition_counts
from halfway.pipelines.kafka.rights import verify_rights
from halfway.schemas.errors import KafkaUnavailableError, RecordTooLargeError, TopicError
from halfway.schemas.headers import RECORD_OVERHEAD_BYTES, HeaderList
from halfway.schemas.settings import KafkaSettings

_DELIVERY_LIMIT_MS = 30_000
_FLUSH_GRACE_S = 5
_POLL_S = 0.1
_BUFFER_BYTES = 64 * 1024 * 1024
_RECORD_BYTES = 128
_HEADER_BYTES = 10

Compression = Literal["none", "gzip"]
ANY_PARTITION = -1


def verify_topic_writable(kafka: KafkaSettings, topic: str) -> None:
    """Refuse a topic that cannot be written. Without any right to write, librdkafka's producer would not even start.

    Raises:
        TopicError: the topic is missing.
        AccessError: this user may not write to it.
        KafkaUnavailableError: Kafka cannot be reached.
    """
    client = admin_client(kafka)
    if topic not in partition_counts(client, [topic]):
        raise TopicError(missing_topics([topic]))
    verify_rights(client, {topic: (AclOperation.WRITE,)})


class _DeliveryReports:
    """Keeps the results of records. librdkafka holds it while they are in flight, so it must not hold the writer."""

    def __init__(self) -> None:
        self.waiting_bytes = 0
        self._failure: tuple[str, KafkaError] | None = None
        self._refused_bytes = 0

    def of(self, on_delivered: Callable[[Message], None] | None, size: int) -> Callable[[KafkaError | None, Message], None]:
        """Return the callback for one record of `size` bytes."""

        def report(error: KafkaError | None, message: Message) -> None:
            self.waiting_bytes -= size
            if error is not None:
                self._failure = self._failure or (str(message.topic()), error)
                if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
                    self._failure, self._refused_bytes = (str(message.topic()), error), max(size, self._refused_bytes)
                return
            if on_delivered is not None:
                on_delivered(message)

        return report

    def raise_failure(self) -> None:
        """Raise the first failure since the last call.

        Raises:
            RecordTooLargeError: a topic refuses a record for its size. It comes before all others.
            KafkaUnavailableError: a record failed for another reason.
        """
        failure, self._failure = self._failure, None
        size, self._refused_bytes = self._refused_bytes, 0
        if failure is not None:
            topic, error = failure
            if size:
                raise RecordTooLargeError(too_large(topic, size))
            raise KafkaUnavailableError(f"cannot write to {topic}: {error.str()}")


class RecordWriter:
    """Sends records of any size that all replicas in sync acknowledge. Buffers 64 MiB, or one record.

    Args:
        kafka: where Kafka is.
        limit_ms: how long a record may take to be acknowledged.
        linger_ms: how long a record waits for others to share its request.
        compression: how records are compressed. Every client can read `gzip`.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        *,
        limit_ms: int = _DELIVERY_LIMIT_MS,
        linger_ms: int = 5,
        compression: Compression = "none",
    ) -> None:
        """Make the producer. Connects in the background."""
        options: dict[str, Any] = {
            **kafka.as_librdkafka_dict(),
            **PRODUCER_OPTIONS,
            "client.id": "halfway-writer",
            "linger.ms": linger_ms,
            "message.timeout.ms": limit_ms,
            # librdkafka would never take a record that is larger than its buffer: this class bounds it instead.
            "queue.buffering.max.kbytes": 2**31 - 1,
            "compression.type": compression,
        }
        self._limit_ms = limit_ms
        self._producer = Producer(options, logger=librdkafka_log)
        self._reports = _DeliveryReports()

    def put(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: HeaderList,
        *,
        partition: int = ANY_PARTITION,
        at_ms: int = 0,
        on_delivered: Callable[[Message], None] | None = None,
    ) -> None:
        """Queue a record; waits while the queue is full.

        Args:
            topic: the topic to append it to.
            key: the transaction id; None for a record without one.
            value: the body.
            headers: the record's headers.
            partition: the partition; by default it follows from the key.
            at_ms: the record's time in a topic with CreateTime; 0 for now.
            on_delivered: receives the acknowledged record.

        Raises:
            RecordTooLargeError: the queue is full, and the topic refuses an earlier record.
            KafkaUnavailableError: the queue is full, and an earlier record was not acknowledged.
            KafkaException: librdkafka refuses the record, or has failed for good.
        """
        size = record_bytes(key, value, headers)
        report = self._reports.of(on_delivered, size)
        while True:
            if self._reports.waiting_bytes == 0 or self._reports.waiting_bytes + size <= _BUFFER_BYTES:
                try:
                    self._producer.produce(
                        topic, value, key, partition=partition, headers=list(headers), timestamp=at_ms, on_delivery=report
                    )
                except BufferError:
                    pass  # too many records wait
                else:
                    self._reports.waiting_bytes += size
                    self._producer.poll(0)
                    return
            self._producer.poll(_POLL_S)
            self._reports.raise_failure()

    def flush(self) -> None:
        """Wait until Kafka has acknowledged everything. A failure is raised once; the writer can be used again.

        Raises:
            RecordTooLargeError: a record is over its topic's limit. The message has the command that raises it.
            KafkaUnavailableError: a record failed or was not acknowledged in time.
            KafkaException: librdkafka has failed for good.
        """
        deadline_s = time.monotonic() + self._limit_ms / 1000 + _FLUSH_GRACE_S
        # Not by flush: it goes on to call callbacks after the one that raises a fatal error, and loses that.
        while len(self._producer) and time.monotonic() < deadline_s:
            self._producer.poll(_POLL_S)
        self._reports.raise_failure()
        if left := len(self._producer):
            raise KafkaUnavailableError(
                f"Kafka has not taken {left} records within {self._limit_ms // 1000} s: are all brokers up, and enough replicas in sync?"
            )


def record_bytes(key: bytes | None, value: bytes | None, headers: HeaderList) -> int:
    """Return a record's size in Kafka without compression, or a few bytes more."""
    own = sum(len(name.encode()) + len(content or b"") + _HEADER_BYTES for name, content in headers)
    return _RECORD_BYTES + len(key or b"") + len(value or b"") + own


def too_large(topic: str, size: int) -> str:
    """Return the message for a record of `size` bytes that a topic refuses, with the command that raises its limit."""
    what = f"topic {topic} refuses a record of {size} bytes, which is over its max.message.bytes"
    return f"{what}: {alter_topic(topic, 'max.message.bytes', size + RECORD_OVERHEAD_BYTES)}"
