"""A Kafka in memory, for an active relay: it loses transactions and refuses messages."""

import random
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest

from halfway.conf.loader import load_settings
from halfway.pipelines.relay import active_relay as module
from halfway.pipelines.relay.positions import PositionRecord, Refusal, RelayPositions, positions_of
from halfway.pipelines.relay.real_topics import RealTopic
from halfway.pipelines.relay.relay_producer import RefusedError, TransactionLostError
from halfway.pipelines.relay.route import RelayedRecord
from halfway.schemas.settings import Settings

LARGE = bytes(100)


class Clock:
    """Stands still unless it is moved."""

    now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


class FakeKafka:
    """Takes transactions whole or not at all. It may lose the answer, and it may take time."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.sent: dict[str, list[str]] = defaultdict(list)
        self.positions: list[PositionRecord] = []
        self.asked: list[list[str]] = []
        self.missing, self.takes_large, self.losses, self.sizes = {"late"}, False, 0.1, list[int]()
        self.clock, self.takes_s, self.cause = Clock(), 0.0, "missing"

    def write(self, records: Iterable[RelayedRecord], alone: Collection[str], _: str, positions: Iterable[PositionRecord]) -> None:
        records = list(records)
        large = {record.topic for record in records if record.value == LARGE} if not self.takes_large else set()
        for record in records:
            # A batch of several messages is refused for one of them, and by any name.
            if record.topic in large and (record.topic not in alone or record.value == LARGE):
                raise RefusedError(record, Refusal.TOO_LARGE, "large", is_alone=record.topic in alone)
        is_lost = self._chance.random() < self.losses
        if is_lost and self._chance.random() < 0.5:
            raise TransactionLostError("before its commit")
        self.sizes.append(len(records))
        self.clock.now_s += self.takes_s
        for record in records:
            self.sent[record.topic].append(record.transaction_id)
        self.positions += positions
        if is_lost:
            raise TransactionLostError("after its commit")

    def of(self, names: Collection[str]) -> dict[str, RealTopic]:
        if names:
            self.asked.append(list(names))
            self.clock.now_s += self.takes_s
        missing = (Refusal.NO_TOPIC, self.cause)
        return {name: RealTopic(0, missing) if name in self.missing else RealTopic(1) for name in names}

    def stored(self, *_: object) -> dict[str, RelayPositions]:
        return positions_of(self.positions)

    def ignore(self) -> None:
        """Be told to forget, to close, or to mark the end."""

    forget = close = mark_end = ignore


def fake_kafka(chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> FakeKafka:
    kafka = FakeKafka(chance)
    for name, fake in (("RelayProducer", lambda _: kafka), ("RealTopics", lambda _: kafka), ("read_positions", kafka.stored)):
        monkeypatch.setattr(module, name, fake)
    return kafka


def settings_for(warehouse: Path, **options: object) -> Settings:
    overrides = {"storage.warehouse": str(warehouse), "kafka.bootstrap_servers": "nowhere:1", **options}
    return load_settings(environ={}, overrides=overrides)
