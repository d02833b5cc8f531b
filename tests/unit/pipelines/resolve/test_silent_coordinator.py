"""R15: while the broker that coordinates a group does not answer, the group keeps its last state."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupState, KafkaError, KafkaException

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.java_admin import TopicPlace
from halfway.pipelines.resolve.check_lag import CheckLag, RequestOffsets
from halfway.pipelines.resolve.groups import GroupWatch
from halfway.schemas.headers import check_group

NO_SPARK: Any = None
SETTINGS = load_settings(environ={}, overrides={"kafka.bootstrap_servers": "127.0.0.1:1"})
FAILURE = KafkaException(KafkaError(KafkaError._TIMED_OUT))


class Brokers:
    """An admin client of several brokers, one of which coordinates the group `g`."""

    def __init__(self) -> None:
        self.is_coordinator_silent, self.lists_g = False, True
        self.state = ConsumerGroupState.STABLE

    def may_describe_group(self, _: str) -> bool:
        return True

    def list_consumer_groups(self, **_: object) -> Any:
        of_g = SimpleNamespace(group_id=check_group("g"), state=self.state)
        other = SimpleNamespace(group_id=check_group("other"), state=ConsumerGroupState.STABLE)
        if self.is_coordinator_silent:
            return SimpleNamespace(valid=[other], errors=[FAILURE])
        return SimpleNamespace(valid=[of_g, other] if self.lists_g else [other], errors=[])

    def result(self, answer: Any) -> Any:
        return answer


PLACE: TopicPlace = (SETTINGS.kafka.check_topic, 0)


class Lag(CheckLag):
    """One request in the check topic, which is for `g` and which `g` has not passed."""

    knows_g, is_passed, tells_offsets = True, False, True

    def _offsets(self, *_: object) -> dict[TopicPlace, RequestOffsets]:
        if not self.tells_offsets:
            raise FAILURE
        return {PLACE: RequestOffsets(0, 1, 1, 1)}

    def _committed(self, groups: Any, _: Any) -> dict[str, dict[TopicPlace, int]]:
        return {group: {PLACE: 1 if group == "other" or self.is_passed else 0} for group in groups if self.knows_g or group != "g"}

    def _find(self, groups: Any, _: Any) -> dict[str, tuple[TopicPlace, int]]:
        return {group: (PLACE, 0) for group in groups if group == "g" and not self.is_passed}


@pytest.fixture
def brokers() -> Brokers:
    return Brokers()


@pytest.fixture
def watch(brokers: Brokers) -> GroupWatch:
    found = GroupWatch(NO_SPARK, SETTINGS.kafka, 30_000, lambda: 1_000_000)
    client: Any = brokers
    found._client, found._check_lag = client, Lag(NO_SPARK, SETTINGS.kafka, client)
    return found


def test_an_absent_group_stays_absent_while_its_broker_is_silent(brokers: Brokers, watch: GroupWatch) -> None:
    brokers.state = ConsumerGroupState.EMPTY
    watch.ask()
    assert watch.absent() == ["g"]
    brokers.is_coordinator_silent = True
    watch.ask()
    assert watch.absent() == ["g"]


def test_a_group_that_is_behind_stays_behind_while_its_broker_is_silent(brokers: Brokers, watch: GroupWatch) -> None:
    watch.ask()
    assert watch.absent() == ["g"]
    brokers.is_coordinator_silent = True
    watch.ask()
    assert watch.absent() == ["g"]


def test_no_check_counts_until_every_broker_has_told_its_groups(brokers: Brokers, watch: GroupWatch) -> None:
    brokers.state = ConsumerGroupState.EMPTY
    brokers.is_coordinator_silent = True
    watch.ask()
    assert watch.known_s() is None, "no check counts"
    brokers.is_coordinator_silent = False
    watch.ask()
    assert (watch.absent(), watch.known_s() > 0) == (["g"], True)


def test_a_group_whose_offsets_kafka_does_not_tell_counts_as_behind(watch: GroupWatch) -> None:
    lag = watch._check_lag
    assert isinstance(lag, Lag)
    lag.knows_g = False
    watch.ask()
    assert watch.absent() == ["g"]
    lag.knows_g = lag.is_passed = True
    watch.ask()
    assert watch.absent() == []


def test_a_group_that_is_new_in_a_round_without_offsets_counts_as_behind(brokers: Brokers, watch: GroupWatch) -> None:
    """Kafka has not listed it before: its broker was loading it. Checks count that were sent to it meanwhile."""
    lag = watch._check_lag
    assert isinstance(lag, Lag)
    brokers.lists_g = False
    watch.ask()
    assert watch.absent() == []
    brokers.lists_g, lag.tells_offsets = True, False
    watch.ask()
    assert watch.absent() == ["g"]
    lag.tells_offsets = lag.is_passed = True
    watch.ask()
    assert watch.absent() == []


def test_a_full_tick_names_the_group_whose_offsets_kafka_does_not_tell(watch: GroupWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would count as present, and while nothing is known of a present group no check of any group counts."""
    lag = watch._check_lag
    assert isinstance(lag, Lag)
    lag.knows_g = False
    watch.ask()
    before_s = watch.known_s()
    away = {f"group-of-a-service-that-has-gone-home-{number:05}": math.inf for number in range(2_000)}
    monkeypatch.setattr(watch, "_ask_for_away", lambda: (away, {"g", "other"}, None))
    watch.ask()
    assert 1 < len(watch.absent()) < len(away)
    assert (watch.absent()[0], watch.known_s() > before_s) == ("g", True)
