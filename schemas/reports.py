"""A bucket's report after each batch: the `outcomes` of its REPORT row. Progress line and metrics are made from it."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import numpy as np

LATENCY_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 600, 3600, 43_200, 86_400)
"""Inclusive upper bounds of the histogram of times from half to commit: RocketMQ's six, from 5 s on, and finer ones."""
LATENCY_SUM_MS = "latency_sum_ms"
_BOUNDS_MS = [round(bound * 1000) for bound in LATENCY_BOUNDS_S]
_LATENCY_KEYS = [*(f"latency_le_{bound_ms}_ms" for bound_ms in _BOUNDS_MS), "latency_more"]


@dataclass(frozen=True, slots=True)
class BucketReport:
    """The report of one bucket after one batch."""

    bucket: int
    horizon_ms: int | None
    pending: int
    checked: int
    """Pending transactions with at least one check."""
    oldest_ms: int | None
    """Start of the oldest pending half."""
    entries: int
    """All entries of its state."""
    absent_groups: int
    """Producer groups that are away or behind, as the latest ticks say (R15)."""
    counts: Mapping[str, int]
    """What this batch counted: `Count`, and quarantined records by their `Reason`."""
    totals: Mapping[str, int]
    """The same since the checkpoint began, and discards by their `Reason` and the latencies of `count_latencies`."""
    read_digest: int = 0
    """Of the times of the last records that were read: after other records it is another one. 0 if not known."""

    def to_json(self) -> str:
        """Return the report as JSON, the form in which it passes through Spark."""
        return json.dumps({field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def from_json(cls, text: str) -> "BucketReport":
        """Parse the result of `to_json`."""
        return cls(**json.loads(text))


def count_latencies(latencies_ms: Iterable[int]) -> Counter[str]:
    """Count times from half to commit for each bound, and add them up.

    A time below 0 counts as 0. It occurs where producers' clocks set the record timestamps.
    """
    known_ms = np.maximum(np.fromiter(latencies_ms, np.int64), 0)
    per_bound = np.bincount(np.searchsorted(_BOUNDS_MS, known_ms)).tolist()
    counted = Counter({key: number for key, number in zip(_LATENCY_KEYS, per_bound, strict=False) if number})
    counted[LATENCY_SUM_MS] = int(known_ms.sum())
    return counted


def latency_counts(totals: Mapping[str, int]) -> list[int]:
    """Return how many latencies are in each interval between bounds. The last number is for those above all bounds."""
    return [totals.get(key, 0) for key in _LATENCY_KEYS]


def common_horizon_ms(horizons: Iterable[int | None]) -> int | None:
    """Return the horizon over several buckets, the smallest; None if one is undefined, or there are no buckets."""
    known = list(horizons)
    return None if None in known else min((horizon for horizon in known if horizon is not None), default=None)
