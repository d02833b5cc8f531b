"""Time as the job knows it: the ticks it has read, and the horizon that follows from them (decision 1)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from halfway.schemas.headers import Source


class Tick(NamedTuple):
    """A heartbeat (*tick*) in one partition: every record that was appended there before it has been read."""

    source: Source
    partition: int
    partitions: int
    at_ms: int
    absent_groups: tuple[str, ...] = ()


class LatestTick(NamedTuple):
    """Time and place of the latest tick of all, and the producer groups that it names as away (R15)."""

    at_ms: int = -1
    source: Source = Source.HALF
    partition: int = -1
    absent_groups: tuple[str, ...] = ()


class TopicSize(NamedTuple):
    """How many partitions a topic has, as its latest tick says."""

    at_ms: int
    partitions: int


@dataclass(frozen=True, slots=True)
class Clock:
    """The ticks so far, from which the horizon (a low watermark) and the absent producer groups follow."""

    heard_ms: Mapping[tuple[Source, int], int] = field(default_factory=dict)
    """Topic and partition → the time of its latest tick."""
    sizes: Mapping[Source, TopicSize] = field(default_factory=dict)
    latest: LatestTick = field(default_factory=LatestTick)

    def after(self, ticks: Iterable[Tick]) -> "Clock":
        """Return the clock after more ticks, in any order. Time never goes back."""
        heard, sizes, latest = dict(self.heard_ms), dict(self.sizes), self.latest
        for tick in ticks:
            place = (tick.source, tick.partition)
            heard[place] = max(heard.get(place, tick.at_ms), tick.at_ms)
            size = TopicSize(tick.at_ms, tick.partitions)
            sizes[tick.source] = max(sizes.get(tick.source, size), size)
            latest = max(latest, LatestTick(tick.at_ms, *place, tuple(sorted(tick.absent_groups))))
        return Clock(heard, sizes, latest)

    def absent_groups(self) -> frozenset[str]:
        """Return the producer groups that are away, as the latest tick says (R15)."""
        return frozenset(self.latest.absent_groups)

    def horizon_ms(self) -> int | None:
        """Return the smallest time over all partitions of both topics; None until each partition has a tick."""
        times_ms: list[int] = []
        for source in Source:
            partitions = self.sizes[source].partitions if source in self.sizes else 0
            heard = [at_ms for (of, partition), at_ms in self.heard_ms.items() if of is source and partition < partitions]
            # A tick may name any number of partitions: iterate over those that were heard, not over that number.
            if not heard or len(heard) < partitions:
                return None
            times_ms.extend(heard)
        return min(times_ms)
