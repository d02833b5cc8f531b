"""The record writer and librdkafka, without a broker."""

import gc
import weakref

import pytest
from confluent_kafka import KafkaException

from halfway.pipelines.kafka.writer import RecordWriter
from halfway.schemas.errors import KafkaUnavailableError
from halfway.schemas.settings import KafkaSettings
from tests.support.dead_producer import declare_dead
from tests.support.waiting import until

NOBODY = KafkaSettings(bootstrap_servers="127.0.0.1:1")


def test_a_writer_with_records_in_flight_can_be_dropped() -> None:
    """The tick publisher replaces a failed writer, and librdkafka holds the callbacks of its records in flight."""
    writer = RecordWriter(NOBODY)
    writer.put("half", b"id", b"body", [])
    dropped = weakref.ref(writer)
    del writer
    gc.collect()
    assert dropped() is None


def test_a_failed_record_keeps_no_later_record_from_being_queued_and_is_raised_once() -> None:
    """The tick publisher queues a tick for every partition, and then asks what became of them."""
    writer = RecordWriter(NOBODY, limit_ms=100, linger_ms=0)
    writer.put("half", b"id", b"body", [])

    def has_failed() -> bool:
        writer._producer.poll(0.05)
        return len(writer._producer) == 0

    until(has_failed, "the failure of the first record")
    writer.put("half", b"id", b"body", [])
    assert len(writer._producer) == 1
    with pytest.raises(KafkaUnavailableError, match="cannot write to half"):
        writer.flush()
    writer.flush()


@pytest.mark.parametrize("waits", [True, False])
def test_a_dead_producer_is_reported_as_what_it_is(waits: bool) -> None:
    """With a record in flight a delivery report follows."""
    writer = RecordWriter(NOBODY, limit_ms=10_000)
    if waits:
        writer.put("half", b"id", b"body", [])
    declare_dead(writer._producer)
    with pytest.raises(KafkaException, match="the test says so"):
        writer.flush()
