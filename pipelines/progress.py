"""The line that `halfway resolve` prints for each batch that did something."""

import logging
import time
from collections.abc import Callable

from pipelines.sinks import BatchReport
from schemas.outcomes import Count, Kind

log = logging.getLogger(__name__)

_QUIET_S = 10.0


class ProgressLog:
    """Logs a line for each batch with outcomes, and one now and then when there are none."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with nothing logged; `clock` is in seconds."""
        self._clock = clock
        self._logged_at = float("-inf")
        self._pending: dict[int, int] = {}

    def __call__(self, report: BatchReport) -> None:
        """Log one batch."""
        self._pending.update(report.pending)
        did_something = any(rows for kind, rows in report.rows.items() if kind is not Kind.REPORT)
        if not did_something and self._clock() - self._logged_at < _QUIET_S:
            return
        self._logged_at = self._clock()
        counts = report.counts
        log.info(
            "event=batch batch_id=%d seconds=%.2f events=%d committed=%d rolled_back=%d checked=%d discarded=%d quarantined=%d "
            "pending=%d horizon_ms=%s",
            report.batch_id,
            report.seconds,
            counts[Count.HALVES] + counts[Count.OPS],
            counts[Count.COMMITTED],
            counts[Count.ROLLED_BACK],
            counts[Count.CHECKED],
            counts[Count.DISCARDED],
            report.rows[Kind.QUARANTINE] + report.lost,
            sum(self._pending.values()),
            "none" if report.horizon_ms is None else report.horizon_ms,
        )
