"""R15, behind: a group that has not passed a check request for longer than the check interval."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from pyspark.sql import SparkSession

from halfway.pipelines.kafka.admin import topic_ids
from halfway.pipelines.kafka.java_admin import TopicPlace
from halfway.pipelines.resolve import check_lag
from halfway.pipelines.resolve.check_lag import CheckLag
from halfway.schemas.headers import check_group
from halfway.schemas.settings import KafkaSettings, Settings
from tests.support.job_world import Headers
from tests.support.kafka_topics import MakeTopics, delete_records, make_create_time_topics, patient_admin
from tests.support.waiting import until

T = 1_700_000_000_000


class CheckTopic:
    """A check topic of two partitions whose record times the test sets."""

    def __init__(self, spark: SparkSession, kafka: KafkaSettings) -> None:
        self.spark, self.kafka = spark, kafka
        self.client = patient_admin(kafka)
        self._producer = Producer({"bootstrap.servers": kafka.servers()})
        # Groups outlive their topics on the session's broker.
        self._own = kafka.check_topic

    def name(self, group: str) -> str:
        return f"{group}-{self._own}"

    def ask(self, group: str | None, at_ms: int, partition: int = 0, topic: str | None = None) -> None:
        headers: Headers = [("PGROUP", self.name(group).encode())] if group else []
        self._producer.produce(topic or self._own, b"body", b"id", partition=partition, timestamp=T + at_ms, headers=headers)
        assert self._producer.flush(10) == 0

    def commit(self, group: str, offset: int, partition: int = 0, topic: str | None = None) -> None:
        options = {"bootstrap.servers": self.kafka.servers(), "group.id": check_group(self.name(group)), "enable.auto.commit": False}
        with Consumer(options) as consumer:
            consumer.commit(offsets=[TopicPartition(topic or self._own, partition, offset)], asynchronous=False)

    def has_leaders(self, topic: str) -> bool:
        """Return True if each partition of the topic can be asked about. Not every broker knows a new topic at once."""
        with suppress(KafkaException):
            offsets = self.lag()._offsets([topic], 0)
            return len(offsets) == 2 and check_lag._ANY_OFFSETS not in offsets.values()
        return False

    def lag(self) -> CheckLag:
        return CheckLag(self.spark, self.kafka, self.client)

    def behind(self, lag: CheckLag, *groups: str, before_ms: int) -> dict[str, tuple[int, int]]:
        found = lag.behind({self.name(group) for group in groups}, T + before_ms, 0.0, -1.0)
        places = {group: found[self.name(group)] for group in groups if self.name(group) in found}
        assert {topic for (topic, _), _ in places.values()} <= {self.kafka.check_topic}
        return {group: (partition, offset) for group, ((_, partition), offset) in places.items()}


@pytest.fixture
def check_topic(spark: SparkSession, topics: MakeTopics) -> CheckTopic:
    made = CheckTopic(spark, topics(partitions=2, timestamps="CreateTime").kafka)
    until(lambda: made.has_leaders(made.kafka.check_topic), "the new topic")
    return made


def test_r15_a_request_is_passed_by_a_committed_offset_only(check_topic: CheckTopic) -> None:
    lag = check_topic.lag()
    assert check_topic.behind(lag, "g", before_ms=1_000) == {}, "nothing was asked"
    check_topic.ask("g", 10)
    assert check_topic.behind(lag, "g", before_ms=10) == {}, "not published before that"
    assert check_topic.behind(lag, "g", before_ms=11) == {"g": (0, 0)}, "nothing was ever committed"
    check_topic.commit("g", 0)
    assert check_topic.behind(lag, "g", before_ms=11) == {"g": (0, 0)}
    check_topic.commit("g", 1)
    assert check_topic.behind(lag, "g", before_ms=11) == {}
    check_topic.ask("g", 20)
    check_topic.ask("g", 30, partition=1)
    assert check_topic.behind(lag, "g", before_ms=20) == {}
    assert check_topic.behind(lag, "g", before_ms=31) == {"g": (1, 0)}, "the partitions count one by one"
    check_topic.commit("g", 1, partition=1)
    assert check_topic.behind(lag, "g", before_ms=31) == {"g": (0, 1)}
    assert check_topic.behind(check_topic.lag(), "g", before_ms=31) == {"g": (0, 1)}, "a job that starts finds the same"
    assert check_topic.behind(lag, before_ms=31) == {}, "the group has no member any more"


def test_r15_what_the_first_round_of_a_job_finds_is_old(check_topic: CheckTopic) -> None:
    """A former run has sent it. By a broker's clock that is ahead it may be newer than all that this run sends."""
    check_topic.ask("g", 500)
    lag = check_topic.lag()
    check_topic.commit("other", 1)
    assert check_topic.behind(lag, "g", "other", before_ms=10) == {"g": (0, 0)}
    check_topic.ask("other", 600)
    assert check_topic.behind(lag, "g", "other", before_ms=10) == {"g": (0, 0)}, "this run has sent it"
    check_topic.commit("g", 1)
    assert check_topic.behind(lag, "g", "other", before_ms=10) == {}


def test_r15_what_is_sent_to_a_group_that_came_after_the_start_of_the_job_is_not_old(check_topic: CheckTopic) -> None:
    """Only what was there in the first round that asked about its topic is of unknown age."""
    lag = check_topic.lag()
    assert check_topic.behind(lag, before_ms=10) == {}, "no group has a member"
    check_topic.ask("g", 500)
    assert check_topic.behind(lag, "g", before_ms=10) == {"g": (0, 0)}
    check_topic.commit("g", 1)
    check_topic.ask("g", 600)
    check_topic.ask("g", 600, partition=1)
    assert check_topic.behind(lag, "g", before_ms=10) == {}, "sent just now"
    assert check_topic.behind(lag, "g", before_ms=601) == {"g": (1, 0)}


@pytest.mark.parametrize("after", range(4))
def test_r15_a_request_that_comes_while_a_round_asks_is_not_old(
    after: int, check_topic: CheckTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it came, the topic had none for half an interval."""
    lag, list_offsets, left = check_topic.lag(), check_topic.client.list_offsets, iter(range(4))
    assert check_topic.behind(lag, "g", before_ms=10) == {}

    def asked(places: dict[TopicPartition, object], **options: object) -> dict[TopicPartition, Future[object]]:
        answers: dict[TopicPartition, Future[object]] = list_offsets(places, **options)
        wait(answers.values())
        if next(left) == after:
            check_topic.ask("g", 20)
        return answers

    monkeypatch.setattr(check_topic.client, "list_offsets", asked)
    assert check_topic.behind(lag, "g", before_ms=10) == {}
    assert next(left, None) is None
    monkeypatch.undo()
    assert check_topic.behind(lag, "g", before_ms=21) == {"g": (0, 0)}


def test_r15_requests_of_other_groups_make_no_group_late(check_topic: CheckTopic) -> None:
    for at_ms in range(5):
        check_topic.ask("other", at_ms)
        check_topic.ask(None, at_ms)
    lag = check_topic.lag()
    assert check_topic.behind(lag, "g", "other", before_ms=100) == {"other": (0, 0)}
    check_topic.ask("g", 50)
    assert check_topic.behind(lag, "g", "other", before_ms=100) == {"g": (0, 10), "other": (0, 0)}
    check_topic.commit("other", 3)
    assert check_topic.behind(lag, "g", "other", before_ms=100) == {"g": (0, 10), "other": (0, 4)}


def test_r15_a_request_waits_behind_an_open_transaction_and_not_in_one_that_is_aborted(check_topic: CheckTopic) -> None:
    """No group reads an aborted record, and none passes it before the next one: it would be behind for days."""
    topic = check_topic.kafka.check_topic
    writer = Producer({"bootstrap.servers": check_topic.kafka.servers(), "transactional.id": f"another-{topic}"})
    writer.init_transactions(30)
    lag = check_topic.lag()
    check_topic.commit("g", 0)
    writer.begin_transaction()
    for name in ("g", "other"):
        writer.produce(topic, b"", partition=0, timestamp=T + 10, headers=[("PGROUP", check_topic.name(name).encode())])
    assert writer.flush(30) == 0
    check_topic.ask("other", 20)
    assert check_topic.behind(lag, "g", "other", before_ms=100) == {"g": (0, 0), "other": (0, 1)}
    writer.abort_transaction(30)
    until(lambda: check_topic.behind(lag, "g", "other", before_ms=100) == {"other": (0, 2)}, "the end of the transaction")
    assert check_topic.behind(check_topic.lag(), "g", "other", before_ms=100) == {"other": (0, 2)}, "a job that starts finds the same"
    check_topic.commit("other", 3)
    assert check_topic.behind(lag, "g", "other", before_ms=100) == {}


def test_r15_a_request_that_the_topic_has_deleted_waits_no_more(check_topic: CheckTopic) -> None:
    lag = check_topic.lag()
    assert check_topic.behind(lag, "g", before_ms=2) == {}
    check_topic.ask("g", 1)
    check_topic.ask("g", 2)
    assert check_topic.behind(lag, "g", before_ms=2) == {"g": (0, 0)}
    delete_records(check_topic.kafka, check_topic.kafka.check_topic, {0: 1})
    assert check_topic.behind(lag, "g", before_ms=2) == {}
    assert check_topic.behind(lag, "g", before_ms=3) == {"g": (0, 1)}


@contextmanager
def _counted(lag: CheckLag, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """Record the groups that a round asks about."""
    asked: list[str] = []
    committed = lag._committed

    def record(groups: list[str], places: object) -> object:
        asked.extend(groups)
        return committed(groups, places)  # type: ignore[arg-type]

    def take() -> list[str]:
        taken, asked[:] = sorted(asked), []
        return taken

    with monkeypatch.context() as patch:
        patch.setattr(lag, "_committed", record)
        yield take


def test_r15_groups_that_keep_up_cost_a_request_and_no_reading(check_topic: CheckTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [f"g{number}" for number in range(7)]
    for group in groups:
        check_topic.ask("other", 1)
        check_topic.commit(group, len(groups))
    lag = check_topic.lag()
    monkeypatch.setattr(check_lag, "GROUPS_AT_ONCE", 2)
    monkeypatch.setattr(check_lag, "ranges_consumer", None)
    with _counted(lag, monkeypatch) as asked:
        assert check_topic.behind(lag, *groups, before_ms=2) == {}
        assert asked() == sorted(map(check_topic.name, groups)), "the first answer is whole"
        assert check_topic.behind(lag, *groups, before_ms=2) == {}
        assert asked() == [], "no request is old that was not before"
        check_topic.ask("other", 3)
        for group in groups:
            check_topic.commit(group, len(groups) + 1)
        rounds = [(check_topic.behind(lag, *groups, before_ms=4), asked())[1] for _ in range(5)]
        assert [len(each) for each in rounds] == [2, 2, 2, 1, 0]
        assert sorted(name for each in rounds for name in each) == sorted(map(check_topic.name, groups)), "each in its turn"


def test_r15_a_group_is_behind_in_its_own_topic_only(check_topic: CheckTopic) -> None:
    kafka = check_topic.kafka
    own = f"{kafka.check_topic}.own"
    apart = kafka.model_copy(update={"check_topics": {check_topic.name("g"): own}})
    others = {name: f"{own}.{name}" for name in ("half_topic", "op_topic", "check_topic")}
    make_create_time_topics(Settings(kafka=apart.model_copy(update=others)), 2)
    lag = CheckLag(check_topic.spark, apart, check_topic.client)
    groups = {name: check_topic.name(name) for name in ("g", "other")}

    def behind() -> dict[str, TopicPlace]:
        return {group: place for group, (place, _) in lag.behind(groups.values(), T + 100, 0.0, -1.0).items()}

    until(lambda: check_topic.has_leaders(own), "the new topic")
    check_topic.ask("g", 1)
    assert behind() == {}, "it has left the shared topic, and does not commit there any more"
    check_topic.ask("other", 2, partition=1)
    assert behind() == {groups["other"]: (kafka.check_topic, 1)}
    for name in groups:
        check_topic.ask(name, 3, topic=own)
    assert behind() == {groups["other"]: (kafka.check_topic, 1), groups["g"]: (own, 0)}
    check_topic.commit("g", 1)
    check_topic.commit("other", 1, partition=1)
    assert behind() == {groups["g"]: (own, 0)}
    check_topic.commit("g", 1, topic=own)
    assert behind() == {}


def test_r15_a_check_topic_made_anew_is_searched_from_its_beginning(check_topic: CheckTopic) -> None:
    """Also if it has grown past the end of the former one before a round looks at it."""
    lag, kafka = check_topic.lag(), check_topic.kafka
    for at_ms in range(3):
        check_topic.ask("other", at_ms)
    assert check_topic.behind(lag, "g", before_ms=100) == {}
    check_topic.client.delete_topics([kafka.check_topic])[kafka.check_topic].result()
    until(lambda: kafka.check_topic not in topic_ids(check_topic.client, [kafka.check_topic]), "the topic to be gone")
    others = {name: f"{kafka.check_topic}.{name}" for name in ("half_topic", "op_topic")}
    make_create_time_topics(Settings(kafka=kafka.model_copy(update=others)), 2)
    until(lambda: check_topic.has_leaders(kafka.check_topic), "the topic to be there again")
    check_topic.ask("g", 10)
    for at_ms in range(4):
        check_topic.ask("other", 20 + at_ms)
    assert check_topic.behind(lag, "g", before_ms=100) == {"g": (0, 0)}
