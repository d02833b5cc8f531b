"""Sends check requests, on an executor or on the driver, at least once (decision 5)."""

from uuid import uuid4

import pyarrow as pa
from confluent_kafka import KafkaException

from halfway.pipelines.kafka.writer import Compression, RecordWriter
from halfway.schemas.errors import RecordTooLargeError
from halfway.schemas.settings import KafkaSettings
from halfway.transforms.rows import Records, check_requests, lost

_DELIVERY_LIMIT_MS = 120_000
_LARGE_BYTES = 32 * 1024 * 1024
"""Brokers refuse requests of more than 100 MiB by default. A half whose body is larger was compressed."""


class CheckSender:
    """Sends a check request for each outcome whose half is found, and returns the other outcomes.

    Where a topic stores what was compressed, Kafka compares its limit with the size after compression. So a half that
    such a half topic took may be too large for the check topic as it is. Then its request is compressed too.
    """

    def __init__(self, kafka: KafkaSettings) -> None:
        """Store the configuration. Does not connect.

        Args:
            kafka: where Kafka is. Spark sends it to the executors in the task, so that no secret is in the plan.
        """
        self._kafka = kafka
        self._identity = uuid4().hex

    def __call__(self, outcomes: pa.RecordBatch, records: Records) -> pa.RecordBatch:
        """Send the checks of outcomes (OUTCOME_SCHEMA); return when Kafka has acknowledged them all.

        Raises:
            RecordTooLargeError: a check topic's `max.message.bytes` is too small.
            KafkaUnavailableError: a request was not acknowledged in time.
        """
        is_large = any(record is not None and len(record.value or b"") > _LARGE_BYTES for record in records)
        compression: Compression = "gzip" if is_large else "none"
        try:
            self._send(outcomes, records, compression)
        except RecordTooLargeError:
            self._send(outcomes, records, "gzip")
        except KafkaException:
            # librdkafka has declared the producer dead.
            self._send(outcomes, records, compression)
        return lost(outcomes, records)

    def _send(self, outcomes: pa.RecordBatch, records: Records, compression: Compression) -> None:
        if (self._identity, compression) not in _writers:
            _writers[self._identity, compression] = RecordWriter(self._kafka, limit_ms=_DELIVERY_LIMIT_MS, compression=compression)
        writer = _writers[self._identity, compression]
        try:
            for request in check_requests(outcomes, records, self._kafka.check_topic_of, self._kafka.signing.keyring()):
                writer.put(*request)
            writer.flush()
        except Exception:
            self.close()  # the producer may be dead
            raise

    def close(self) -> None:
        """Disconnect this process. On executors the writers end with their process."""
        for identity in [identity for identity in _writers if identity[0] == self._identity]:
            del _writers[identity]


_writers: dict[tuple[str, str], RecordWriter] = {}
"""The writers of this process, by sender and compression: connecting takes longer than sending."""
