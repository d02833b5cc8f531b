"""What is known of the real topics, and for how long."""

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka.admin import AclOperation

from halfway.pipelines.relay import real_topics
from halfway.pipelines.relay.positions import Refusal
from halfway.pipelines.relay.real_topics import RealTopic, RealTopics
from halfway.schemas.errors import AccessError


def described(*, leader: int = 1, operations: tuple[AclOperation, ...] = ()) -> Any:
    return SimpleNamespace(partitions=[SimpleNamespace(id=0, leader=SimpleNamespace(id=leader))], authorized_operations=operations)


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What Kafka says of each topic; None for one that this user may not see."""
    topics: dict[str, Any] = {}

    def describe(_: object, names: list[str], *, with_operations: bool) -> dict[str, Any]:
        assert with_operations
        topics["asked"] = topics.get("asked", 0) + 1
        return {name: topics[name] or AccessError("may not Describe") for name in names if name in topics}

    monkeypatch.setattr(real_topics, "describe_each", describe)
    return topics


def test_each_topic_has_its_own_reason(kafka: dict[str, Any]) -> None:
    kafka.update(good=described(), hidden=None, headless=described(leader=-1), read=described(operations=(AclOperation.READ,)))
    client: Any = SimpleNamespace(user="relay")
    found = RealTopics(client).of(["good", "hidden", "headless", "read", "missing"])
    assert kafka["asked"] == 1, "one question, whatever this user may not see"
    assert found["good"] == RealTopic(1)
    reasons = {name: topic.refusal[0] for name, topic in found.items() if topic.refusal}
    assert reasons == {
        "hidden": Refusal.NO_RIGHT,
        "headless": Refusal.UNAVAILABLE,
        "read": Refusal.NO_RIGHT,
        "missing": Refusal.NO_TOPIC,
    }


def test_a_good_answer_counts_for_some_seconds_and_a_bad_one_for_no_time(kafka: dict[str, Any]) -> None:
    now = [0.0]
    client: Any = SimpleNamespace(user=None)
    topics = RealTopics(client, clock=lambda: now[0])
    assert topics.of(["a"])["a"].refusal
    kafka["a"] = described()
    assert not topics.of(["a"])["a"].refusal
    assert kafka["asked"] == 2
    del kafka["a"]
    assert not topics.of(["a"])["a"].refusal
    now[0] = 10.0
    assert topics.of(["a"])["a"].refusal
