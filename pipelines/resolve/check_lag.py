"""Finds the producer groups that are behind (R15): a check request has waited for them for longer than an interval.

The groups' committed offsets tell. All groups share the check topic, and a service commits its offset past the requests
of others: the topic is only read where a group has not done so.
"""

from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from typing import cast

from confluent_kafka import Consumer, IsolationLevel, Message, TopicPartition
from confluent_kafka.admin import OffsetSpec
from pyspark.sql import SparkSession

from halfway.pipelines.kafka.admin import Admin, partition_counts
from halfway.pipelines.kafka.java_admin import JavaAdmin
from halfway.pipelines.kafka.range_reader import READ_UNCOMMITTED, OffsetRange, PartitionReader, ranges_consumer
from halfway.pipelines.kafka.rights import FETCH_GROUP
from halfway.schemas.headers import PGROUP, HeaderList, check_group
from halfway.schemas.settings import KafkaSettings

GROUPS_AT_ONCE = 100
"""How many groups are asked about in a round: an answer takes Python 2 ms a group."""
REQUEST_LIMIT_S = 5.0
_FIRST, _END = OffsetSpec.earliest(), OffsetSpec.latest()  # type: ignore[no-untyped-call]


class CheckLag:
    """Knows how far each producer group has passed its check requests."""

    def __init__(self, spark: SparkSession, kafka: KafkaSettings, client: Admin) -> None:
        """Store the configuration. Connects with the first round.

        Args:
            spark: the session whose JVM asks for committed offsets.
            kafka: where Kafka is.
            client: asks for the rest.
        """
        self._kafka, self._topic, self._client = kafka, kafka.check_topic, client
        self._spark = spark
        self._java_admin: JavaAdmin | None = None
        self._looked: dict[str, dict[int, int]] = {}
        """Group → partition → the offset before which no request waits for the group."""
        self._waiting: dict[str, tuple[int, int]] = {}
        """Group → partition and offset of a request that it has not passed."""
        self._asked: dict[str, int] = {}
        """Group → the round in which it was asked about last."""
        self._round = 0

    def close(self) -> None:
        """Disconnect. The next round connects again."""
        java_admin, self._java_admin = self._java_admin, None
        if java_admin is not None:
            java_admin.close()

    def behind(self, groups: Collection[str], before_ms: int) -> dict[str, tuple[int, int]]:
        """Return the groups for which a request waits that was published before `before_ms`, with its place.

        A group that has not been asked about yet is asked about now; of the others the `GROUPS_AT_ONCE` whose answers
        are the oldest, if the topic can hold something for them.

        Args:
            groups: producer groups that have members.
            before_ms: by record timestamp.

        Raises:
            KafkaException: Kafka does not answer.
            HalfwayError: Kafka does not answer, or the topic cannot be read.
        """
        self._round += 1
        for known in (self._looked, self._waiting, self._asked):
            for group in known.keys() - set(groups):
                del known[group]
        old = self._published_before(before_ms) if groups else {}
        committed = self._committed(self._chosen([group for group in groups if self._may_wait(group, old)]), old)
        self._asked.update(dict.fromkeys(committed, self._round))
        moved = {group: offsets for group, offsets in committed.items() if not self._still_waits(group, offsets, old)}
        found = self._find(moved, old)
        for group in moved:
            self._waiting.pop(group, None)
        self._waiting.update(found)
        return dict(self._waiting)

    def _may_wait(self, group: str, old: Mapping[int, OffsetRange]) -> bool:
        looked = self._looked.get(group, {})
        return group in self._waiting or any(first < end != looked.get(partition) for partition, (first, end) in old.items())

    def _chosen(self, groups: Iterable[str]) -> list[str]:
        by_age = sorted(groups, key=lambda group: self._asked.get(group, 0))
        new = sum(group not in self._asked for group in by_age)
        return by_age[: max(new, GROUPS_AT_ONCE)]

    def _still_waits(self, group: str, committed: Mapping[int, int], old: Mapping[int, OffsetRange]) -> bool:
        partition, offset = self._waiting.get(group, (-1, -1))
        return partition in old and old[partition].first <= offset < old[partition].end and committed.get(partition, 0) <= offset

    def _find(self, groups: Mapping[str, Mapping[int, int]], old: Mapping[int, OffsetRange]) -> dict[str, tuple[int, int]]:
        """Return a request that waits for each group for which one does, with its place.

        Args:
            groups: producer group → partition → the offset that it has committed.
            old: the offsets to search, by partition.
        """
        found: dict[str, tuple[int, int]] = {}
        with ExitStack() as stack:
            consumer: Consumer | None = None
            for partition, (first, end) in old.items():
                starts = {
                    group: max(first, committed.get(partition, 0), self._start(group, partition, end))
                    for group, committed in groups.items()
                }
                wanted = {group: start for group, start in starts.items() if start < end}
                waiting: dict[str, int] = {}
                if wanted:
                    # A request that an open transaction of another writer hides from its group waits too.
                    consumer = consumer or stack.enter_context(ranges_consumer(self._kafka, FETCH_GROUP, READ_UNCOMMITTED))
                    waiting = self._first_requests(consumer, partition, wanted, end)
                for group in groups:
                    self._looked.setdefault(group, {})[partition] = waiting.get(group, end)
                found.update({group: (partition, offset) for group, offset in waiting.items()})
        return found

    def _start(self, group: str, partition: int, end: int) -> int:
        """Return from where on a partition has to be searched. An end that was further on is that of another topic."""
        looked = self._looked.get(group, {}).get(partition, 0)
        return looked if looked <= end else 0

    def _first_requests(self, consumer: Consumer, partition: int, wanted: Mapping[str, int], end: int) -> dict[str, int]:
        """Return the offset of the first request of each group from its offset on, and before `end`."""
        left, found = dict(wanted), dict[str, int]()
        with PartitionReader(consumer, self._topic, partition) as reader:
            for record in reader.range(min(left.values()), end):
                group, offset = group_of(record), record.offset() or 0
                if group is not None and left.get(group, end) <= offset:
                    found[group] = offset
                    del left[group]
                    if not left:
                        break
        return found

    def _published_before(self, before_ms: int) -> dict[int, OffsetRange]:
        """Return the offsets of each partition's requests from before a time, as far as they are kept."""
        places = [
            TopicPartition(self._topic, number) for number in range(partition_counts(self._client, [self._topic]).get(self._topic, 0))
        ]
        if not places:
            return {}
        first, since, end = (
            self._client.list_offsets(
                dict.fromkeys(places, spec), isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=REQUEST_LIMIT_S
            )
            for spec in (_FIRST, OffsetSpec.for_timestamp(max(0, before_ms)), _END)
        )
        found = {}
        for place in places:
            offset = self._client.result(since[place]).offset
            low, high = self._client.result(first[place]).offset, self._client.result(end[place]).offset
            # -1: every record is older.
            found[place.partition] = OffsetRange(low, high if offset < 0 else offset)
        return found

    def _committed(self, groups: Collection[str], partitions: Iterable[int]) -> dict[str, dict[int, int]]:
        """Return the offsets that groups have committed, by partition; no group that Kafka gives no answer for."""
        places = [(self._topic, partition) for partition in partitions]
        if not groups:
            return {}
        self._java_admin = self._java_admin or JavaAdmin(self._spark, self._kafka)
        found = self._java_admin.committed([check_group(group) for group in groups], places)
        by_group = {group: found.get(check_group(group)) for group in groups}
        return {
            group: {partition: offset for (_, partition), offset in offsets.items()}
            for group, offsets in by_group.items()
            if offsets is not None
        }


def group_of(record: Message) -> str | None:
    """Return the producer group that a check request is for; None if the record is none."""
    try:
        values = [value for name, value in cast(HeaderList, record.headers() or []) if name == PGROUP]
        return values[0].decode() if values and isinstance(values[0], bytes) else None
    except UnicodeDecodeError:
        return None
