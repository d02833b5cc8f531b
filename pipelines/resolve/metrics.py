"""Prometheus metrics of the job, under RocketMQ's names where it has them (`rocketmq_…` is `halfway_…` here).

The buckets' state holds the totals, so that they survive restarts. After a start they appear once every bucket has
reported, with the first tick: a sum over some of the buckets would be wrong.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from threading import Lock

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from halfway.pipelines.resolve.report import BatchReport, summed
from halfway.schemas.outcomes import COUNTED_QUARANTINE, DISCARD_REASONS, Count
from halfway.schemas.reports import LATENCY_BOUNDS_S, LATENCY_SUM_MS, BucketReport, latency_counts

BATCH_BOUNDS_S = (0.25, 0.5, 1, 2, 3, 5, 10, 20, 30, 60, 120, 300)


class JobMetrics(Collector):
    """Collects metrics from each batch's report, for Prometheus to scrape."""

    def __init__(self, buckets: int, clock: Callable[[], float] = time.time) -> None:
        """Start without values.

        Args:
            buckets: how many buckets must have reported before sums over them appear.
            clock: returns seconds since 1970. No outcome depends on it.
        """
        self._lock = Lock()
        self._expected = buckets
        self._clock = clock
        self._started_s = clock()
        self._buckets: Mapping[int, BucketReport] = {}
        self._horizon_ms: int | None = None
        self._last_batch_s: float | None = None
        self._batch_counts = [0] * (len(BATCH_BOUNDS_S) + 1)
        self._batch_sum_s = 0.0
        self._unread: Mapping[str, int] = {}

    def __call__(self, report: BatchReport) -> None:
        """Add the report of one batch."""
        with self._lock:
            self._buckets = report.known
            self._horizon_ms = report.horizon_ms if report.horizon_ms is not None else self._horizon_ms
            self._last_batch_s = self._clock()
            self._batch_counts[sum(report.seconds > bound for bound in BATCH_BOUNDS_S)] += 1
            self._batch_sum_s += report.seconds
            self._unread = self._unread if report.unread is None else report.unread

    def collect(self) -> Iterator[Metric]:
        """Yield every metric. An unknown one has no sample."""
        with self._lock:
            buckets = list(self._buckets.values()) if len(self._buckets) == self._expected else []
            metrics = [*self._of_the_run(), *_of_pending(buckets, self._horizon_ms), *_of_totals(buckets)]
        yield from metrics

    def _of_the_run(self) -> Iterator[Metric]:
        yield _gauge("start_timestamp_seconds", "When this run of the job began (Unix time).", self._started_s)
        yield _gauge("last_batch_timestamp_seconds", "When the last batch of this run was done (Unix time).", self._last_batch_s)
        text = "Seconds a batch of this run took, its writes included."
        yield _histogram("batch_seconds", text, BATCH_BOUNDS_S, self._batch_counts, self._batch_sum_s)
        lag_s = None if self._horizon_ms is None else self._clock() - self._horizon_ms / 1000
        yield _gauge(
            "horizon_lag_seconds",
            "How far the horizon, up to which everything is read, is behind the clock here; below 0 if it is ahead.",
            lag_s,
        )
        text = "Backlog: records that Kafka had when the last batch was planned, and that the batch left because of its limit."
        yield _gauges("unread_records", text, "topic", self._unread)


def _of_pending(buckets: list[BucketReport], horizon_ms: int | None) -> Iterator[Metric]:
    known = bool(buckets)
    pending, checked = sum(bucket.pending for bucket in buckets), sum(bucket.checked for bucket in buckets)
    yield _gauge("half_messages", "Half messages without a verdict: all that are pending.", pending if known else None)
    by_checked = {"false": pending - checked, "true": checked} if known else {}
    text = "The messages of halfway_half_messages, by whether a check request has been sent for them."
    yield _gauges("pending_messages", text, "checked", by_checked)
    oldest_ms = min((bucket.oldest_ms for bucket in buckets if bucket.oldest_ms is not None), default=horizon_ms)
    age_s = None if not known or horizon_ms is None or oldest_ms is None else max(0, horizon_ms - oldest_ms) / 1000
    yield _gauge("oldest_half_message_age_seconds", "Age of the oldest pending half message at the horizon; 0 without one.", age_s)
    absent = max((bucket.absent_groups for bucket in buckets), default=None)
    yield _gauge("absent_groups", "Producer groups that are away or behind. Their checks are put off.", absent)


def _of_totals(buckets: list[BucketReport]) -> Iterator[Metric]:
    totals = summed(bucket.totals for bucket in buckets) if buckets else None
    halves_and_ops = {"half": Count.HALVES, "op": Count.OPS}
    yield _counter("records", "Halves and ops read that keep the contract.", totals, ("kind", halves_and_ops))
    yield _counter("commit_messages", "Messages committed: rows of the messages table.", totals, Count.COMMITTED)
    yield _counter("rollback_messages", "Messages rolled back.", totals, Count.ROLLED_BACK)
    yield _counter("checks", "Check requests sent. One that is resent after a crash counts once.", totals, Count.CHECKED)
    yield _counter("checks_put_off", "Checks and discards put off: group away or behind, or last check too new.", totals, Count.PUT_OFF)
    yield _counter("unknown_answers", "Ops with the action UNKNOWN.", totals, Count.UNKNOWN)
    by_reason = {str(reason): str(reason) for reason in DISCARD_REASONS}
    yield _counter("discarded_messages", "Messages discarded: rows of the discarded table.", totals, ("reason", by_reason))
    by_reason = {str(reason): counted_as for reason, counted_as in COUNTED_QUARANTINE.items()}
    yield _counter("quarantined_records", "Records quarantined: rows of the quarantine table.", totals, ("reason", by_reason))
    duplicates = {"half": Count.DUPLICATE_HALF, "op": Count.DUPLICATE_OP}
    yield _counter("duplicates", "Repeated halves and ops, which changed nothing.", totals, ("kind", duplicates))
    former = {"adopted": Count.ADOPTED, "aged_out": Count.AGED_OUT}
    yield _counter("former_records", "Records read again that a former checkpoint had dealt with (--adopt).", totals, ("kind", former))
    counts, sum_s = (None, 0.0) if totals is None else (latency_counts(totals), totals[LATENCY_SUM_MS] / 1000)
    text = "Seconds from half to commit, between the timestamps of their records."
    yield _histogram("finish_message_latency", text, LATENCY_BOUNDS_S, counts, sum_s)


def _gauge(name: str, text: str, value: float | None) -> Metric:
    return GaugeMetricFamily(f"halfway_{name}", text, value=value)


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a gauge with one value for each value of a label."""
    family = GaugeMetricFamily(f"halfway_{name}", text, labels=[label])
    for of, value in sorted(values.items()):
        family.add_metric([of], value)
    return family


def _counter(name: str, text: str, totals: Mapping[str, int] | None, of: str | tuple[str, Mapping[str, str]]) -> Metric:
    """Return a counter of one total, or of several totals by a label with fixed values."""
    label, names = of if isinstance(of, tuple) else ("", {"": of})
    family = CounterMetricFamily(f"halfway_{name}", text, labels=[label] if label else [])
    if totals is not None:
        for value, total in names.items():
            family.add_metric([value] if label else [], totals.get(total, 0))
    return family


def _histogram(name: str, text: str, bounds: tuple[float, ...], counts: list[int] | None, total: float) -> Metric:
    family = HistogramMetricFamily(f"halfway_{name}", text)
    if counts is not None:
        names = [*(str(float(bound)) for bound in bounds), "+Inf"]
        family.add_metric([], list(zip(names, accumulate(counts), strict=True)), total)
    return family
