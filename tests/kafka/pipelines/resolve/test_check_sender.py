"""Check requests of every size that a half may have, on a real broker and without Spark."""

import os
from collections.abc import Iterator

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, Producer

from halfway.clients.kafka.config import PRODUCER_OPTIONS
from halfway.pipelines.kafka.admin import admin_client
from halfway.pipelines.kafka.topic_setup import inspect_topics, verify_topics
from halfway.pipelines.resolve.check_sender import CheckSender, _writers
from halfway.schemas.errors import RecordTooLargeError, TopicError
from halfway.schemas.events import OUTCOME_SCHEMA, StoredRecord
from halfway.schemas.headers import MAX_HEADERS_BYTES
from halfway.schemas.records import HalfHeaders
from halfway.schemas.settings import Settings
from tests.support.dead_producer import declare_dead
from tests.support.job_world import half_headers
from tests.support.kafka_topics import MakeTopics, set_topic_config
from tests.support.partition_records import topic_records
from tests.support.waiting import LIMIT_S

MIB = 1024**2
NO_NAME = ("", None)
"""A header without name and value. It counts nothing in the contract, and 2 bytes in Kafka."""


@pytest.fixture
def settings(topics: MakeTopics) -> Settings:
    return topics(partitions=1, overrides={"resolution.max_body_bytes": 1_000})


@pytest.fixture
def sender(settings: Settings) -> Iterator[CheckSender]:
    made = CheckSender(settings.kafka)
    yield made
    made.close()


def asked(*records: StoredRecord) -> pa.RecordBatch:
    """Return the outcomes that ask about halves for the 15th time."""
    own = {"kind": 1, "source": 0, "partition": 2**31 - 1, "at_ms": 0, "decided_ms": 0, "incarnation": 0, "check_times": 15}
    names = {"producer_group": "g", "topic": "orders", "reason": None, "detail": None}
    ids = [(record.key or b"").decode() for record in records]
    rows = [{**own, **names, "transaction_id": name, "offset": 2**62 + number} for number, name in enumerate(ids)]
    return pa.RecordBatch.from_pylist(rows, schema=OUTCOME_SCHEMA)


def is_taken(settings: Settings, record: StoredRecord, compression: str = "none") -> bool:
    """Send a half to its topic. Return False if Kafka finds it too large."""
    producer = Producer({"bootstrap.servers": settings.kafka.servers(), **PRODUCER_OPTIONS, "compression.type": compression})
    codes: list[int] = []
    producer.produce(
        settings.kafka.half_topic,
        record.value,
        record.key,
        headers=list(record.headers or ()),
        on_delivery=lambda error, _: codes.append(error.code() if error else 0),
    )
    assert producer.flush(LIMIT_S) == 0
    assert codes in ([0], [KafkaError.MSG_SIZE_TOO_LARGE])
    return codes == [0]


def half(body: bytes, more_headers: int = 0, fill: int = 0) -> StoredRecord:
    own = [*half_headers(), ("p", b"x" * fill)]
    return StoredRecord(b"k" * 255, body, [*own, *[NO_NAME] * more_headers])


def sent(settings: Settings) -> list[tuple[bytes, int]]:
    """Return body and number of headers of each check request."""
    found = topic_records(settings.kafka.servers(), settings.kafka.check_topic)
    return [(message.value() or b"", len(message.headers() or ())) for message in found]


def test_a_half_with_as_many_headers_as_the_contract_allows_is_asked_about(settings: Settings, sender: CheckSender) -> None:
    largest = half(os.urandom(1_000), more_headers=MAX_HEADERS_BYTES - 4)
    assert HalfHeaders.from_headers(largest.headers).real_topic == "orders"
    assert is_taken(settings, largest)
    sender(asked(largest), [largest])
    assert sent(settings) == [(largest.value, MAX_HEADERS_BYTES - 1 + 2)]


def test_a_half_with_all_the_headers_that_the_contract_allows_is_asked_about(settings: Settings, sender: CheckSender) -> None:
    fill = MAX_HEADERS_BYTES - sum(len(name) + len(value or b"") for name, value in half_headers()) - 1
    largest = half(os.urandom(1_000), fill=fill)
    assert is_taken(settings, largest)
    sender(asked(largest), [largest])
    assert len(sent(settings)) == 1


def test_a_half_from_before_max_body_bytes_was_lowered_is_asked_about(settings: Settings, sender: CheckSender) -> None:
    set_topic_config(settings, settings.kafka.check_topic, "max.message.bytes", 8 * MIB)
    former, body = half(os.urandom(6 * MIB)), os.urandom(1_000)
    sender(asked(former, half(body)), [former, half(body)])
    assert sorted(len(value) for value, _ in sent(settings)) == [1_000, 6 * MIB]


def test_a_half_that_was_compressed_is_asked_about_compressed(settings: Settings, sender: CheckSender) -> None:
    """In topics that others made: `halfway topics create` makes those that Kafka stores uncompressed."""
    for topic in (settings.kafka.half_topic, settings.kafka.check_topic):
        set_topic_config(settings, topic, "compression.type", "producer")
    compressed = half(bytes(3 * MIB), more_headers=30_000)
    assert is_taken(settings, compressed, "zstd")
    sender(asked(compressed), [compressed])
    assert [(len(body), headers) for body, headers in sent(settings)] == [(3 * MIB, 30_005)]


def test_a_request_that_is_compressed_for_its_size_fits_a_topic_that_unpacks_it(topics: MakeTopics) -> None:
    """It is larger than what a broker takes in one request, 100 MiB."""
    settings = topics(partitions=1, overrides={"resolution.max_body_bytes": 101 * MIB})
    largest = half(bytes(101 * MIB), fill=30_000)
    assert is_taken(settings, largest, "zstd")
    sender = CheckSender(settings.kafka)
    sender(asked(largest), [largest])
    sender.close()
    assert [len(body) for body, _ in sent(settings)] == [101 * MIB]


def test_a_request_over_the_topics_limit_names_the_command_that_raises_it(settings: Settings, sender: CheckSender) -> None:
    large = half(os.urandom(3 * MIB))
    for _ in range(2):
        with pytest.raises(RecordTooLargeError, match=f"topic {settings.kafka.check_topic} refuses a record of") as caught:
            sender(asked(large), [large])
    assert "kafka-configs.sh" in str(caught.value)
    needed = int(str(caught.value).rpartition("max.message.bytes=")[2].rstrip("`"))
    set_topic_config(settings, settings.kafka.check_topic, "max.message.bytes", needed)
    sender(asked(large), [large])
    assert len(sent(settings)) == 1


@pytest.mark.parametrize("waits", [True, False])
def test_a_dead_producer_is_replaced(settings: Settings, sender: CheckSender, waits: bool) -> None:
    first, second = half(b"first"), half(b"second")
    sender(asked(first), [first])
    [writer] = [writer for (identity, _), writer in _writers.items() if identity == sender._identity]
    if waits:
        writer.put(settings.kafka.check_topic, b"k", b"waits", [])
    declare_dead(writer._producer)
    sender(asked(second), [second])
    assert {body for body, _ in sent(settings)} >= {b"first", b"second"}


def test_a_start_refuses_a_check_topic_that_takes_less_than_the_half_topic(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    client, topic = admin_client(settings.kafka), settings.kafka.check_topic
    half_topic, _, check_topic = inspect_topics(client, settings)
    assert check_topic.max_message_bytes > half_topic.max_message_bytes
    verify_topics(client, settings)
    assert not caplog.messages
    command = f"--alter --topic {topic} --add-config max.message.bytes={check_topic.max_message_bytes}`"
    set_topic_config(settings, topic, "max.message.bytes", half_topic.max_message_bytes)
    verify_topics(client, settings)
    assert command in caplog.text
    set_topic_config(settings, topic, "max.message.bytes", half_topic.max_message_bytes - 1)
    with pytest.raises(TopicError, match=command):
        verify_topics(client, settings)
