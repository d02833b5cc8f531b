"""The active relay against a Kafka in memory, which loses transactions and refuses messages."""

import random
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

from halfway.conf.loader import load_settings
from halfway.pipelines.relay import active_relay as module
from halfway.pipelines.relay import relay_table
from halfway.pipelines.relay.active_relay import ActiveRelay, RelayReport
from halfway.pipelines.relay.positions import PositionRecord, Refusal, RelayPositions, positions_of
from halfway.pipelines.relay.real_topics import RealTopic
from halfway.pipelines.relay.relay_producer import RefusedError, TransactionLostError
from halfway.pipelines.relay.relay_table import RelayTable
from halfway.pipelines.relay.route import RelayedRecord
from halfway.schemas.settings import Settings
from tests.support.relay_world import append_rows, row

TOPICS = ("a", "b", "c", "late")
LARGE = bytes(100)


class FakeKafka:
    """Takes transactions whole or not at all. It may lose the answer."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.sent: dict[str, list[str]] = defaultdict(list)
        self.positions: list[PositionRecord] = []
        self.missing, self.takes_large, self.losses, self.sizes = {"late"}, False, 0.1, list[int]()

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
        for record in records:
            self.sent[record.topic].append(record.transaction_id)
        self.positions += positions
        if is_lost:
            raise TransactionLostError("after its commit")

    def of(self, names: Collection[str]) -> dict[str, RealTopic]:
        missing = (Refusal.NO_TOPIC, "missing")
        return {name: RealTopic(0, missing) if name in self.missing else RealTopic(1) for name in names}

    def stored(self, *_: object) -> dict[str, RelayPositions]:
        return positions_of(self.positions)

    def ignore(self) -> None:
        """Be told to forget, or to close."""

    forget = close = ignore


def relay(settings: Settings, chance: random.Random) -> None:
    """Relay what there is now, by as many active relays as it takes."""
    report: Any = RelayReport()
    table = RelayTable(settings.storage)
    for _ in range(1000):
        active = ActiveRelay(settings, table, None, report)  # type: ignore[arg-type]
        try:
            stored = active.stored()
            assert stored is None or not stored.lost
            active.take_over(stored, stored or RelayPositions(table.id))
            has_more = True
            while has_more:
                has_more = active.read_on(lambda: chance.random() < 0.9)
                has_more = active.try_stopped() or has_more
        except TransactionLostError:
            continue
        return
    raise AssertionError("it gets nowhere")


@pytest.mark.parametrize("seed", range(12))
def test_each_topic_gets_each_message_once_and_in_order(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    kafka = FakeKafka(chance)
    for name, fake in (("RelayProducer", lambda _: kafka), ("RealTopics", lambda _: kafka), ("read_positions", kafka.stored)):
        monkeypatch.setattr(module, name, fake)
    monkeypatch.setattr(module, "_ALONE_AT_ONCE", 2)
    monkeypatch.setattr(module, "_ALONE_FOR", 20)
    monkeypatch.setattr(relay_table, "MESSAGES_AT_ONCE", 4)
    options = {"storage.warehouse": str(tmp_path), "relay.retry_interval": 1, "relay.topics": {"c": "mapped"}}
    settings = load_settings(environ={}, overrides={**options, "kafka.bootstrap_servers": "nowhere:1"})
    expected: dict[str, list[str]] = defaultdict(list)
    for batch in range(12):
        rows = []
        for number in range(chance.choice((1, 2, 30))):
            named = chance.choice(TOPICS)
            expected["mapped" if named == "c" else named].append(f"{batch}-{number}")
            rows.append(row(f"{batch}-{number}", named, body=LARGE if chance.random() < 0.02 else b"small"))
        append_rows(tmp_path, chance.randint(0, 1) if batch == 11 else 0, batch, rows)
        if batch % 3 == 2:
            relay(settings, chance)
            kafka.missing = set(chance.sample(TOPICS, 1))
            kafka.takes_large = batch == 8
    kafka.missing, kafka.takes_large, kafka.losses = set(), True, 0.0
    while True:
        relay(settings, chance)
        if not positions_of(kafka.positions)["relay"].stopped:
            break
    assert kafka.sent == expected
    assert max(kafka.sizes) <= 4
