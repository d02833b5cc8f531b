"""R15: a place of a check topic that cannot be read counts for its groups as a request that waits."""

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, Self

import pytest
from confluent_kafka import OFFSET_END, OFFSET_INVALID, ConsumerGroupState, KafkaError, KafkaException, TopicPartition

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.admin import Admin
from halfway.pipelines.kafka.java_admin import TopicPlace
from halfway.pipelines.resolve import check_lag
from halfway.pipelines.resolve.check_lag import CheckLag
from halfway.pipelines.resolve.groups import GroupWatch
from halfway.schemas.errors import AccessError, KafkaUnavailableError
from halfway.schemas.headers import PGROUP, check_group

OWN = {"kafka.bootstrap_servers": "127.0.0.1:1", "kafka.check_topic": "check", "kafka.check_topics": {"apart": "own"}}
KAFKA = load_settings(environ={}, overrides=OWN).kafka
NO_SPARK: Any = None
OLD_MS = 1_000_000
"""All requests are older."""
FAILURE = KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE))


class Topics:
    """The check topics: the groups of the requests in each partition, and how far each group has committed."""

    def __init__(self, **partitions: list[list[str]]) -> None:
        self.requests = {(topic, number): groups for topic, places in partitions.items() for number, groups in enumerate(places)}
        self.committed: dict[str, dict[TopicPlace, int]] = {}
        self.offsets_fail: dict[TopicPlace, object] = {}
        self.unreadable: set[TopicPlace] = set()
        self.refused: set[str] = set()
        self.without_partitions: set[str] = set()
        self.unanswered: set[str] = set()
        self.read: list[TopicPlace] = []
        self.asked_about: dict[str, list[TopicPlace]] = {}
        self.lost_s = 0.0

    def describe_topics(self, topics: Any) -> dict[str, Any]:
        there = {topic: [place for place in self.requests if place[0] == topic] for topic in topics}
        found = {topic: SimpleNamespace(topic_id="of its only one", partitions=places) for topic, places in there.items() if places}
        found.update({topic: SimpleNamespace(topic_id="of its only one", partitions=[]) for topic in self.without_partitions})
        return {**found, **{topic: AccessError(f"no right to describe {topic}") for topic in self.refused}}

    def may_describe_group(self, _: str) -> bool:
        return True

    def list_consumer_groups(self, **_: object) -> Any:
        groups = [SimpleNamespace(group_id=check_group(group), state=ConsumerGroupState.STABLE) for group in self.committed]
        return SimpleNamespace(valid=groups, errors=[])

    def list_offsets(self, asked: Mapping[TopicPartition, Any], **_: object) -> dict[TopicPartition, Future[Any]]:
        answers = {place: Future[Any]() for place in asked}
        for place, spec in asked.items():
            kind = type(spec).__name__
            self.asked_about.setdefault(kind, []).append((place.topic, place.partition))
            offset = self._offset((place.topic, place.partition), kind)
            if isinstance(offset, KafkaException):
                answers[place].set_exception(offset)
            else:
                answers[place].set_result(SimpleNamespace(offset=offset))
        return answers

    def _offset(self, place: TopicPlace, spec: str) -> object:
        offsets = {"EarliestSpec": 0, "TimestampSpec": OFFSET_END, "LatestSpec": len(self.requests[place])}
        return self.offsets_fail.get(place, offsets[spec])

    def result(self, answer: Any) -> Any:
        return answer.result() if isinstance(answer, Future) else answer

    def offset(self, answer: Any) -> int:
        client: Any = self
        return Admin.offset(client, answer)


class Reader:
    """Reads a place in no time. One that cannot be read takes the time that it is given."""

    def __init__(self, topics: Topics, topic: str, partition: int, limit_s: float) -> None:
        self.topics, self.place, self.limit_s = topics, (topic, partition), limit_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def range(self, first: int, end: int) -> Iterator[Any]:
        self.topics.read.append(self.place)
        if self.place in self.topics.unreadable:
            self.topics.lost_s += self.limit_s
            raise KafkaUnavailableError(f"no answer from Kafka for {self.place[0]}")
        for offset in range(first, end):
            headers = [(PGROUP, self.topics.requests[self.place][offset].encode())]
            yield SimpleNamespace(headers=lambda headers=headers: headers, offset=lambda offset=offset: offset)


class Lag(CheckLag):
    def __init__(self, topics: Topics) -> None:
        client: Any = topics
        super().__init__(NO_SPARK, KAFKA, client)
        self.topics = topics

    def _answers(self, groups: Any, _: object) -> dict[str, dict[TopicPlace, int] | KafkaUnavailableError]:
        failure = KafkaUnavailableError("no coordinator")
        return {group: failure if group in self.topics.unanswered else self.topics.committed.get(group, {}) for group in groups}

    def round(self, *groups: str) -> set[str]:
        """Return the groups that are behind. `topics.read` and `topics.lost_s` are those of this round."""
        self.topics.read, self.topics.lost_s = [], 0.0
        return set(self.behind(groups, OLD_MS, 0.0, -1.0))


def watching(topics: Topics, clock: Callable[[], float]) -> GroupWatch:
    """Return a watch that asks these topics in place of Kafka."""
    watch = GroupWatch(NO_SPARK, KAFKA, 30_000, lambda: OLD_MS, clock)
    client: Any = topics
    watch._client, watch._check_lag = client, Lag(topics)
    return watch


@pytest.fixture(autouse=True)
def _no_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoConsumer:
        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(check_lag, "describe_each", lambda client, topics: client.describe_topics(topics))
    monkeypatch.setattr(check_lag, "ranges_consumer", lambda *_: NoConsumer())


@pytest.fixture
def topics(monkeypatch: pytest.MonkeyPatch) -> Topics:
    """Group `a` has a request in partition 0 and has passed the others, `b` has passed all, `c` has passed nothing."""
    made = Topics(check=[["a"], ["b", "b"], ["x"]], own=[["apart"]])
    made.committed = {
        "a": {("check", 1): 2, ("check", 2): 1},
        "b": {("check", 0): 1, ("check", 1): 2, ("check", 2): 1},
        "c": {},
        "apart": {("own", 0): 1},
    }
    monkeypatch.setattr(check_lag, "PartitionReader", lambda _, *place_and_limit: Reader(made, *place_and_limit))
    return made


GROUPS = ("a", "b", "c", "apart")


def test_without_a_failure_a_group_is_behind_by_its_own_request(topics: Topics) -> None:
    assert Lag(topics).round(*GROUPS) == {"a"}


@pytest.mark.parametrize("said", [OFFSET_INVALID, FAILURE], ids=["no answer in time", "no leader"])
def test_a_leader_that_does_not_tell_the_end_is_asked_for_no_more_in_the_same_round(topics: Topics, said: object) -> None:
    """It would hold the round up twice."""
    topics.offsets_fail = {("check", 1): said}
    assert Lag(topics).round("a", "b", "c") == {"a", "b", "c"}
    assert set(topics.asked_about["TimestampSpec"]) == {("check", 0), ("check", 2)}


def test_a_topic_that_may_not_be_described_holds_up_its_groups_only(topics: Topics, caplog: pytest.LogCaptureFixture) -> None:
    topics.refused = {"own"}
    lag = Lag(topics)
    assert [lag.round(*GROUPS) for _ in range(2)] == [{"a", "apart"}] * 2
    assert caplog.text.count("event=check_topic_not_read topic='own'") == 1
    topics.refused = set()
    assert lag.round(*GROUPS) == {"a"}


def test_the_groups_of_a_topic_that_is_missing_now_are_behind(topics: Topics) -> None:
    lag = Lag(topics)
    assert lag.round(*GROUPS) == {"a"}
    gone = topics.requests.pop(("own", 0))
    assert lag.round(*GROUPS) == {"a", "apart"}
    topics.requests["own", 0] = gone
    assert lag.round(*GROUPS) == {"a"}


def test_the_groups_of_a_topic_that_is_told_without_partitions_are_behind(topics: Topics) -> None:
    lag = Lag(topics)
    assert lag.round(*GROUPS) == {"a"}
    topics.without_partitions = {"check", "own"}
    assert lag.round(*GROUPS) == set(GROUPS)
    topics.without_partitions = set()
    assert lag.round(*GROUPS) == {"a"}


def test_what_is_known_of_all_groups_is_as_old_as_the_answer_for_the_one_that_was_asked_about_first(
    topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each round 2 of 6 groups are asked about, of which each may be behind since somebody else got a request."""
    monkeypatch.setattr(check_lag, "GROUPS_AT_ONCE", 2)
    topics.committed = {group: {("check", 1): 1_000} for group in "defghi"}
    lag = Lag(topics)
    for round_s in range(20):
        topics.requests["check", 1].append("b")
        lag.behind("defghi", OLD_MS, float(round_s), round_s - 3.0)
        if round_s > 5:
            assert lag.known_s == round_s - 2


def test_groups_that_get_no_answer_do_not_keep_the_others_from_being_asked(
    topics: Topics, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each round asks about 2 of 6 groups, of which 2 get no answer: they are behind, and keep no other waiting."""
    monkeypatch.setattr(check_lag, "GROUPS_AT_ONCE", 2)
    topics.committed = {group: {("check", 1): 1_000} for group in "defghi"}
    topics.unanswered = {"d", "e"}
    lag = Lag(topics)
    for round_s in range(40):
        topics.requests["check", 1].append("b")
        behind = lag.behind("defghi", OLD_MS, float(round_s), round_s - 3.0)
    assert (set(behind), lag.known_s) == ({"d", "e"}, 37.0)
    logged = [record.message for record in caplog.records]
    assert logged == [f"event=group_not_known group={group!r} effect=it_counts_as_behind cause='no coordinator'" for group in "de"]


def test_one_group_that_gets_no_answer_does_not_stop_the_checks_of_others(topics: Topics) -> None:
    """It is asked about in each round, and alone, as all others have passed their requests."""
    topics.committed = {"b": {("check", 1): 1_000}, "d": {}}
    topics.unanswered = {"d"}
    now_s = 1_000.0
    watch = watching(topics, lambda: now_s)
    for _ in range(100):
        watch.ask()
        now_s += 1
    assert (watch.absent(), watch.known_s()) == (["d"], now_s - 1)


def test_a_client_that_answers_for_no_group_is_made_anew(topics: Topics) -> None:
    """An error in its own thread would leave it without an answer for ever."""
    closed: list[int] = []
    lag = Lag(topics)
    lag._java_admin = SimpleNamespace(close=lambda: closed.append(1))  # type: ignore[assignment]
    topics.unanswered = {"a"}
    lag.round(*GROUPS)
    assert closed == [], "it has answered for the others"
    assert lag.round(*GROUPS) == {"a"}, "the others have passed their requests, so that it is the only one asked about"
    assert (closed, lag._java_admin) == ([1], None)


def test_no_check_counts_while_a_group_without_an_answer_has_no_room_in_a_tick(topics: Topics) -> None:
    long = [f"{number:04}{'x' * 100}" for number in range(400)]
    topics.committed = {group: {} for group in long}
    topics.unanswered = set(long)
    now_s = 1_000.0
    watch = watching(topics, lambda: now_s)
    for _ in range(10):
        watch.ask()
        now_s += 1
    assert (0 < len(watch.absent()) < 400, watch.known_s() < 0) == (True, True)
    topics.unanswered, topics.committed = set(), {group: {("check", number): 9 for number in range(3)} for group in long}
    for _ in range(10):
        watch.ask()
        now_s += 1
    assert (watch.absent(), watch.known_s()) == ([], now_s - 1)


def test_a_topic_that_the_first_answer_does_not_know_holds_up_its_groups(topics: Topics) -> None:
    gone = topics.requests.pop(("own", 0))
    lag = Lag(topics)
    assert lag.round(*GROUPS) == {"a", "apart"}
    topics.requests["own", 0] = gone
    assert lag.round(*GROUPS) == {"a"}


def test_a_place_that_cannot_be_read_puts_off_the_groups_that_have_not_passed_it(topics: Topics, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lag = Lag(topics)
    topics.unreadable = {("check", 1)}
    assert lag.round(*GROUPS) == {"a", "c"}, "a waits in a place that is read"
    for _ in range(check_lag.RETRY_ROUNDS - 1):
        assert lag.round(*GROUPS) == {"a", "c"}
        assert topics.lost_s == 0, "it is not read again at once"
    assert [record.message.split(" cause=")[0] for record in caplog.records] == [
        "event=check_topic_not_read topic='check' partition=1 effect=groups_that_have_not_passed_it_count_as_behind"
    ]
    topics.unreadable = set()
    assert lag.round(*GROUPS) == {"a"}, "c has no request"
    assert caplog.records[-1].message == "event=check_topic_not_read_no_more topic='check' partition=1"
    assert lag.round(*GROUPS) == {"a"}
    assert len(caplog.records) == 2


def test_a_group_that_passes_a_place_that_cannot_be_read_is_back(topics: Topics) -> None:
    lag = Lag(topics)
    topics.unreadable = {("check", 1)}
    assert "c" in lag.round(*GROUPS)
    topics.committed["c"] = {("check", 1): 2}
    assert lag.round(*GROUPS) == {"a"}


@pytest.mark.parametrize("answer", [FAILURE, OFFSET_INVALID], ids=["no leader", "a leader that does not answer in time"])
def test_a_place_of_which_kafka_tells_no_offsets_puts_off_all_groups_of_its_topic(
    topics: Topics, caplog: pytest.LogCaptureFixture, answer: object
) -> None:
    lag = Lag(topics)
    topics.offsets_fail = {("check", 1): answer}
    for _ in range(3):
        assert lag.round(*GROUPS) == {"a", "b", "c"}
        assert ("check", 1) not in topics.read
    assert sum("event=check_topic_not_read topic='check' partition=1" in record.message for record in caplog.records) == 1
    topics.offsets_fail = {}
    assert lag.round(*GROUPS) == {"a"}


def test_places_that_cannot_be_read_take_a_bounded_time_and_hide_no_other(topics: Topics) -> None:
    many = [("check", number) for number in range(100)]
    topics.requests = {place: ["x"] for place in many}
    topics.unreadable = set(many[:-1])
    lag = Lag(topics)
    read: list[TopicPlace] = []
    for _ in range(2 * check_lag.RETRY_ROUNDS):
        assert lag.round("c") == {"c"}
        assert topics.lost_s <= 2 * check_lag.PLACE_LIMIT_S
        read += topics.read
    assert set(read) == set(many)
    topics.unreadable = set()
    for _ in range(check_lag.RETRY_ROUNDS):
        lag.round("c")
    assert lag.round("c") == set()


def test_r5_who_is_behind_is_known_from_the_first_round_on_although_a_place_cannot_be_read(topics: Topics) -> None:
    topics.unreadable = {("check", 1)}
    topics.offsets_fail = {("own", 0): FAILURE}
    now_s = 1_000.0
    watch = watching(topics, lambda: now_s)
    watch.ask()
    assert (set(watch.absent()), watch.known_s()) == ({"a", "c", "apart"}, now_s)
    now_s += 1
    watch.ask()
    assert (set(watch.absent()), watch.known_s()) == ({"a", "c", "apart"}, now_s)
