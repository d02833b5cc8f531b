"""R5, R15: what a tick says of checks and groups while Kafka does not answer, has just started, or says half of it."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupState, KafkaError, KafkaException

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.java_admin import TopicPlace
from halfway.pipelines.resolve import ticks as ticks_module
from halfway.pipelines.resolve.check_lag import CheckLag, RequestOffsets
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
    """The answers of Kafka to `GroupWatch`. The group `g` passes no request."""

    user = "job"

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.requests_s: list[float] = []
        self.clock_ahead_s = 0.0
        """By how much the clock of the check topic's broker is ahead of that of the half topic."""
        self.lists_groups = self.tells_offsets = True
        self.may_describe: bool | None = True
        self.state: ConsumerGroupState | None = ConsumerGroupState.STABLE
        """How it lists `g`; None if it does not, as a broker that still loads its groups."""
        self.errors: list[KafkaException] = []
        """Of brokers that do not answer."""

    def may_describe_group(self, _: str) -> bool | None:
        return self.may_describe

    def list_consumer_groups(self, **_: object) -> Any:
        if not self.lists_groups:
            raise FAILURE
        listed = [] if self.state is None or not self.may_describe else [SimpleNamespace(group_id=check_group("g"), state=self.state)]
        return SimpleNamespace(valid=listed, errors=self.errors)

    def result(self, answer: Any) -> Any:
        return answer


PLACE: TopicPlace = (SETTINGS.kafka.check_topic, 0)


class Lag(CheckLag):
    def __init__(self, kafka: Kafka) -> None:
        nothing: Any = None
        super().__init__(nothing, SETTINGS.kafka, nothing)
        self.of = kafka

    def _offsets(self, _: object, before_ms: int) -> dict[TopicPlace, RequestOffsets]:
        if not self.of.tells_offsets:
            raise FAILURE
        times = self.of.requests_s
        return {PLACE: RequestOffsets(0, sum((at_s + self.of.clock_ahead_s) * 1000 < before_ms for at_s in times), len(times), len(times))}

    def _committed(self, groups: Any, _: Any) -> dict[str, dict[TopicPlace, int]]:
        return {group: {PLACE: 0} for group in groups}

    def _find(self, groups: Any, old: Any) -> dict[str, tuple[TopicPlace, int]]:
        return {group: (PLACE, 0) for group in groups if old[PLACE].end}


class World:
    """The job's publisher, with `g` asked once, for the last time, at the horizon 6,001."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kafka = Kafka()
        client: Any = self.kafka
        self.sent = SentChecks(30_000, lambda: self.kafka.now_s)
        self.values: list[bytes] = []
        monkeypatch.setattr(ticks_module, "RecordWriter", lambda *_, **__: None)
        topic = SimpleNamespace(partitions=[0], topic_id="id")
        monkeypatch.setattr(ticks_module, "describe_topics", lambda *_: {"half": topic, "op": topic})
        monkeypatch.setattr(ticks_module, "write_ticks", lambda *arguments, **_: self.values.append(arguments[-1]) or 0)
        self.publisher = TickPublisher(SETTINGS, client, self.sent)
        self.watch = self.new_watch()
        self.watch.ask()
        self.state = resolve(BucketState(), Batch(halves=[half("a")], ticks=tick(6_001)), ONE_CHECK).state
        self.sent.add(6_001)
        self.kafka.requests_s.append(self.kafka.now_s)

    def new_watch(self) -> GroupWatch:
        nothing: Any = None
        client: Any = self.kafka
        watch = GroupWatch(nothing, SETTINGS.kafka, 30_000, lambda: int(self.kafka.now_s * 1000), lambda: self.kafka.now_s)
        watch._client, watch._check_lag = client, Lag(self.kafka)
        self.publisher.absent_groups, self.publisher.known_s = watch.absent, watch.known_s
        return watch

    def start_again(self) -> None:
        status, groups = self.sent.status(), self.watch.listed_ms_ago()
        self.sent.take_up(status, 5_000)
        self.watch = self.new_watch()
        self.watch.take_up(groups)

    def run(self, seconds: int) -> list[str]:
        """Let the time pass, with a tick each second. Return what the job decides."""
        outcomes: list[str] = []
        for _ in range(seconds):
            self.kafka.now_s += 1
            self.watch.ask()
            outcomes += self.read_tick(6_001 + int(self.kafka.now_s - 1_000.0) * 1000)
        return outcomes

    def read_tick(self, at_ms: int) -> list[str]:
        """Publish a tick and let the job read it. One that is not published moves nothing."""
        if self.publisher.publish() is not None:
            return []
        said = json.loads(self.values[-1])
        resolution = resolve(self.state, Batch(ticks=tick(at_ms, away=said["absent_groups"], asked=said["asked_ms"])), ONE_CHECK)
        self.state = resolution.state
        return [told(outcome) for outcome in resolution.outcomes]


def test_the_first_tick_after_a_pause_of_the_job_discards_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its service may have failed with it: nobody has asked since who is away."""
    world = World(monkeypatch)
    world.kafka.requests_s.clear()  # it has passed its check, without an answer
    world.kafka.now_s += 20
    world.watch.ask()
    assert world.sent.asked_ms(world.watch.known_s()) == 6_001, "the check counts"
    world.kafka.state = ConsumerGroupState.EMPTY
    world.kafka.now_s += HOUR_S
    assert world.read_tick(3_600_000) == []
    world.watch.ask()
    assert world.read_tick(3_601_000) == []
    world.kafka.state = ConsumerGroupState.STABLE
    assert [each.split(" #")[0] for each in world.run(60)] == ["discard a check_max"]


def test_while_kafka_answers_a_group_that_is_behind_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.kafka.now_s += HOUR_S
    world.watch.ask()
    assert world.read_tick(3_600_000) == []


@pytest.mark.parametrize("missing", ["lists_groups", "tells_offsets"])
def test_the_first_tick_after_an_outage_discards_nothing(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka goes just after the last check was sent. When it is back, the tick comes before the answer about groups."""
    world = World(monkeypatch)
    setattr(world.kafka, missing, False)
    world.kafka.now_s += HOUR_S
    world.watch.ask()
    assert world.read_tick(3_600_000) == []


@pytest.mark.parametrize("clock_ahead_s", [0, 40])
def test_a_service_that_is_stuck_since_its_last_check_loses_nothing(clock_ahead_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is decided 2 s before it is sent, as batches go.

    Where the clock of its check topic is ahead, its requests are new by their timestamps for longer than they count.
    """
    world = World(monkeypatch)
    world.kafka.clock_ahead_s = clock_ahead_s
    for _ in range(60):
        world.kafka.now_s += 1
        world.watch.ask()
        at_ms = 6_001 + int(world.kafka.now_s - 1_000.0) * 1000 + 2_000
        assert world.read_tick(at_ms) == []


@pytest.mark.parametrize("away_s", range(100, 131))
def test_a_group_that_comes_back_in_a_round_that_tells_no_offsets_stays_away(away_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has been away since just after its last check, which it reads now: it may be behind."""
    world = World(monkeypatch)
    world.kafka.state = ConsumerGroupState.EMPTY
    assert world.run(away_s) == []
    world.kafka.state, world.kafka.tells_offsets = ConsumerGroupState.STABLE, False
    assert world.run(1) == []
    assert world.watch.absent() == ["g"]
    world.kafka.tells_offsets = True
    assert world.run(60) == []


@pytest.mark.parametrize("errors", [[FAILURE], []], ids=["a broker does not answer", "a broker still loads its groups"])
@pytest.mark.parametrize("state", [ConsumerGroupState.EMPTY, ConsumerGroupState.STABLE])
@pytest.mark.parametrize("before_s", [5, 120])
def test_a_group_is_away_while_a_broker_starts_together_with_the_job(
    before_s: int, state: ConsumerGroupState, errors: list[KafkaException], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch)
    world.kafka.state = state
    assert world.run(before_s) == []
    world.start_again()
    world.kafka.state, world.kafka.errors = None, errors
    assert world.run(50) == []
    world.kafka.state, world.kafka.errors = ConsumerGroupState.EMPTY, []
    assert world.run(60) == []


@pytest.mark.parametrize("state", [ConsumerGroupState.EMPTY, ConsumerGroupState.STABLE])
@pytest.mark.parametrize("whole", [True, False], ids=["no broker answers", "its broker does not answer"])
@pytest.mark.parametrize("before_s", [0, 5, 14, 120])
@pytest.mark.parametrize("down_s", [0, 40, 120])
def test_a_group_is_away_while_a_broker_that_was_down_loads_its_groups(
    down_s: int, before_s: int, state: ConsumerGroupState, monkeypatch: pytest.MonkeyPatch, *, whole: bool
) -> None:
    world = World(monkeypatch)
    world.kafka.state = state
    assert world.run(before_s) == []
    world.kafka.state, world.kafka.lists_groups, world.kafka.errors = None, not whole, [] if whole else [FAILURE]
    assert world.run(down_s) == []
    world.kafka.lists_groups, world.kafka.errors = True, []
    assert world.run(50) == []
    assert world.watch.absent() == ["g"]
    world.kafka.state = ConsumerGroupState.EMPTY
    assert world.run(60) == []


def test_a_group_that_kafka_has_forgotten_is_away_for_a_minute_of_running_however_often_the_job_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    world.kafka.state = ConsumerGroupState.EMPTY
    assert world.run(120) == []
    world.kafka.state = None
    for _ in range(29):
        assert world.run(2) == []
        assert world.watch.absent() == ["g"]
        world.start_again()
    assert [each.split(" #")[0] for each in world.run(60)] == ["discard a check_max"]


def test_what_counted_before_a_start_does_not_count_before_every_broker_has_told_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.kafka.requests_s.clear()  # it has passed its check, without an answer
    world.kafka.now_s += 20
    assert world.sent.asked_ms() == 6_001
    world.start_again()
    world.kafka.state, world.kafka.errors = None, [FAILURE]
    assert world.run(60) == []
    world.kafka.state, world.kafka.errors = ConsumerGroupState.STABLE, []
    assert [each.split(" #")[0] for each in world.run(60)] == ["discard a check_max"]


@pytest.mark.parametrize("pause", ["the job stands still", "the rest of a round takes long", "the rest of a round fails late"])
def test_a_group_whose_broker_restarts_during_a_pause_stays_away(monkeypatch: pytest.MonkeyPatch, pause: str) -> None:
    """The broker then lists groups while it loads them. Nobody has asked it for the 60 s that `g` is given."""
    world = World(monkeypatch)
    world.kafka.state = ConsumerGroupState.EMPTY
    assert world.run(120) == []
    if pause == "the job stands still":
        world.kafka.now_s += 70
    else:
        with monkeypatch.context() as patch:

            def slow(*_: object) -> dict[TopicPlace, RequestOffsets]:
                world.kafka.now_s += 61
                if pause.endswith("fails late"):
                    raise FAILURE
                return {}

            patch.setattr(world.watch._check_lag, "_offsets", slow)
            world.watch.ask()
    world.kafka.state = None
    assert world.run(1) == []
    assert world.watch.absent() == ["g"]
    world.run(70)
    assert world.watch.absent() == [], "a group that Kafka has forgotten"


@pytest.mark.parametrize("state", [ConsumerGroupState.EMPTY, ConsumerGroupState.STABLE])
@pytest.mark.parametrize("before_s", [5, 40, 120])
@pytest.mark.parametrize("says", [False, None], ids=["refused", "not told"])
def test_groups_that_kafka_leaves_out_for_want_of_a_right_do_not_count_as_present(
    says: bool | None, before_s: int, state: ConsumerGroupState, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It lists only those that the user may Describe, and reports no error. It may not say so either."""
    world = World(monkeypatch)
    world.kafka.state = state
    assert world.run(before_s) == []
    world.kafka.may_describe = says
    assert world.run(600) == []
    assert caplog.text.count("event=absent_groups_not_known") == 1
    assert ("may not Describe group txn-check-*" in caplog.text) == (says is False)
    world.kafka.may_describe, world.kafka.state = True, ConsumerGroupState.EMPTY
    assert world.run(60) == []
    assert world.watch.absent() == ["g"]
