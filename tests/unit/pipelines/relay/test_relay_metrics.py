"""A relay's metrics for Prometheus."""

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from halfway.pipelines.relay.active_relay import RelayReport
from halfway.pipelines.relay.positions import Refusal, RelayPositions, Stop, TablePosition
from halfway.pipelines.relay.relay_metrics import RelayMetrics
from halfway.schemas.bookmark import Bookmark

NOW_S = 1_700_000_000.0


def registry(report: RelayReport) -> CollectorRegistry:
    relay: Any = SimpleNamespace(report=report)
    made = CollectorRegistry()
    made.register(RelayMetrics(relay, clock=lambda: NOW_S))
    return made


def test_the_active_relay_shows_its_lag_and_each_stopped_topic() -> None:
    positions = RelayPositions("t", TablePosition(0, 3), {"orders": Stop(None, "t1", Refusal.TOO_LARGE, "…")})
    report = RelayReport(is_active=True, relayed=5, positions=positions, behind_since_ms=int(NOW_S * 1000) - 2_500, newest=Bookmark(0, 7))
    shown = registry(report)
    assert shown.get_sample_value("halfway_relay_active") == 1
    assert shown.get_sample_value("halfway_relay_lag_seconds") == 2.5
    assert shown.get_sample_value("halfway_relay_lag_batches") == 4
    assert shown.get_sample_value("halfway_relay_messages_total") == 5
    assert shown.get_sample_value("halfway_relay_stopped_topics", {"topic": "orders", "refusal": "too_large"}) == 1


def test_nothing_behind_is_no_lag_and_who_stands_by_has_none() -> None:
    assert registry(RelayReport(is_active=True, last_look_s=NOW_S)).get_sample_value("halfway_relay_lag_seconds") == 0
    assert registry(RelayReport(is_active=True)).get_sample_value("halfway_relay_lag_seconds") is None  # It has read nothing.
    standing_by = registry(RelayReport(positions=RelayPositions("t", None, {"orders": Stop(None, "t1", Refusal.OTHER, "")})))
    assert standing_by.get_sample_value("halfway_relay_active") == 0
    assert standing_by.get_sample_value("halfway_relay_lag_seconds") is None
    assert standing_by.get_sample_value("halfway_relay_stopped_topics", {"topic": "orders", "refusal": "other"}) is None


def test_the_names_of_topics_are_no_unbounded_label() -> None:
    positions = RelayPositions("t", None, {f"t{number}": Stop(None, "", Refusal.NO_TOPIC, "") for number in range(500)})
    samples = [sample for family in registry(RelayReport(is_active=True, positions=positions)).collect() for sample in family.samples]
    assert sum(sample.name == "halfway_relay_stopped_topics" for sample in samples) == 50
