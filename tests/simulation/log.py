"""Kafka, as far as Halfway depends on it: partitions, the brokers' clocks, retention, transactions, consumer groups."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

from halfway.pipelines.kafka.range_reader import OffsetRange
from tests.simulation.history import CHECK, HALF, OP, GroupCommit, Headers, History, KafkaState, Place, Record

BROKERS = 2
CREATE_TIME, LOG_APPEND_TIME = 0, 1
"""Kafka's numbers of the types of a record's time."""


@dataclass(slots=True)
class Clock:
    """True time, and how far the clocks of the machines are off. All in ms."""

    now_ms: int = 1_700_000_000_000
    seq: int = 0
    brokers_ms: list[int] = field(default_factory=lambda: [0] * BROKERS)
    publisher_ms: int = 0

    def next_seq(self) -> int:
        """Return the number of the next event."""
        self.seq += 1
        return self.seq


@dataclass(slots=True)
class Partition:
    """The log of a partition. A transaction's end takes an offset too, and is no record (a control record)."""

    records: list[Record | None] = field(default_factory=list)
    first: int = 0
    open: dict[int, int] = field(default_factory=dict)
    """Open transaction → its first offset here."""

    @property
    def end(self) -> int:
        """Return the offset after the last one (high watermark)."""
        return len(self.records)

    def visible_end(self, *, committed_only: bool) -> int:
        """Return the end for a reader: the last stable offset, if it reads committed records only."""
        return min([self.end, *self.open.values()]) if committed_only else self.end


@dataclass(slots=True)
class Group:
    """A consumer group of the check topic."""

    members: list[str] = field(default_factory=list)
    committed: dict[int, int] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        """Return True if Kafka lists the group: it forgets a group without members and offsets."""
        return bool(self.members or self.committed)


class Read(NamedTuple):
    """What a fetch of one offset found. A record that is None is gone, aborted, or a control record."""

    record: Record | None
    is_waiting: bool = False
    """An open transaction is before it: nothing is said yet."""


class Kafka:
    """A cluster with three topics.

    With CreateTime topics, records have the same times: those on the clocks of their producers.
    """

    def __init__(self, clock: Clock, history: History, partitions: int, timestamp_type: int = LOG_APPEND_TIME) -> None:
        self.clock, self.history, self.timestamp_type = clock, history, timestamp_type
        self.topics: dict[str, list[Partition]] = {topic: [Partition() for _ in range(partitions)] for topic in (HALF, OP, CHECK)}
        self.groups: dict[str, Group] = {}
        self.transactions = 0
        self.lagging: dict[Place, int] = {}
        """Partition → how many more batches do not see what is new there: its leader is slow."""

    def append(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        *,
        partition: int | None = None,
        tx: int | None = None,
        flaw: str | None = None,
        is_stray: bool = False,
    ) -> Record:
        """Append a record with the time of its partition's leader."""
        of_topic = self.topics[topic]
        number = partition if partition is not None else crc32(key or b"") % len(of_topic)
        into = of_topic[number]
        state = KafkaState.COMMITTED if tx is None else KafkaState.OPEN
        at_ms = self.broker_ms(topic, number)
        record = Record(topic, number, into.end, at_ms, key, value, headers, self.clock.next_seq(), state, flaw, is_stray, tx=tx)
        if tx is not None:
            into.open.setdefault(tx, into.end)
        into.records.append(record)
        self.history.records.append(record)
        return record

    def broker_ms(self, topic: str, partition: int) -> int:
        """Return the time on the clock of a partition's leader."""
        return self.clock.now_ms + self.clock.brokers_ms[(partition + (topic == OP)) % BROKERS]

    def begin(self) -> int:
        """Begin a transaction and return its number."""
        self.transactions += 1
        return self.transactions

    def end(self, tx: int, state: KafkaState) -> None:
        """Commit or abort a transaction."""
        for of_topic in self.topics.values():
            for into in of_topic:
                if into.open.pop(tx, None) is None:
                    continue
                for record in into.records:
                    if record is not None and record.tx == tx:
                        record.state = state
                into.records.append(None)

    def open_transactions(self) -> set[int]:
        """Return the numbers of the open transactions."""
        return {tx for of_topic in self.topics.values() for into in of_topic for tx in into.open}

    def read(self, place: Place, begin: int, end: int, *, committed_only: bool) -> Iterator[Record]:
        """Yield the records between two offsets."""
        into = self.topics[place[0]][place[1]]
        for record in into.records[max(begin, into.first) : end]:
            if record is not None and not (committed_only and record.state is KafkaState.ABORTED):
                yield record

    def fetch(self, place: Place, offset: int, *, committed_only: bool) -> Read:
        """Read one offset."""
        of_topic = self.topics[place[0]]
        into = of_topic[place[1]] if place[1] < len(of_topic) else Partition()
        if committed_only and offset >= into.visible_end(committed_only=True):
            return Read(None, is_waiting=bool(into.open))
        return Read(next(self.read(place, offset, offset + 1, committed_only=committed_only), None))

    def delete(self, topic: str, partition: int, before: int) -> None:
        """Delete the records of a partition before an offset."""
        into = self.topics[topic][partition]
        for record in into.records[into.first : before]:
            if record is not None:
                record.deleted_seq = self.clock.next_seq()
        into.first = max(into.first, min(before, into.end))

    def expire(self, topic: str, retention_ms: int) -> None:
        """Delete what is older than the retention."""
        for number, into in enumerate(self.topics[topic]):
            limit_ms = self.broker_ms(topic, number) - retention_ms
            before = into.first
            while before < into.end and (into.records[before] is None or into.records[before].at_ms < limit_ms):  # type: ignore[union-attr]
                before += 1
            self.delete(topic, number, before)

    def retained(self) -> dict[str, dict[int, OffsetRange]]:
        """Return the offsets that each partition retains."""
        return {
            topic: {number: OffsetRange(each.first, each.end) for number, each in enumerate(self.topics[topic])} for topic in (HALF, OP)
        }

    def ends(self) -> dict[str, dict[int, int]]:
        """Return where each partition ends."""
        return {topic: {number: offsets.end for number, offsets in of_topic.items()} for topic, of_topic in self.retained().items()}

    def deleted_before_ms(self, topic: str) -> int:
        """Return a time before which every record of a topic is deleted; 0 if it may hold an older one."""
        first_ms = []
        for partition in self.topics[topic]:
            if partition.first == 0:
                return 0
            first_ms += [record.at_ms for record in partition.records[partition.first :] if record is not None][:1]
        return min(first_ms, default=0)

    def group(self, name: str) -> Group:
        """Return a consumer group, known to Kafka or not."""
        return self.groups.setdefault(name, Group())

    def commit(self, name: str, partition: int, offset: int) -> None:
        """Commit a group's offset in the check topic."""
        self.group(name).committed[partition] = offset
        self.history.commits.append(GroupCommit(self.clock.next_seq(), name, partition, offset))
