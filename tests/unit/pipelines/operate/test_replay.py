"""What `halfway replay` says of halves that it sends in vain."""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from halfway.conf.loader import load_settings
from halfway.pipelines.operate import next_halves, replay
from halfway.pipelines.operate.earlier_replays import Identity, LatestDiscard
from halfway.pipelines.operate.next_halves import NextHalf

MINUTE_MS = 60_000
KEYS = {"kafka.signing.cluster": "test", "kafka.signing.keys": {"g": "k" * 32}}


class Writer:
    """Takes halves, and gives them the time of a broker whose clock is right."""

    def __init__(self, behind_ms: int) -> None:
        self.behind_ms = behind_ms

    def append(self, halves: Sequence[NextHalf]) -> tuple[dict[Identity, Any], set[Identity]]:
        return {half.identity: SimpleNamespace(timestamp=partial(tuple, (2, half.at_ms - self.behind_ms))) for half in halves}, set()


@pytest.mark.parametrize("keys", [KEYS, {}])
@pytest.mark.parametrize("behind_ms", [0, 4 * MINUTE_MS, 6 * MINUTE_MS, -6 * MINUTE_MS])
def test_a_signed_half_whose_time_the_job_refuses_is_not_counted(
    keys: dict[str, Any], behind_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    row = {"transaction_id": "a", "topic": "orders", "queue_id": 0, "tags": None, "keys": None, "body": b"b", "properties": {}}
    rows = [{**row, "producer_group": "g", "incarnation": 0, "born_at_ms": 1}]
    monkeypatch.setattr(next_halves, "_rows", lambda *_: rows)
    monkeypatch.setattr(replay, "ReplayWriter", lambda *_: Writer(behind_ms))
    settings = load_settings(environ={}, overrides={"kafka.bootstrap_servers": "none:1", **keys})
    spark = cast("Any", None)
    discards = {Identity("a", "g"): LatestDiscard(0, 0, 0, 0, "check_max", "orders", None)}
    is_refused = bool(keys) and abs(behind_ms) > 5 * MINUTE_MS
    unsent = next_halves.Unsent(said.append)
    assert replay._send(spark, settings, discards, {}, unsent) == (not is_refused)
    assert [(each.transaction_id, each.why[:13]) for each in unsent.left] == [("a", "sent in vain:")] * is_refused
    told = [text for text in said if text.startswith("a was sent in vain: its signature is of 360 s ")]
    assert len(told) == is_refused
