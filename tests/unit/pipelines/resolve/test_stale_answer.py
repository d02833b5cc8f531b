"""R5, R15: a tick says that checks count, and that their groups are there, by an answer from before an outage."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupState, KafkaError, KafkaException

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.java_admin import TopicPlace
from halfway.pipelines.kafka.range_reader import OffsetRange
from halfway.pipelines.resolve import ticks as ticks_module
from halfway.pipelines.resolve.check_lag import CheckLag
from halfway.pipelines.resolve.groups import GroupWatch
from halfway.pipelines.resolve.sent_checks import SentChecks
from halfway.pipelines.resolve.ticks import TickPublisher
from halfway.schemas.headers import check_group
from halfway.transforms.protocol import Batch, BucketState, resolve
from tests.support.scenario import RULES, half, tick, told

ONE_CHECK = RULES._replace(check_max=1)
OVERRIDES = {"kafka.bootstrap_servers": "127.0.0.1:1", "kafka.half_topic": "half", "kafka.op_topic": "op"}
SETTINGS = load_settings(environ={}, overrides=OVERRIDES)
FAILURE = KafkaException(KafkaError(KafkaError._TIMED_OUT))
HOUR_S = 3_600.0


class Kafka:
    """The answers of Kafka to `GroupWatch`. The group `g` has a member, and passes no request."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.requests_s: list[float] = []
        self.lists_groups = self.tells_offsets = True

    def list_consumer_groups(self, **_: object) -> Any:
        if not self.lists_groups:
            raise FAILURE
        return SimpleNamespace(valid=[SimpleNamespace(group_id=check_group("g"), state=ConsumerGroupState.STABLE)], errors=[])

    def result(self, answer: Any) -> Any:
        return answer


PLACE: TopicPlace = (SETTINGS.kafka.check_topic, 0)


class Lag(CheckLag):
    def __init__(self, kafka: Kafka) -> None:
        nothing: Any = None
        super().__init__(nothing, SETTINGS.kafka, nothing)
        self.of = kafka

    def _published_before(self, _: object, before_ms: int) -> dict[TopicPlace, OffsetRange]:
        if not self.of.tells_offsets:
            raise FAILURE
        return {PLACE: OffsetRange(0, sum(at_s * 1000 < before_ms for at_s in self.of.requests_s))}

    def _committed(self, groups: Any, _: Any) -> dict[str, dict[TopicPlace, int]]:
        return {group: {PLACE: 0} for group in groups}

    def _find(self, groups: Any, old: Any) -> dict[str, tuple[TopicPlace, int]]:
        return {group: (PLACE, 0) for group in groups if old[PLACE].end}


class World:
    """The job's publisher, with `g` asked once, for the last time, at the horizon 6,001."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kafka = Kafka()
        client: Any = self.kafka
        nothing: Any = None
        self.watch = GroupWatch(nothing, SETTINGS.kafka, 30_000, lambda: int(self.kafka.now_s * 1000), lambda: self.kafka.now_s)
        self.watch._client, self.watch._check_lag = client, Lag(self.kafka)
        self.sent = SentChecks(30_000, lambda: self.kafka.now_s)
        self.values: list[bytes] = []
        monkeypatch.setattr(ticks_module, "RecordWriter", lambda *_, **__: None)
        monkeypatch.setattr(ticks_module, "partition_counts", lambda *_: {"half": 1, "op": 1})
        monkeypatch.setattr(ticks_module, "write_ticks", lambda *arguments, **_: self.values.append(arguments[-1]) or 0)
        self.publisher = TickPublisher(SETTINGS, client, self.sent)
        self.publisher.absent_groups, self.publisher.known_s = self.watch.absent, self.watch.known_s
        self.watch.ask()
        self.state = resolve(BucketState(), Batch(halves=[half("a")], ticks=tick(6_001)), ONE_CHECK).state
        self.sent.add(6_001)
        self.kafka.requests_s.append(self.kafka.now_s)

    def read_tick(self, at_ms: int) -> list[str]:
        """Publish a tick and let the job read it. One that is not published moves nothing."""
        if self.publisher.publish() is not None:
            return []
        said = json.loads(self.values[-1])
        resolution = resolve(self.state, Batch(ticks=tick(at_ms, away=said["absent_groups"], asked=said["asked_ms"])), ONE_CHECK)
        self.state = resolution.state
        return [told(outcome) for outcome in resolution.outcomes]


def test_while_kafka_answers_a_group_that_is_behind_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.kafka.now_s += HOUR_S
    world.watch.ask()
    assert world.read_tick(3_600_000) == []


def test_the_first_tick_after_an_outage_discards_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka goes just after the last check was sent. When it is back, the tick comes before the answer about groups."""
    world = World(monkeypatch)
    world.kafka.lists_groups = False
    world.kafka.now_s += HOUR_S
    world.watch.ask()
    assert world.read_tick(3_600_000) == []


def test_nothing_is_discarded_while_it_is_not_known_who_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka tells no offsets any more just after the last check was sent."""
    world = World(monkeypatch)
    world.kafka.tells_offsets = False
    world.kafka.now_s += HOUR_S
    world.watch.ask()
    assert world.read_tick(3_600_000) == []


def test_a_service_that_is_stuck_since_its_last_check_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka answers all the time. The check is decided 2 s before it is sent, as batches go."""
    world = World(monkeypatch)
    for _ in range(60):
        world.kafka.now_s += 1
        world.watch.ask()
        at_ms = 6_001 + int(world.kafka.now_s - 1_000.0) * 1000 + 2_000
        assert world.read_tick(at_ms) == []
