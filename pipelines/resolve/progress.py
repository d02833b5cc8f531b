"""Logs a line for each batch of `halfway resolve`."""

import logging
import time
from collections.abc import Callable

from halfway.pipelines.resolve.report import BatchReport
from halfway.schemas.outcomes import Count, Kind

log = logging.getLogger(__name__)

_QUIET_MS = 10_000


class ProgressLog:
    """Logs a line for each batch with outcomes, and at most one each 10 s for batches without."""

    def __init__(self, clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        """Start. `clock_ms` returns the wall clock, which the line shows; no outcome depends on it."""
        self._clock_ms = clock_ms
        self._logged_ms: int | None = None

    def __call__(self, report: BatchReport) -> None:
        """Log one batch."""
        now_ms = self._clock_ms()
        did_something = any(rows for kind, rows in report.rows.items() if kind is not Kind.REPORT)
        if not did_something and self._logged_ms is not None and 0 <= now_ms - self._logged_ms < _QUIET_MS:
            return
        self._logged_ms = now_ms
        counts = report.counts
        log.info(
            "event=batch batch_id=%d seconds=%.2f events=%d committed=%d rolled_back=%d checked=%d discarded=%d quarantined=%d "
            "pending=%d unread=%s horizon_ms=%s horizon_lag_ms=%s",
            report.batch_id,
            report.seconds,
            counts[Count.HALVES] + counts[Count.OPS],
            counts[Count.COMMITTED],
            counts[Count.ROLLED_BACK],
            counts[Count.CHECKED],
            counts[Count.DISCARDED],
            report.rows[Kind.QUARANTINE],
            report.pending,
            "unknown" if report.unread is None else sum(report.unread.values()),
            "none" if report.horizon_ms is None else report.horizon_ms,
            "none" if report.horizon_ms is None else now_ms - report.horizon_ms,
        )
