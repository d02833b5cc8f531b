"""What `halfway replay` says of halves that it sends in vain."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Message

from halfway.conf.loader import load_settings
from halfway.pipelines.operate import replay
from halfway.pipelines.operate.earlier_replays import LatestDiscard

MINUTE_MS = 60_000
KEYS = {"kafka.signing.cluster": "test", "kafka.signing.keys": {"g": "k" * 32}}


class Kafka:
    """Takes records, and gives them the time of a broker whose clock is right."""

    def __init__(self, behind_ms: int) -> None:
        self.behind_ms, self.delivered = behind_ms, 0
        self._reports: list[tuple[Callable[[Message], None] | None, Any]] = []

    def put(self, *_: Any, at_ms: int, on_delivered: Callable[[Message], None] | None) -> None:
        self._reports.append((on_delivered, SimpleNamespace(timestamp=lambda: (2, at_ms - self.behind_ms))))

    def flush(self) -> None:
        for report, record in self._reports:
            self.delivered += 1
            if report is not None:
                report(record)


@pytest.mark.parametrize("keys", [KEYS, {}])
@pytest.mark.parametrize("behind_ms", [0, 4 * MINUTE_MS, 6 * MINUTE_MS, -6 * MINUTE_MS])
def test_a_signed_half_whose_time_the_job_refuses_is_not_counted(
    keys: dict[str, Any], behind_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka, said, anything = Kafka(behind_ms), list[str](), SimpleNamespace()
    row = {"transaction_id": "a", "topic": "orders", "queue_id": 0, "tags": None, "keys": None, "body": b"b", "properties": {}}
    rows = [{**row, "producer_group": "g", "incarnation": 0, "born_at_ms": 1}]
    monkeypatch.setattr(replay, "RecordWriter", lambda _: kafka)
    monkeypatch.setattr(replay, "verify_topic_writable", lambda *_: None)
    monkeypatch.setattr(replay, "_rows", lambda *_: rows)
    settings = load_settings(environ={}, overrides={"kafka.bootstrap_servers": "none:1", **keys})
    spark: Any = anything
    discards = {("a", "g"): LatestDiscard(0, 0, 0, 0, "check_max", "orders", None)}
    is_refused = bool(keys) and abs(behind_ms) > 5 * MINUTE_MS
    left: list[replay.Left] = []
    assert replay._send(spark, settings, discards, said.append, left) == (not is_refused)
    assert [(each.transaction_id, each.why[:13]) for each in left] == [("a", "sent in vain:")] * is_refused
    told = [text for text in said if text.startswith("a was sent in vain: its signature is of 360 s ")]
    assert len(told) == is_refused
