"""Sends check requests, on an executor or on the driver, at least once (decision 5)."""

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

    def __call__(self, outcomes: pa.RecordBatch, records: Records) -> pa.RecordBatch:
        """Send the checks of outcomes (OUTCOME_SCHEMA); return when Kafka has acknowledged them all.

        Raises:
            KafkaUnavailableError: a request was not acknowledged in time.
        """
        writer = _writer(self._kafka, self._largest_bytes)
        try:
            for request in check_requests(outcomes, records):
                writer.put(self._kafka.check_topic, *request)
            writer.flush()
        except Exception:
            _writers.clear()
            raise
        return lost(outcomes, records)


_writers: dict[str, RecordWriter] = {}
"""The writers of this process, by Kafka's address: connecting takes longer than sending. A failed one is dropped."""


def _writer(kafka: KafkaSettings, largest_bytes: int) -> RecordWriter:
    identity = str(sorted(kafka.as_librdkafka_dict().items()))
    if identity not in _writers:
        _writers[identity] = RecordWriter(kafka, largest_bytes=largest_bytes, limit_ms=_DELIVERY_LIMIT_MS)
    return _writers[identity]
