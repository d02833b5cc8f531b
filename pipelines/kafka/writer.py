"""Records that the job or a command sends itself: partitioned as producers do, and waited for until Kafka has them."""

import logging
from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import AclOperation

from halfway.pipelines.kafka.admin import admin, check_rights, librdkafka_log, partition_counts
from halfway.schemas.errors import KafkaUnavailableError, TopicError
from halfway.schemas.headers import RECORD_OVERHEAD_BYTES
from halfway.schemas.settings import Settings

log = logging.getLogger(__name__)

_DELIVERY_LIMIT_MS = 30_000
_FULL_QUEUE_POLL_S = 0.1

HeaderList = list[tuple[str, bytes | None]]


class Outbox:
    """Sends to one topic with acknowledgement of all replicas; `flush` tells whether all arrived."""

    def __init__(self, settings: Settings, topic: str) -> None:
        """Prepare to send.

        Raises:
            SettingsError: no Kafka is configured.
            KafkaUnavailableError: Kafka cannot be reached.
            TopicError: the topic is missing.
            AccessError: this user may not write to it.
        """
        client = admin(settings)
        if topic not in partition_counts(client, [topic]):
            raise TopicError(f"no topic {topic}: `halfway topics create` makes it")
        # Without any right to write librdkafka's producer would not even start.
        check_rights(client, {topic: (AclOperation.WRITE,)})
        self._topic = topic
        largest = settings.resolution.max_body_bytes + RECORD_OVERHEAD_BYTES
        options: dict[str, Any] = {
            **settings.kafka.as_librdkafka_dict(),
            "client.id": "halfway-outbox",
            "acks": "all",
            "enable.idempotence": True,
            # Java's default: what is sent for one id, by whichever client, lies in one partition (design §2).
            "partitioner": "murmur2_random",
            "linger.ms": 5,
            "message.max.bytes": largest,
            "message.timeout.ms": _DELIVERY_LIMIT_MS,
            "queue.buffering.max.kbytes": max(64 * 1024, 2 * largest // 1024),
        }
        self._producer = Producer(options, logger=librdkafka_log)
        self._failure: KafkaError | None = None
        self.delivered = 0

    def put(
        self, key: bytes, value: bytes | None, headers: HeaderList, *, at_ms: int = 0, on_delivered: Callable[[Message], None] | None = None
    ) -> None:
        """Queue a record, waiting while the queue is full.

        Args:
            key: the transaction id.
            value: the body.
            headers: of the record.
            at_ms: its time where the topic keeps producers' times; 0 for now.
            on_delivered: is told where the record lies.

        Raises:
            KafkaUnavailableError: an earlier record was not taken.
        """

        def report(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self._failure = self._failure or error
                return
            self.delivered += 1
            if on_delivered is not None:
                on_delivered(message)

        while True:
            self._raise_failure()
            try:
                self._producer.produce(self._topic, value, key, headers=list(headers), timestamp=at_ms, on_delivery=report)
            except BufferError:
                self._producer.poll(_FULL_QUEUE_POLL_S)
            else:
                self._producer.poll(0)
                return

    def flush(self) -> None:
        """Wait until Kafka has everything.

        Raises:
            KafkaUnavailableError: it does not, after 30 s.
        """
        left = self._producer.flush(_DELIVERY_LIMIT_MS / 1000 + 5)
        self._raise_failure()
        if left:
            raise KafkaUnavailableError(f"Kafka has not taken {left} records for {self._topic} within {_DELIVERY_LIMIT_MS // 1000} s")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise KafkaUnavailableError(f"cannot write to {self._topic}: {self._failure.str()}")
