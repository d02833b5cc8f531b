"""How far a relay reads its own topic before it believes the bookmark."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import pytest

from halfway.pipelines.kafka.range_reader import OffsetRange
from halfway.pipelines.relay import position_reader
from halfway.pipelines.relay.position_reader import read_positions
from halfway.schemas.errors import KafkaUnavailableError, TopicError
from halfway.schemas.settings import KafkaSettings

CLIENT: Any = None


class Topic:
    """The relay's own topic, whose end a broker tells as the next of `ends`; the last one stays."""

    def __init__(self, *ends: int, partitions: int = 1) -> None:
        self._ends, self._partitions = list(ends), partitions
        self.read: list[Mapping[int, OffsetRange]] = []

    def retained(self, *_: object) -> dict[int, OffsetRange]:
        end = self._ends.pop(0) if len(self._ends) > 1 else self._ends[0]
        return dict.fromkeys(range(self._partitions), OffsetRange(1, end))

    def read_ranges(self, _consumer: object, _topic: str, ranges: Mapping[int, OffsetRange]) -> Iterator[Any]:
        self.read.append(ranges)
        return iter(())


def read(topic: Topic, monkeypatch: pytest.MonkeyPatch, mark: int, wait_s: float) -> None:
    monkeypatch.setattr(position_reader, "ranges_consumer", lambda *_: nullcontext())
    monkeypatch.setattr(position_reader, "retained", topic.retained)
    monkeypatch.setattr(position_reader, "read_ranges", topic.read_ranges)
    assert read_positions(CLIENT, KafkaSettings(), mark_end=lambda _: mark, wait_s=wait_s) == {}


def test_a_relay_reads_up_to_its_mark_behind_a_transaction_that_is_open_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    topic = Topic(3, 3, 3, 9)
    read(topic, monkeypatch, 7, 60.0)
    assert topic.read == [{0: (1, 9)}]


def test_a_bookmark_before_the_mark_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    topic = Topic(6)
    with pytest.raises(KafkaUnavailableError, match="stays open"):
        read(topic, monkeypatch, 7, 0.0)
    assert topic.read == []


def test_partitions_that_were_added_while_a_relay_stood_by_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark would be in one of them, and the newest bookmark perhaps in another."""
    topic = Topic(6, partitions=3)
    with pytest.raises(TopicError, match="has 3 partitions, and the relay needs one"):
        read(topic, monkeypatch, 1, 0.0)
    assert topic.read == []
