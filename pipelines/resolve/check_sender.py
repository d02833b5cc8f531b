"""Sends check requests, on an executor or on the driver, at least once (decision 5)."""

from uuid import uuid4

import pyarrow as pa

from halfway.pipelines.kafka.writer import RecordWriter
from halfway.schemas.settings import KafkaSettings
from halfway.transforms.rows import Records, check_requests, lost

_DELIVERY_LIMIT_MS = 120_000


class CheckSender:
    """Sends a check request for each outcome whose half is found, and returns the other outcomes."""

    def __init__(self, kafka: KafkaSettings, largest_bytes: int) -> None:
        """Store the configuration. Does not connect.

        Args:
            kafka: where Kafka is. Spark sends it to the executors in the task, so that no secret is in the plan.
            largest_bytes: the size of the largest request.
        """
        self._kafka, self._largest_bytes = kafka, largest_bytes
        self._identity = uuid4().hex

    def __call__(self, outcomes: pa.RecordBatch, records: Records) -> pa.RecordBatch:
        """Send the checks of outcomes (OUTCOME_SCHEMA); return when Kafka has acknowledged them all.

        Raises:
            KafkaUnavailableError: a request was not acknowledged in time.
        """
        if self._identity not in _writers:
            _writers[self._identity] = RecordWriter(self._kafka, largest_bytes=self._largest_bytes, limit_ms=_DELIVERY_LIMIT_MS)
        writer = _writers[self._identity]
        try:
            for request in check_requests(outcomes, records):
                writer.put(self._kafka.check_topic, *request)
            writer.flush()
        except Exception:
            self.close()  # librdkafka may have failed for good
            raise
        return lost(outcomes, records)

    def close(self) -> None:
        """Disconnect this process. On executors the writers end with their process."""
        _writers.pop(self._identity, None)


_writers: dict[str, RecordWriter] = {}
"""The writers of this process: connecting takes longer than sending."""
