"""Prometheus metrics of a relay. The relay's report and its positions in Kafka hold the figures."""

import time
from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from halfway.pipelines.relay.relay import Relay

_NAMED = 50
"""Services choose the names of topics: a label must not have any number of values."""


class RelayMetrics(Collector):
    """Collects the metrics of a relay when Prometheus scrapes them.

    Args:
        relay: the relay.
        clock: returns seconds since 1970. No outcome depends on it.
    """

    def __init__(self, relay: Relay, clock: Callable[[], float] = time.time) -> None:
        """Take the relay."""
        self._relay, self._clock = relay, clock

    def collect(self) -> Iterator[Metric]:
        """Yield every metric. A relay that stands by has no lag and knows of no stopped topic: the active one has."""
        report, now_s = self._relay.report, self._clock()
        behind_ms, positions = report.behind_since_ms, report.positions
        yield _gauge("active", "1 for the active relay of its name, 0 for one that stands by or cannot relay.", float(report.is_active))
        has_read = report.is_active and (behind_ms is not None or report.last_look_s is not None)
        lag_s = None if not has_read else 0.0 if behind_ms is None else max(0.0, now_s - behind_ms / 1000)
        yield _gauge("lag_seconds", "Age of the newest commit that was relayed while there are more; 0 if all were.", lag_s)
        lag_batches = report.batches_behind if report.is_active else None
        yield _gauge("lag_batches", "Batches of the job that are not relayed yet, as of the last look at the table.", lag_batches)
        yield _gauge("last_look_timestamp_seconds", "When this relay last read the table to its end (Unix time).", report.last_look_s)
        text = f"1 for each topic that is stopped, up to {_NAMED} topics, by what it refused."
        stopped = GaugeMetricFamily("halfway_relay_stopped_topics", text, labels=["topic", "refusal"])
        if report.is_active and positions is not None:
            for named, stop in sorted(positions.stopped.items())[:_NAMED]:
                stopped.add_metric([named, stop.refusal], 1)
        yield stopped
        yield _counter("messages", "Messages relayed since this relay started.", report.relayed)
        yield _counter("transactions", "Kafka transactions committed since this relay started.", report.transactions)
        yield _counter("refusals", "Times that a topic was stopped since this relay started.", report.refusals)
        text = "Times that Kafka or the table was away, or another relay took over, since this relay started."
        yield _counter("interruptions", text, report.interruptions)


def _gauge(name: str, text: str, value: float | None) -> Metric:
    return GaugeMetricFamily(f"halfway_relay_{name}", text, value=value)


def _counter(name: str, text: str, value: int) -> Metric:
    return CounterMetricFamily(f"halfway_relay_{name}", text, value=value)
