"""Finds the producer groups that are behind (R15): a check request has waited for them for half an interval.

The groups' committed offsets tell. Groups may share a check topic, and a service commits its offset past the requests
of others: a topic is only read where a group has not done so. In a place that cannot be read, the first record that a
group has not passed counts as a request that waits for it.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import NamedTuple

from confluent_kafka import OFFSET_END, Consumer, IsolationLevel, KafkaException, Message, TopicPartition
from confluent_kafka.admin import ListOffsetsResultInfo, OffsetSpec
from pyspark.sql import SparkSession

from halfway.pipelines.kafka.admin import Admin, describe_each
from halfway.pipelines.kafka.java_admin import JavaAdmin, TopicPlace
from halfway.pipelines.kafka.range_reader import READ_COMMITTED, READ_UNCOMMITTED, PartitionReader, ranges_consumer
from halfway.pipelines.kafka.rights import FETCH_GROUP
from halfway.schemas.errors import AccessError, KafkaUnavailableError
from halfway.schemas.headers import PGROUP, check_group
from halfway.schemas.records import headers_of
from halfway.schemas.settings import KafkaSettings

log = logging.getLogger(__name__)

GROUPS_AT_ONCE = 100
"""How many groups are asked about in a round: an answer takes Python 2 ms a group."""
_ASK_LIMIT_S = 5.0
PLACE_LIMIT_S = 5.0
"""How long the first place that cannot be read holds up a round. Each further one gets half of the time of the last."""
RETRY_ROUNDS = 60
"""How many rounds later such a place is read again: earlier if it got less time."""
_NOWHERE: tuple[TopicPlace, int] = (("", -1), -1)
"""Where a request may wait for a group that Kafka gives no answer for."""
_FIRST, _END = OffsetSpec.earliest(), OffsetSpec.latest()  # type: ignore[no-untyped-call]
_ANY_STATE = IsolationLevel.READ_UNCOMMITTED


class RequestOffsets(NamedTuple):
    """The offsets of a place of a check topic."""

    first: int
    """The first that is kept."""
    before: int
    """The first that is not old."""
    stable: int
    """The first of an open Kafka transaction, or the end: no group has read on from there (R18)."""
    end: int


_ANY_OFFSETS = RequestOffsets(0, *[2**63 - 1] * 3)
"""The offsets of a place for which Kafka does not tell them."""


class OldRequests(NamedTuple):
    """The offsets of the old requests of a place, and from which of them on an open transaction hides them."""

    first: int
    end: int
    stable: int


class CheckLag:
    """Knows how far each producer group has passed its check requests."""

    def __init__(self, spark: SparkSession, kafka: KafkaSettings, client: Admin) -> None:
        """Store the configuration. Connects with the first round.

        Args:
            spark: the session whose JVM asks for committed offsets.
            kafka: where Kafka is.
            client: asks for the rest.
        """
        self._kafka, self._client = kafka, client
        self._spark = spark
        self._java_admin: JavaAdmin | None = None
        self._looked: dict[str, dict[TopicPlace, int]] = {}
        """Group → place → the offset before which no request waits for the group."""
        self._waiting: dict[str, tuple[TopicPlace, int]] = {}
        """Group → place and offset of a request that it has not passed."""
        self._hidden: set[str] = set()
        """The groups from which an open transaction hides that request. It may be aborted: then nobody reads it."""
        self._unread: dict[TopicPlace, int] = {}
        """A place that could not be read → the round from which on it is read again."""
        self._refused: set[str] = set()
        """The topics that the job may not describe, or that are missing now."""
        self._unanswered: set[str] = set()
        """The groups that Kafka gave no answer for when they were asked about last."""
        self._topic_ids: dict[str, str] = {}
        self._round = 0
        self._ends: list[tuple[float, dict[TopicPlace, int]]] = []
        """When earlier rounds began, and where each place ended in them: requests before that are at least as old."""
        self._told_s: dict[str, float] = {}
        """Group → as of when it is known whether it is behind."""
        self.known_s = -math.inf
        """As of when that is known of all groups: checks count that were sent half an interval before (R5)."""

    def close(self) -> None:
        """Disconnect. The next round connects again."""
        java_admin, self._java_admin = self._java_admin, None
        if java_admin is not None:
            java_admin.close()

    def untold(self) -> set[str]:
        """Return the groups for which Kafka has given no answer. They are behind."""
        return {group for group, place in self._waiting.items() if place == _NOWHERE}

    def behind(self, groups: Collection[str], before_ms: int, began_s: float, before_s: float) -> dict[str, tuple[TopicPlace, int]]:
        """Return the groups for which an old request waits, with its place and offset.

        A request is old by its timestamp, or because a round saw it that began before `before_s`: the broker that gave
        it the timestamp may have another clock. What the first round that looks at a topic finds is of unknown age, and
        old too: what a former run sent counts by the time for which the job was down (`SentChecks.take_up`). A group
        that Kafka gives no answer for counts as behind.

        A new group is asked about now; of the others the `GROUPS_AT_ONCE` of which it was known longest ago, if their
        topic can hold something for them.

        Args:
            groups: producer groups that have members.
            before_ms: by record timestamp.
            began_s: when this round began, by a clock that does not jump.
            before_s: by the same clock.

        Raises:
            KafkaException: Kafka does not answer.
            HalfwayError: Kafka does not answer.
        """
        self._round += 1
        for known in (self._looked, self._waiting, self._told_s):
            for group in known.keys() - set(groups):
                del known[group]
        offsets = self._offsets({self._kafka.check_topic_of(group) for group in groups}, before_ms)
        old = self._old(offsets, began_s, before_s)
        may_wait = {group for group in groups if self._may_wait(group, old)}
        chosen = self._chosen(may_wait)
        committed = self._committed(chosen, old)
        moved = {group: offsets for group, offsets in committed.items() if not self._still_waits(group, offsets, old)}
        found = self._find(moved, old)
        # As new as the round that has seen the old requests.
        now_s = min(began_s, self._ends[0][0] + began_s - before_s)
        put_off = may_wait - chosen
        self._told_s = {group: self._told_s[group] if group in put_off else now_s for group in groups}
        self.known_s = min(self._told_s.values(), default=now_s)
        untold = (chosen - committed.keys()) | {group for group in groups if self._kafka.check_topic_of(group) in self._refused}
        still = {group: place for group, place in self._waiting.items() if group not in moved}
        # A group without an answer stays behind until it has one, which takes some rounds if there are many groups.
        self._waiting = {**dict.fromkeys(untold, _NOWHERE), **still, **found}
        hidden = {group for group, (place, offset) in found.items() if offset >= old[place].stable}
        self._hidden = self._hidden & still.keys() | hidden
        return dict(self._waiting)

    def known_groups(self) -> set[str]:
        """Return the groups that the last complete round was about."""
        return set(self._told_s)

    def _old(self, offsets: Mapping[TopicPlace, RequestOffsets], began_s: float, before_s: float) -> dict[TopicPlace, OldRequests]:
        """Return the offsets of old requests, and note where each place ends now."""
        self._ends.append((began_s, {place: each.end for place, each in offsets.items() if each is not _ANY_OFFSETS}))
        while len(self._ends) > 1 and self._ends[1][0] <= before_s:
            del self._ends[0]
        return {
            place: OldRequests(each.first, max(each.before, min(self._seen(place), each.end)), each.stable)
            for place, each in offsets.items()
        }

    def _seen(self, place: TopicPlace) -> int:
        """Return where a place ended in the first round that counts and has seen it.

        That may be a later one: its groups had no member before, or Kafka did not answer. Then what it has found is of
        unknown age. What came after it is not old.
        """
        return next((ends[place] for _, ends in self._ends if place in ends), _ANY_OFFSETS.end)

    def _may_wait(self, group: str, old: Mapping[TopicPlace, OldRequests]) -> bool:
        looked = self._looked.get(group, {})
        own = ((place, old[place]) for place in self._places_of(group, old))
        return group in self._waiting or any(each.first < each.end != looked.get(place) for place, each in own)

    def _places_of(self, group: str, places: Iterable[TopicPlace]) -> list[TopicPlace]:
        """Return the places in the topic of a group's requests."""
        own = self._kafka.check_topic_of(group)
        return [place for place in places if place[0] == own]

    def _chosen(self, groups: Iterable[str]) -> set[str]:
        by_age = sorted(groups, key=lambda group: self._told_s.get(group, -math.inf))
        new = sum(group not in self._told_s for group in by_age)
        return set(by_age[: max(new, GROUPS_AT_ONCE)])

    def _still_waits(self, group: str, committed: Mapping[TopicPlace, int], old: Mapping[TopicPlace, OldRequests]) -> bool:
        place, offset = self._waiting.get(group, _NOWHERE)
        is_proven = place in old and place not in self._unread and (group not in self._hidden or offset >= old[place].stable)
        return is_proven and old[place].first <= offset < old[place].end and committed.get(place, 0) <= offset

    def _find(
        self, groups: Mapping[str, Mapping[TopicPlace, int]], old: Mapping[TopicPlace, OldRequests]
    ) -> dict[str, tuple[TopicPlace, int]]:
        """Return a request that waits for each group for which one does, with its place.

        Args:
            groups: producer group → place → the offset that it has committed.
            old: the offsets to search, by place.
        """
        found: dict[str, tuple[TopicPlace, int]] = {}
        limit_s = PLACE_LIMIT_S
        with ExitStack() as stack:
            consumers = dict[str, Consumer]()

            def consumer_of(isolation_level: str) -> Consumer:
                if isolation_level not in consumers:
                    consumers[isolation_level] = stack.enter_context(ranges_consumer(self._kafka, FETCH_GROUP, isolation_level))
                return consumers[isolation_level]

            for place in sorted(old, key=lambda place: self._unread.get(place, 0)):
                first, end, _ = old[place]
                starts = {
                    group: max(first, committed.get(place, 0), self._looked.get(group, {}).get(place, 0))
                    for group, committed in groups.items()
                    if self._kafka.check_topic_of(group) == place[0]
                }
                wanted = {group: start for group, start in starts.items() if start < end}
                waiting = wanted
                if self._unread.get(place, 0) <= self._round:
                    try:
                        if wanted:
                            waiting = self._first_requests(consumer_of, place, wanted, old[place], limit_s)
                        self._note_read(place)
                    except (KafkaException, KafkaUnavailableError) as error:
                        self._note_unread(place, error, round(RETRY_ROUNDS * limit_s / PLACE_LIMIT_S))
                        limit_s /= 2
                for group in starts:
                    self._looked.setdefault(group, {})[place] = waiting.get(group, end)
                found.update({group: (place, offset) for group, offset in waiting.items()})
        return found

    def _note_unread(self, place: TopicPlace, error: Exception, rounds: int) -> None:
        """Remember that a place could not be read, and not to try again for some rounds."""
        if place not in self._unread:
            log.warning(
                "event=check_topic_not_read topic=%r partition=%d effect=groups_that_have_not_passed_it_count_as_behind cause=%r",
                *place,
                str(error.args[0]),
            )
        self._unread[place] = self._round + rounds

    def _note_read(self, place: TopicPlace) -> None:
        if self._unread.pop(place, None) is not None:
            log.info("event=check_topic_not_read_no_more topic=%r partition=%d", *place)

    def _first_requests(
        self, consumer_of: Callable[[str], Consumer], place: TopicPlace, wanted: Mapping[str, int], old: OldRequests, limit_s: float
    ) -> dict[str, int]:
        """Return the offset of the first old request of each group from its offset on.

        A request that an open transaction of another writer hides from its group waits too. One of an aborted
        transaction does not: no group ever reads it, nor passes it before the next record.

        Raises:
            KafkaUnavailableError: Kafka does not answer within `limit_s`.
        """
        left, found = dict(wanted), dict[str, int]()
        stable = max(old.first, min(old.stable, old.end))
        for level, first, end in ((READ_COMMITTED, old.first, stable), (READ_UNCOMMITTED, stable, old.end)):
            start = max(first, min(left.values(), default=end))
            if start >= end:
                continue
            with PartitionReader(consumer_of(level), *place, limit_s) as reader:
                for record in reader.range(start, end):
                    group, offset = group_of(record), record.offset() or 0
                    if group is not None and left.get(group, end) <= offset:
                        found[group] = offset
                        del left[group]
                        if not left:
                            break
        return found

    def _offsets(self, topics: Collection[str], before_ms: int) -> dict[TopicPlace, RequestOffsets]:
        """Return the offsets of each partition; requests are old by their timestamps."""
        answers = describe_each(self._client, topics) if topics else {}
        # A topic that is being made or deleted may have no partitions yet.
        described = {topic: answer for topic, answer in answers.items() if not isinstance(answer, AccessError) and answer.partitions}
        refused = set(topics) - described.keys()
        for topic in refused - self._refused:
            answer = answers.get(topic)
            cause = str(answer) if isinstance(answer, AccessError) else "it is missing, or has no partitions yet"
            log.warning("event=check_topic_not_read topic=%r effect=its_groups_count_as_behind cause=%r", topic, cause)
        self._refused = refused
        self._forget_former({topic: str(each.topic_id) for topic, each in described.items()})
        places = [TopicPartition(topic, number) for topic, each in described.items() for number in range(len(each.partitions))]
        if not places:
            return {}

        def asked(
            places: Iterable[TopicPartition], spec: OffsetSpec, level: IsolationLevel = _ANY_STATE
        ) -> "dict[TopicPartition, Future[ListOffsetsResultInfo]]":
            return self._client.list_offsets(dict.fromkeys(places, spec), isolation_level=level, request_timeout=_ASK_LIMIT_S)

        first, stable, end = asked(places, _FIRST), asked(places, _END, IsolationLevel.READ_COMMITTED), asked(places, _END)
        # The ends are told before the time is asked about: a request that came in between would count as old. A leader
        # that does not tell one would hold up the round again.
        told = [place for place in places if self._is_told(end[place])]
        since = asked(told, OffsetSpec.for_timestamp(max(0, before_ms))) if told else {}
        found = {}
        for place in places:
            key = (place.topic, place.partition)
            try:
                found[key] = self._offsets_of(first[place], since.get(place, end[place]), stable[place], end[place])
            except KafkaException as error:
                found[key] = _ANY_OFFSETS
                self._note_unread(key, error, 1)
        return found

    def _forget_former(self, topic_ids: Mapping[str, str]) -> None:
        """Forget what was known of topics that have been deleted and recreated: their offsets mean other records."""
        former = {topic for topic, topic_id in topic_ids.items() if self._topic_ids.get(topic, topic_id) != topic_id}
        self._topic_ids.update(topic_ids)
        if not former:
            return
        for by_place in (*self._looked.values(), *(ends for _, ends in self._ends)):
            for place in [place for place in by_place if place[0] in former]:
                del by_place[place]
        self._waiting = {group: (place, offset) for group, (place, offset) in self._waiting.items() if place[0] not in former}

    def _is_told(self, answer: "Future[ListOffsetsResultInfo]") -> bool:
        with suppress(KafkaException):
            self._client.offset(answer)
            return True
        return False

    def _offsets_of(self, *answers: "Future[ListOffsetsResultInfo]") -> RequestOffsets:
        """Return a partition's offsets, by what Kafka says of its first one, of a time, and of its two ends.

        Raises:
            KafkaException: the partition has no leader, or one that does not answer.
        """
        low, since, stable, high = map(self._client.offset, answers)
        return RequestOffsets(low, high if since == OFFSET_END else since, stable, high)  # OFFSET_END: every record is older

    def _committed(self, groups: set[str], places: Collection[TopicPlace]) -> dict[str, dict[TopicPlace, int]]:
        """Return the offsets that groups have committed in their topics; no group that Kafka gives no answer for.

        So one that Kafka never gives an answer for does not stop the checks of all others.
        """
        answers = self._answers(groups, places) if groups else {}
        failures = {group: answer for group, answer in answers.items() if isinstance(answer, KafkaUnavailableError)}
        for group in sorted(failures.keys() - self._unanswered):
            log.warning("event=group_not_known group=%r effect=it_counts_as_behind cause=%r", group, str(failures[group]))
        self._unanswered = self._unanswered - groups | failures.keys()
        if answers and len(failures) == len(answers):
            with suppress(KafkaUnavailableError):
                self.close()  # The client may have failed for good.
        return {group: answer for group, answer in answers.items() if not isinstance(answer, KafkaUnavailableError)}

    def _answers(self, groups: Collection[str], places: Collection[TopicPlace]) -> dict[str, dict[TopicPlace, int] | KafkaUnavailableError]:
        self._java_admin = self._java_admin or JavaAdmin(self._spark, self._kafka)
        found = self._java_admin.committed({check_group(group): self._places_of(group, places) for group in groups})
        return {group: found[check_group(group)] for group in groups}


def group_of(record: Message) -> str | None:
    """Return the producer group that a check request is for; None if the record is none."""
    values = [value for name, value in headers_of(record) or () if name == PGROUP]
    try:
        return values[0].decode() if values and isinstance(values[0], bytes) else None
    except UnicodeDecodeError:
        return None
