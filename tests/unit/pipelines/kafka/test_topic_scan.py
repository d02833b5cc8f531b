"""A scan of a topic where Kafka answers in part."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import OFFSET_END, KafkaError

from halfway.pipelines.kafka import topic_scan
from halfway.pipelines.kafka.range_reader import OffsetRange, offsets_since
from halfway.pipelines.kafka.topic_scan import TopicScan
from halfway.schemas.errors import KafkaUnavailableError


def test_a_partition_whose_look_up_fails_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that changes meanwhile has librdkafka report it in the partition's place alone, with OFFSET_END."""
    failed = SimpleNamespace(partition=1, offset=OFFSET_END, error=KafkaError(KafkaError.OFFSET_NOT_AVAILABLE))
    places = [SimpleNamespace(partition=0, offset=5, error=None), failed]
    monkeypatch.setattr(topic_scan, "retained", lambda *_: dict.fromkeys((0, 1), OffsetRange(0, 9)))
    monkeypatch.setattr(topic_scan, "read_ranges", lambda *_: iter(()))
    monkeypatch.setattr(topic_scan, "offsets_since", partial(offsets_since, limit_s=0.1))
    consumer: Any = SimpleNamespace(offsets_for_times=lambda *_, **__: places, list_topics=lambda *_, **__: None)
    scan = TopicScan(consumer, consumer, "half")
    with pytest.raises(KafkaUnavailableError, match="cannot read half: partition 1: "):
        list(scan.since(1_000, lambda *_: None))
    places.remove(failed)
    assert list(scan.since(1_000, lambda *_: None)) == []
