"""R15: whatever Kafka answers, no check counts that its group has not passed, unless the group is away or behind."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupState, KafkaError, KafkaException

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.java_admin import TopicPlace
from halfway.pipelines.kafka.range_reader import OffsetRange
from halfway.pipelines.resolve import check_lag
from halfway.pipelines.resolve.check_lag import CheckLag, OldRequests, RequestOffsets
from halfway.pipelines.resolve.groups import GroupWatch
from halfway.schemas.headers import check_group

KAFKA = load_settings(environ={}, overrides={"kafka.bootstrap_servers": "127.0.0.1:1"}).kafka
FAILURE = KafkaException(KafkaError(KafkaError._TIMED_OUT))
INTERVAL_S = 30.0
Request = tuple[str, float]
"""A producer group, and when the request was sent, in s."""


class Kafka:
    """A check topic and the groups that read it, which answers some questions, and fails at random."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.now_s, self.failing = chance, 1_000.0, chance.choice([0.0, 0.3, 1.0])
        self.requests: dict[TopicPlace, list[Request]] = {}
        self.first: dict[TopicPlace, int] = {}
        self.clock_s: dict[TopicPlace, float] = {}
        for _ in range(chance.randint(1, 3)):
            self.add_partition()
        self.committed: dict[str, dict[TopicPlace, int]] = {f"g{number}": {} for number in range(chance.randint(1, 7))}
        self.has_members = {group: chance.random() < 0.8 for group in self.committed}

    def add_partition(self) -> None:
        place = (KAFKA.check_topic, len(self.requests))
        self.requests[place], self.first[place], self.clock_s[place] = [], 0, self.chance.choice([0, 0, 40, -40, 5])

    def fails(self, share: float) -> bool:
        return self.chance.random() < share * self.failing

    def go_on(self) -> None:
        """Let some time pass: requests, commits, groups that come and go, retention, a partition more."""
        chance = self.chance
        self.now_s += chance.choice([0.1, 1, 1, 1, 1, 5, 20])
        for _ in range(chance.randint(0, 2)):
            self.requests[self._place()].append((chance.choice(list(self.committed)), self.now_s))
        for group, committed in self.committed.items():
            if chance.random() < 0.05:
                self.has_members[group] = not self.has_members[group]
            if self.has_members[group] and chance.random() < 0.3:
                place = self._place()
                begin = max(committed.get(place, 0), self.first[place])
                committed[place] = chance.randint(begin, max(begin, len(self.requests[place])))
        if chance.random() < 0.02:
            place = self._place()
            self.first[place] = chance.randint(self.first[place], len(self.requests[place]))
        if chance.random() < 0.02:
            self.add_partition()
        if chance.random() < 0.02:
            group = f"g{len(self.committed)}"
            self.committed[group], self.has_members[group] = {}, True
        if chance.random() < 0.05:
            self.failing = chance.choice([0.0, 0.3, 1.0])

    def _place(self) -> TopicPlace:
        return self.chance.choice(list(self.requests))

    def may_describe_group(self, _: str) -> bool:
        return True

    def list_consumer_groups(self, **_: object) -> Any:
        if self.fails(0.3):
            raise FAILURE
        states = {True: ConsumerGroupState.STABLE, False: ConsumerGroupState.EMPTY}
        listed = [SimpleNamespace(group_id=check_group(group), state=states[has]) for group, has in self.has_members.items()]
        if self.fails(0.3):
            listed.pop(self.chance.randrange(len(listed)))
            return SimpleNamespace(valid=listed, errors=[FAILURE])
        return SimpleNamespace(valid=listed, errors=[])

    def result(self, answer: Any) -> Any:
        return answer


class Lag(CheckLag):
    """Asks the random Kafka in place of a real one."""

    def __init__(self, kafka: Kafka) -> None:
        nothing: Any = None
        super().__init__(nothing, KAFKA, nothing)
        self.of = kafka

    def _offsets(self, topics: Any, before_ms: int) -> dict[TopicPlace, RequestOffsets]:
        if self.of.fails(0.2):
            raise FAILURE
        self._refused = set(topics) if self.of.fails(0.1) else set()
        if not topics or self._refused:
            return {}
        return {place: self._offsets_of(place, before_ms) for place in self.of.requests}

    def _offsets_of(self, place: TopicPlace, before_ms: int) -> RequestOffsets:
        if self.of.fails(0.2):
            self._note_unread(place, FAILURE, 1)
            return check_lag._ANY_OFFSETS
        first, requests = self.of.first[place], self.of.requests[place]
        times_ms = [(sent_s + self.of.clock_s[place]) * 1000 for _, sent_s in requests]
        before = next((offset for offset in range(first, len(requests)) if times_ms[offset] >= before_ms), len(requests))
        return RequestOffsets(first, before, len(requests), len(requests))

    def _committed(self, groups: Any, places: Any) -> dict[str, dict[TopicPlace, int]]:
        if groups and self.of.fails(0.2):
            raise FAILURE
        asked = [group for group in sorted(groups) if not self.of.fails(0.2)]
        return {group: {place: offset for place, offset in self.of.committed[group].items() if place in places} for group in asked}

    def _first_requests(self, _: Any, place: TopicPlace, wanted: Any, old: OldRequests, __: float) -> dict[str, int]:
        if self.of.fails(0.3):
            raise FAILURE
        requests = self.of.requests[place]
        kept = {group: OffsetRange(max(start, self.of.first[place]), min(old.end, len(requests))) for group, start in wanted.items()}
        waiting = {group: [offset for offset in range(*kept[group]) if requests[offset][0] == group] for group in wanted}
        return {group: offsets[0] for group, offsets in waiting.items() if offsets}


@contextmanager
def no_consumer(*_: object) -> Iterator[None]:
    yield None


@pytest.mark.parametrize("seed", range(60))
def test_no_check_counts_that_its_group_has_not_passed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more groups than are asked about in a round."""
    monkeypatch.setattr(check_lag, "GROUPS_AT_ONCE", 2)
    monkeypatch.setattr(check_lag, "ranges_consumer", no_consumer)
    chance = random.Random(seed)
    kafka = Kafka(chance)
    nothing: Any = None
    client: Any = kafka
    watch = GroupWatch(nothing, KAFKA, round(INTERVAL_S * 1000), lambda: int(kafka.now_s * 1000), lambda: kafka.now_s)
    watch._client, watch._check_lag = client, Lag(kafka)
    for _ in range(chance.randint(20, 150)):
        kafka.go_on()
        watch.ask()
        if not watch._has_answer.is_set():
            continue
        unable, known_s = watch.absent(), watch.known_s()
        if known_s is None:  # No check counts.
            continue
        counts_s = known_s - INTERVAL_S / 2
        for place, requests in kafka.requests.items():
            for offset in range(kafka.first[place], len(requests)):
                group, sent_s = requests[offset]
                has_passed = kafka.committed[group].get(place, 0) > offset
                assert has_passed or sent_s > counts_s or group in unable or group not in watch.listed_ms_ago(), (group, place, offset)
    _all_answer(kafka, watch)


def _all_answer(kafka: Kafka, watch: GroupWatch) -> None:
    """Once all is well, nobody stays behind."""
    kafka.failing = 0.0
    for group in kafka.committed:
        kafka.has_members[group] = True
        kafka.committed[group] = {place: len(requests) for place, requests in kafka.requests.items()}
    for _ in range(200):
        kafka.now_s += 1
        watch.ask()
    assert watch.absent() == []
    known_s = watch.known_s()
    assert known_s is not None
    assert kafka.now_s - known_s < 2 * INTERVAL_S / 3
