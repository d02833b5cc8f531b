"""The job asks about every half that Kafka took, and says in one line where the check topic is too small for it."""

import os

import pytest
from confluent_kafka import Producer

from halfway.clients.kafka.config import PRODUCER_OPTIONS
from halfway.pipelines.resolve import batch_outcomes
from halfway.schemas.errors import RecordTooLargeError, TopicError
from halfway.schemas.headers import MAX_HEADERS_BYTES, Source
from halfway.schemas.tables import Table
from tests.support.job_world import START_MS, MakeWorld, World, half_headers
from tests.support.kafka_topics import set_topic_config
from tests.support.waiting import LIMIT_S

MIB = 1024**2
LARGEST = 4 * MIB


def fill() -> tuple[str, bytes]:
    """Return a header with which a half has all the bytes of headers that the contract allows."""
    return "p", b"x" * (MAX_HEADERS_BYTES - sum(len(name) + len(value or b"") for name, value in half_headers()) - 1)


def send_compressed(w: World, key: str, body: bytes) -> None:
    kafka = w.settings.kafka
    producer = Producer({"bootstrap.servers": kafka.servers(), **PRODUCER_OPTIONS, "compression.type": "zstd"})
    producer.produce(kafka.half_topic, body, key, headers=half_headers(), timestamp=START_MS)
    assert producer.flush(LIMIT_S) == 0


def asked(w: World) -> list[tuple[str, int]]:
    return [(key, len(body)) for key, body, _ in w.checks()]


@pytest.mark.parametrize("on_driver", [True, False])
def test_the_largest_halves_are_asked_about(world: MakeWorld, monkeypatch: pytest.MonkeyPatch, on_driver: bool) -> None:
    if not on_driver:
        monkeypatch.setattr(batch_outcomes, "ROWS_ON_DRIVER", 0)
    w = world()
    w.produce(Source.HALF, "k" * 255, os.urandom(LARGEST), [*half_headers(), fill()])
    send_compressed(w, "zipped", bytes(LARGEST))
    w.tick(6_001)
    w.resolve()
    assert asked(w) == [("k" * 255, LARGEST), ("zipped", LARGEST)]


def test_a_large_half_is_asked_about_after_max_body_bytes_was_lowered(world: MakeWorld) -> None:
    w = world()
    w.half("large", 0, os.urandom(LARGEST))
    w.tick(1)
    w.resolve()
    lowered = w.settings.model_copy(update={"resolution": w.settings.resolution.model_copy(update={"max_body_bytes": 1_000})})
    w.tick(6_001)
    w.resolve(lowered)
    assert asked(w) == [("large", LARGEST)]
    w.op("large", b"COMMIT", 7_000)
    w.tick(8_000)
    w.resolve(lowered)
    assert [len(row.body) for row in w.rows(Table.MESSAGES)] == [LARGEST]


@pytest.mark.parametrize("on_driver", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_check_topic_that_is_too_small_ends_the_job_in_one_line(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch, on_driver: bool
) -> None:
    if not on_driver:
        monkeypatch.setattr(batch_outcomes, "ROWS_ON_DRIVER", 0)
    w = world(**{"resolution.max_body_bytes": 8 * MIB})
    topic = w.settings.kafka.check_topic
    w.half("large", 0, os.urandom(8 * MIB))
    w.tick(1)
    w.resolve()
    set_topic_config(w.settings, topic, "max.message.bytes", 6 * MIB)
    w.tick(6_001)
    with pytest.raises(TopicError, match=f"--alter --topic {topic} --add-config max.message.bytes="):
        w.resolve()
    lowered = w.settings.model_copy(update={"resolution": w.settings.resolution.model_copy(update={"max_body_bytes": LARGEST})})
    with pytest.raises(RecordTooLargeError, match=f"--alter --topic {topic} --add-config max.message.bytes=") as caught:
        w.resolve(lowered)
    assert "\n" not in str(caught.value)
    set_topic_config(w.settings, topic, "max.message.bytes", int(str(caught.value).rpartition("=")[2].rstrip("`")))
    w.resolve(lowered)
    assert asked(w) == [("large", 8 * MIB)]
