"""The record writer and librdkafka, without a broker."""

import gc
import weakref

from halfway.pipelines.kafka.writer import RecordWriter
from halfway.schemas.settings import KafkaSettings


def test_a_writer_with_records_in_flight_can_be_dropped() -> None:
    """The tick publisher replaces a failed writer, and librdkafka holds the callbacks of its records in flight."""
    writer = RecordWriter(KafkaSettings(bootstrap_servers="127.0.0.1:1"))
    writer.put("half", b"id", b"body", [])
    dropped = weakref.ref(writer)
    del writer
    gc.collect()
    assert dropped() is None
