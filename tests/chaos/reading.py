"""What the job had read when it decided, as the ticks in the op topic prove it. Times are in ms."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple


class Tick(NamedTuple):
    """A tick in the op topic that moves time."""

    partition: int
    offset: int
    at_ms: int


class Reading:
    """Tells whether a verdict had been read when the job decided at a horizon (R9).

    One clock stamps all records of a partition while it has one leader. Then the verdicts up to the horizon are those
    with earlier times. A new leader may have another clock: there the ticks around a verdict prove what was read.
    """

    def __init__(self, ticks: Iterable[Tick]) -> None:
        self._offsets: dict[int, list[int]] = defaultdict(list)
        self._times_ms: dict[int, list[int]] = defaultdict(list)
        for partition, offset, at_ms in ticks:
            # Only ticks that moved the partition's time on.
            if not self._times_ms[partition] or at_ms > self._times_ms[partition][-1]:
                self._offsets[partition].append(offset)
                self._times_ms[partition].append(at_ms)

    def had(self, partition: int, offset: int, at_ms: int, horizon_ms: int) -> bool:
        """Return True if the verdict at a place of the op topic, with the time `at_ms`, had been read."""
        times_ms = self._times_ms[partition]
        following = bisect_right(self._offsets[partition], offset)
        if following < len(times_ms) and times_ms[following] <= horizon_ms:
            return True
        return at_ms <= horizon_ms and not (following and times_ms[following - 1] >= horizon_ms)
