"""Time as the job knows it: what it has read, and the horizon and the read mark that follow from that (decision 1)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from halfway.schemas.headers import Source
from halfway.schemas.tick_value import ALL_ASKED

SourcePartition = tuple[Source, int]
"""A partition of the half or the op topic."""
Times = Mapping[Source, Mapping[int, int]]
"""Topic → partition → time in ms."""
Groups = Mapping[Source, Mapping[int, tuple[str, ...]]]
"""Topic → partition → producer groups. Partitions share a tuple: a thousand of them may name a thousand groups."""
NO_TIME = -1
"""In place of the time of a partition that was read, and in which all records break the contract: they prove none."""
_Place = TypeVar("_Place")
_Said = TypeVar("_Said")


class Tick(NamedTuple):
    """A heartbeat (*tick*) in one partition: every record that was appended there before it has been read."""

    source: Source
    partition: int
    partitions: int
    at_ms: int
    absent_groups: tuple[str, ...] = ()
    asked_ms: int = ALL_ASKED
    """The horizon up to which the job's checks had been in the check topic for half an interval (R5)."""


def read_on(read_ms: Mapping[_Place, int], later_ms: Mapping[_Place, int]) -> dict[_Place, int]:
    """Return the last times that were read in some places, after later records there."""
    return {**later_ms, **read_ms, **{place: at_ms for place, at_ms in later_ms.items() if at_ms != NO_TIME}}


def latest_ticks(ticks: Iterable[Tick]) -> list[Tick]:
    """Return the last tick of each partition. Those of a partition must come as its log has them.

    It need not be the greatest: the clock of a broker may have been ahead, and was set right within the batch.
    """
    return list({(tick.source, tick.partition): tick for tick in ticks}.values())


class Floor(NamedTuple):
    """The last horizon and read mark that were defined; -1 before the first. Neither goes back."""

    horizon_ms: int = -1
    read_mark_ms: int = -1


@dataclass(frozen=True, slots=True)
class Clock:
    """The times that the job has read. Horizon (a low watermark), read mark and absent groups follow from them.

    Each time of a partition is the last one read there, and not the greatest that ever was: the clock of a broker may
    have been ahead, and what it said must not stand for what is read later. Horizon and read mark never go back all
    the same.
    """

    tick_ms: Times = field(default_factory=lambda: {source: {} for source in Source})
    """The time of the latest tick of each partition."""
    read_ms: Times = field(default_factory=lambda: {source: {} for source in Source})
    """The last time that the broker gave a record of a partition, where that is later than its latest tick; NO_TIME
    where none of them keeps the contract, and there is no tick yet."""
    asked_ms: Times = field(default_factory=lambda: {source: {} for source in Source})
    """What the latest tick of each partition says of checks (R5); `ALL_ASKED` is left out."""
    partition_counts: Times = field(default_factory=lambda: {source: {} for source in Source})
    """How many partitions the topic has, as the latest tick of each partition says. The greatest number counts."""
    absent: Groups = field(default_factory=lambda: {source: {} for source in Source})
    """Which groups the latest tick of each partition names (R15); a partition whose tick names none is left out."""
    floor: Floor = field(default_factory=Floor)

    def after(self, ticks: Sequence[Tick], read_ms: Mapping[SourcePartition, int]) -> "Clock":
        """Return the clock after a batch.

        Args:
            ticks: those of a partition as its log has them, the partitions in any order.
            read_ms: partition → the last time that the broker gave a record there that keeps the contract, or NO_TIME.
        """
        if not ticks and not read_ms:
            return self
        said = latest_ticks(ticks)
        at_tick, read, asked, counts, absent = {}, {}, {}, {}, {}
        for source in Source:
            of_topic = [tick for tick in said if tick.source is source]
            at_tick[source] = {**self.tick_ms[source], **{tick.partition: tick.at_ms for tick in of_topic}}
            counts[source] = {**self.partition_counts[source], **{tick.partition: tick.partitions for tick in of_topic}}
            now = {**self.asked_ms[source], **{tick.partition: tick.asked_ms for tick in of_topic}}
            asked[source] = {partition: asked_ms for partition, asked_ms in now.items() if asked_ms != ALL_ASKED}
            named = {**self.absent[source], **{tick.partition: tick.absent_groups for tick in of_topic}}
            absent[source] = {partition: groups for partition, groups in named.items() if groups}
            fresh = {partition: at_ms for (of, partition), at_ms in read_ms.items() if of is source}
            times_ms = read_on(self.read_ms[source], fresh)
            read[source] = {
                partition: at_ms for partition, at_ms in times_ms.items() if at_ms > at_tick[source].get(partition, NO_TIME - 1)
            }
        clock = Clock(at_tick, read, asked, counts, absent, self.floor)
        horizon_ms, read_mark_ms = clock.horizon_ms(), clock.read_mark_ms()
        return clock if horizon_ms is None or read_mark_ms is None else replace(clock, floor=Floor(horizon_ms, read_mark_ms))

    def last_ms(self, source: Source) -> dict[int, int]:
        """Return partition → the time of the last record that was read, of those that keep the contract.

        With CreateTime it is that of the last tick: a producer's clock tells no order.
        """
        read_ms = {partition: at_ms for partition, at_ms in self.read_ms[source].items() if at_ms != NO_TIME}
        return {**self.tick_ms[source], **read_ms}

    def absent_groups(self) -> frozenset[str]:
        """Return the producer groups that are away or behind, as the latest tick of any partition says (R15).

        Not as the newest of all says: where a backlog is read in parts, that tick may have been written after a group's
        return, and what the group has answered since is not read yet.
        """
        distinct = {id(groups): groups for groups in self._counted(self.absent)}
        return frozenset().union(*distinct.values())

    def partitions_of(self, source: Source) -> int:
        """Return how many partitions a topic has; 0 before its first tick. An older tick may count fewer."""
        return max(self.partition_counts[source].values(), default=0)

    def asked_horizon_ms(self) -> int:
        """Return the horizon up to which checks count at the present one (R5): the smallest over all partitions."""
        return min(self._counted(self.asked_ms), default=ALL_ASKED)

    def _counted(self, said: Mapping[Source, Mapping[int, _Said]]) -> Iterator[_Said]:
        """Yield what was said in the partitions that the topics have."""
        for source in Source:
            partitions = self.partitions_of(source)
            yield from (each for partition, each in said[source].items() if partition < partitions)

    def horizon_ms(self) -> int | None:
        """Return the smallest time over all partitions of both topics; None until each partition has a tick."""
        times_ms: list[int] = []
        for source in Source:
            partitions = self.partitions_of(source)
            # A tick may name any number of partitions: iterate over those that have one, not over that number.
            at_ticks = [at_ms for partition, at_ms in self.tick_ms[source].items() if partition < partitions]
            if not at_ticks or len(at_ticks) < partitions:
                return None
            times_ms.extend(at_ticks)
        return max(self.floor.horizon_ms, min(times_ms))

    def read_mark_ms(self) -> int | None:
        """Return the time up to which everything was read, by records too; None while the horizon is undefined.

        In a partition the times of a clock that is not set back only grow: the newest that was read proves as much as
        a tick.
        """
        horizon_ms = self.horizon_ms()
        if horizon_ms is None:
            return None
        # A partition may hold records before the first tick that counts it. Without a time nothing is proved there.
        return max(
            horizon_ms, self.floor.read_mark_ms, min(min({**self.tick_ms[source], **self.read_ms[source]}.values()) for source in Source)
        )
