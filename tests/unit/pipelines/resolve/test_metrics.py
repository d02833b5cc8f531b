"""The job's metrics for Prometheus."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from halfway.pipelines.resolve.metrics import JobMetrics
from halfway.pipelines.resolve.report import BatchReport
from halfway.schemas.reports import LATENCY_BOUNDS_S, BucketReport, count_latencies, latency_counts

NOW_S = 1_700_000_000.0
METRICS = {
    "halfway_half_messages": "gauge",
    "halfway_pending_messages": "gauge",
    "halfway_oldest_half_message_age_seconds": "gauge",
    "halfway_absent_groups": "gauge",
    "halfway_horizon_lag_seconds": "gauge",
    "halfway_unread_records": "gauge",
    "halfway_start_timestamp_seconds": "gauge",
    "halfway_last_batch_timestamp_seconds": "gauge",
    "halfway_batch_seconds": "histogram",
    "halfway_finish_message_latency": "histogram",
    "halfway_records_total": "counter",
    "halfway_commit_messages_total": "counter",
    "halfway_rollback_messages_total": "counter",
    "halfway_checks_total": "counter",
    "halfway_checks_put_off_total": "counter",
    "halfway_unknown_answers_total": "counter",
    "halfway_discarded_messages_total": "counter",
    "halfway_quarantined_records_total": "counter",
    "halfway_duplicates_total": "counter",
    "halfway_former_records_total": "counter",
}
LABELS = {"topic", "le", "checked", "kind", "reason"}


def bucket(number: int, **changes: Any) -> BucketReport:
    known: dict[str, Any] = {"horizon_ms": int(NOW_S * 1000) - 2_000, "pending": 3, "checked": 1, "oldest_ms": int(NOW_S * 1000) - 12_000}
    more: dict[str, Any] = {"entries": 5, "absent_groups": 0, "counts": {}, "totals": {}}
    return BucketReport(bucket=number, **{**known, **more, **changes})


def batch(*buckets: BucketReport, earlier: Sequence[BucketReport] = (), **changes: Any) -> BatchReport:
    now = {each.bucket: each for each in buckets}
    return BatchReport(7, 1.5, buckets=now, known={each.bucket: each for each in earlier} | now, **changes)


def exposed(metrics: JobMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return what a scrape gets, written to the text format and parsed."""
    registry = CollectorRegistry()
    registry.register(metrics)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for family in families for sample in family.samples}


def plain(metrics: JobMetrics) -> dict[str, float]:
    return {name: value for (name, labels), value in exposed(metrics).items() if not labels}


@pytest.fixture
def metrics() -> JobMetrics:
    return JobMetrics(2, clock=lambda: NOW_S)


def test_names_types_help_and_labels_are_complete(metrics: JobMetrics) -> None:
    metrics(batch(bucket(0), bucket(1), unread={"half": 1}))
    registry = CollectorRegistry()
    registry.register(metrics)
    text = generate_latest(registry).decode()
    assert dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)) == METRICS
    helps = dict(re.findall(r"^# HELP (\S+) (.+)$", text, re.MULTILINE))
    assert set(helps) == set(METRICS)
    assert all(len(words) > 20 and words.endswith(".") for words in helps.values())
    assert {label for _, labels in exposed(metrics) for label, _ in labels} == LABELS, "no label without a bound"


def test_a_sum_over_buckets_appears_once_every_bucket_has_reported(metrics: JobMetrics) -> None:
    of_the_run = {"halfway_start_timestamp_seconds", "halfway_batch_seconds_count", "halfway_batch_seconds_sum"}
    assert set(plain(metrics)) == of_the_run
    metrics(batch(bucket(0)))
    assert set(plain(metrics)) == of_the_run | {"halfway_last_batch_timestamp_seconds", "halfway_horizon_lag_seconds"}
    metrics(batch(bucket(1, pending=4), earlier=[bucket(0)]))
    assert plain(metrics)["halfway_half_messages"] == 7
    metrics(batch(bucket(0, pending=0, checked=0), earlier=[bucket(0), bucket(1, pending=4)]))
    shown = exposed(metrics)
    assert shown["halfway_half_messages", ()] == 4
    assert [shown["halfway_pending_messages", (("checked", checked),)] for checked in ("false", "true")] == [3, 1]


def test_totals_come_from_the_state_and_are_never_added_twice(metrics: JobMetrics) -> None:
    totals = {"committed": 5, "check_max": 2, "lost": 1, "late_verdict": 3, "duplicate_op": 4, "halves": 9}
    for _ in range(3):
        metrics(batch(bucket(0, totals=totals), bucket(1, totals={"committed": 1})))
    shown = exposed(metrics)
    assert shown["halfway_commit_messages_total", ()] == 6
    assert shown["halfway_discarded_messages_total", (("reason", "check_max"),)] == 2
    assert shown["halfway_discarded_messages_total", (("reason", "expired"),)] == 0
    assert shown["halfway_quarantined_records_total", (("reason", "half_lost"),)] == 1
    assert shown["halfway_quarantined_records_total", (("reason", "late_verdict"),)] == 3
    assert shown["halfway_duplicates_total", (("kind", "op"),)] == 4
    assert shown["halfway_records_total", (("kind", "half"),)] == 9
    assert shown["halfway_batch_seconds_count", ()] == 3
    assert shown["halfway_batch_seconds_bucket", (("le", "1.0"),)] == 0
    assert shown["halfway_batch_seconds_bucket", (("le", "2.0"),)] == 3


def test_the_lag_of_the_horizon_grows_while_no_batch_ends() -> None:
    now = [NOW_S]
    metrics = JobMetrics(1, clock=lambda: now[0])
    metrics(batch(bucket(0)))
    assert plain(metrics)["halfway_horizon_lag_seconds"] == 2
    assert plain(metrics)["halfway_oldest_half_message_age_seconds"] == 10
    now[0] += 60
    assert plain(metrics)["halfway_horizon_lag_seconds"] == 62, "it grows while no batch comes"
    assert plain(metrics)["halfway_last_batch_timestamp_seconds"] == NOW_S


def test_a_horizon_ahead_of_the_clock_is_seen() -> None:
    now = [NOW_S]
    metrics = JobMetrics(1, clock=lambda: now[0])
    metrics(batch(bucket(0)))
    now[0] -= 3_600
    assert plain(metrics)["halfway_horizon_lag_seconds"] == -3_598


def test_no_metric_but_the_lag_is_negative(metrics: JobMetrics) -> None:
    """With CreateTime topics, producers' clocks may run ahead: a horizon after now, a half after the horizon."""
    ahead_ms = int(NOW_S * 1000) + 60_000
    metrics(
        batch(bucket(0, horizon_ms=ahead_ms, oldest_ms=ahead_ms + 5), bucket(1, horizon_ms=ahead_ms, pending=0, checked=0, oldest_ms=None))
    )
    assert {name for (name, _), value in exposed(metrics).items() if value < 0} == {"halfway_horizon_lag_seconds"}
    assert plain(metrics)["halfway_oldest_half_message_age_seconds"] == 0


def test_the_oldest_age_is_0_without_pending_messages(metrics: JobMetrics) -> None:
    metrics(batch(*(bucket(number, pending=0, checked=0, oldest_ms=None) for number in range(2))))
    assert plain(metrics)["halfway_oldest_half_message_age_seconds"] == 0


def test_a_latency_equal_to_a_bound_counts_under_that_bound() -> None:
    counted = count_latencies([-5, 0, 50, 51, 100, 86_400_000, 86_400_001])
    per_bound = dict(zip([*LATENCY_BOUNDS_S, float("inf")], latency_counts(counted), strict=True))
    assert {bound: times for bound, times in per_bound.items() if times} == {0.05: 3, 0.1: 2, 86_400: 1, float("inf"): 1}
    assert counted["latency_sum_ms"] == 50 + 51 + 100 + 86_400_000 + 86_400_001


def test_a_report_is_the_same_after_json() -> None:
    report = bucket(3, counts={"halves": 1}, totals=dict(count_latencies([7])), oldest_ms=None)
    assert BucketReport.from_json(report.to_json()) == report
