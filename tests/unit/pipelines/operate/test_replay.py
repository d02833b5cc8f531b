"""What `halfway replay` says of halves that it sends in vain, and when it signs them."""

from collections.abc import Callable, Iterable
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME

from halfway.conf.loader import load_settings
from halfway.pipelines.operate import next_halves, replay, replay_writer
from halfway.pipelines.operate.earlier_replays import Identity, LatestDiscard

MINUTE_MS, HOUR_MS = 60_000, 3_600_000
KEYS = {"kafka.signing.cluster": "test", "kafka.signing.keys": {"g": "k" * 32}}
ROW = {
    "topic": "orders",
    "queue_id": 0,
    "tags": None,
    "keys": None,
    "body": b"b",
    "properties": {},
    "producer_group": "g",
    "incarnation": 0,
}


class World:
    """This machine's clock, and a broker that takes records and gives them the time of a clock that is behind it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, behind_ms: int = 0, keys: dict[str, Any] = KEYS) -> None:
        self.now_ms, self.said = 10**12, list[str]()
        self.not_replayed = next_halves.NotReplayed(self.said.append)
        self.timestamp: Callable[[int], tuple[int, int]] = lambda _: (TIMESTAMP_LOG_APPEND_TIME, self.now_ms - behind_ms)
        self.monkeypatch = monkeypatch
        self.settings = load_settings(environ={}, overrides={"kafka.bootstrap_servers": "none:1", **keys})
        monkeypatch.setattr(replay_writer, "verify_topic_writable", lambda *_: None)
        monkeypatch.setattr(replay_writer, "RecordWriter", lambda *_: self)
        monkeypatch.setattr(replay_writer, "_now_ms", lambda: self.now_ms)
        monkeypatch.setattr(replay_writer.ReplayWriter, "_sent_meanwhile", lambda _: set())

    def put(self, *_: Any, at_ms: int, on_delivered: Callable[[Any], None]) -> None:
        record = MagicMock()
        record.timestamp.return_value = self.timestamp(at_ms)
        on_delivered(record)

    def flush(self) -> None:
        """Do nothing: all is delivered."""

    def send(self, rows: Iterable[dict[str, Any]], *ids: str) -> int:
        self.monkeypatch.setattr(next_halves, "_rows", lambda *_: rows)
        discards = {Identity(name, "g"): LatestDiscard(0, 0, 0, 0, "check_max", "orders", None) for name in ids}
        return replay._send(cast("Any", None), self.settings, discards, {}, self.not_replayed)


def row(name: str) -> dict[str, Any]:
    return {**ROW, "transaction_id": name, "born_at_ms": 1}


@pytest.mark.parametrize("keys", [KEYS, {}])
@pytest.mark.parametrize("behind_ms", [0, 4 * MINUTE_MS, 6 * MINUTE_MS, -6 * MINUTE_MS])
def test_a_signed_half_whose_time_the_job_refuses_is_not_counted(
    keys: dict[str, Any], behind_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = World(monkeypatch, behind_ms, keys)
    is_refused = bool(keys) and abs(behind_ms) > 5 * MINUTE_MS
    assert w.send([row("a")], "a") == (not is_refused)
    assert [(each.transaction_id, each.why[:13]) for each in w.not_replayed.messages] == [("a", "sent in vain:")] * is_refused
    told = [text for text in w.said if text.startswith("a was sent in vain: its signature is of 360 s ")]
    assert len(told) == is_refused


def test_a_half_is_signed_when_it_is_sent_however_long_the_table_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    w = World(monkeypatch)

    def slow_table() -> Iterable[dict[str, Any]]:
        yield row("a")
        w.now_ms += HOUR_MS
        yield row("b")
        raise AssertionError("the rest of the table is read in vain")

    assert w.send(slow_table(), "a", "b") == 2
    assert w.said == []


def test_a_half_that_was_held_up_after_it_was_signed_is_not_counted_with_create_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka gives it the time of its signature, and the job refuses it by the time at which it reads it (R14)."""
    w = World(monkeypatch)

    def held_up(at_ms: int) -> tuple[int, int]:
        w.now_ms += 6 * MINUTE_MS
        return TIMESTAMP_CREATE_TIME, at_ms

    w.timestamp = held_up
    assert w.send([row("a")], "a") == 0
    assert [text[:64] for text in w.said] == ["a was sent in vain: its signature is of 360 s before the broker'"]
