"""The log line of a batch: its content, and when it is left out."""

import logging
from collections import Counter
from collections.abc import Mapping

import pytest

from halfway.pipelines.resolve.progress import ProgressLog
from halfway.pipelines.resolve.report import BatchReport
from halfway.schemas.outcomes import Count, Kind
from halfway.schemas.reports import BucketReport


def busy(batch_id: int) -> BatchReport:
    counts = Counter({Count.HALVES: 5, Count.OPS: 4, Count.COMMITTED: 3, Count.ROLLED_BACK: 1, Count.CHECKED: 2, Count.DISCARDED: 1})
    rows = Counter({Kind.COMMIT: 3, Kind.QUARANTINE: 1, Kind.REPORT: 2})
    buckets = {0: bucket(0, pending=4, horizon_ms=95_000, counts=counts), 1: bucket(1, pending=2, horizon_ms=90_000)}
    return BatchReport(batch_id, 1.25, rows, buckets, buckets, unread={"half": 7, "op": 3})


def quiet(batch_id: int) -> BatchReport:
    buckets = {1: bucket(1, pending=0)}
    return BatchReport(batch_id, 0.5, Counter({Kind.REPORT: 2}), buckets, buckets)


def bucket(number: int, pending: int, horizon_ms: int | None = None, counts: Mapping[str, int] | None = None) -> BucketReport:
    return BucketReport(number, horizon_ms, pending, 0, None, pending, 0, counts or {}, {})


def test_a_batch_is_logged_in_one_line_with_all_its_figures(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ProgressLog(clock_ms=lambda: 91_500)(busy(3))
    [line] = caplog.messages
    assert dict(pair.split("=", 1) for pair in line.split()) == {
        "event": "batch",
        "batch_id": "3",
        "seconds": "1.25",
        "events": "9",
        "committed": "3",
        "rolled_back": "1",
        "checked": "2",
        "discarded": "1",
        "quarantined": "1",
        "pending": "6",
        "unread": "10",
        "horizon_ms": "90000",
        "horizon_lag_ms": "1500",
    }


def test_batches_without_outcomes_are_logged_every_10_s(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now_ms = [0]
    log = ProgressLog(clock_ms=lambda: now_ms[0])
    for now_ms[0], report in [(0, quiet(0)), (9_999, quiet(1)), (10_000, quiet(2)), (10_001, quiet(3)), (10_002, busy(4))]:
        log(report)
    assert [line.split()[1] for line in caplog.messages] == ["batch_id=0", "batch_id=2", "batch_id=4"]
    assert "pending=0 unread=unknown horizon_ms=none horizon_lag_ms=none" in caplog.messages[0]
