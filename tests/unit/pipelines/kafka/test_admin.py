"""A client whose controller died looks for the new one."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from halfway.pipelines.kafka import admin, topic_setup
from halfway.pipelines.kafka.admin import describe_topics
from halfway.schemas.errors import KafkaUnavailableError


class Client:
    """An admin client that asks a dead controller until it has looked the brokers up `look_ups` times."""

    user, protocol, servers = None, "PLAINTEXT", "kafka:9092"

    def __init__(self, failure: int, *, has_another: bool = True, look_ups: int = 1) -> None:
        self._failure, self._has_another, self._look_ups = failure, has_another, look_ups
        self.asked = self.looked_up = 0

    def describe_topics(self, _: object, include_authorized_operations: bool, request_timeout: float) -> dict[str, "Future[Any]"]:
        assert not include_authorized_operations
        return {"half": self._answer(SimpleNamespace(partitions=[0]), request_timeout)}

    def describe_configs(self, resources: list[Any], request_timeout: float) -> dict[Any, "Future[Any]"]:
        return dict.fromkeys(resources, self._answer({"retention.ms": SimpleNamespace(value="1")}, request_timeout))

    def _answer(self, value: object, request_timeout: float) -> "Future[Any]":
        assert request_timeout > 0
        self.asked += 1
        future: Future[Any] = Future()
        if self.looked_up >= self._look_ups:
            future.set_result(value)
        else:
            future.set_exception(KafkaException(KafkaError(self._failure)))
        return future

    def list_topics(self, timeout: float) -> None:
        assert timeout > 0
        if not self._has_another:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))
        self.looked_up += 1

    def result(self, future: "Future[Any]") -> Any:
        return future.result()

    def diagnosis(self) -> None: ...
    def last_error(self) -> None: ...


def test_a_dead_controller_is_replaced() -> None:
    client: Any = Client(KafkaError._TIMED_OUT)
    assert list(describe_topics(client, ["half"])) == ["half"]
    assert client.looked_up == 1


def test_the_configuration_of_topics_is_told_by_the_new_controller_too() -> None:
    client: Any = Client(KafkaError._TIMED_OUT)
    assert topic_setup._configs(client, ["half"]) == {"half": {"retention.ms": "1"}}
    assert client.looked_up == 1


def test_while_another_broker_answers_a_failover_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka names a dead broker as the one to ask until its session ends: after 9 s, or later on a busy machine."""
    monkeypatch.setattr(admin, "REQUEST_LIMIT_S", 0.3)
    client: Any = Client(KafkaError._TIMED_OUT, look_ups=4)
    assert list(describe_topics(client, ["half"])) == ["half"]
    monkeypatch.setattr(admin, "FAILOVER_LIMIT_S", 0.6)
    never: Any = Client(KafkaError._TIMED_OUT, look_ups=99)
    with pytest.raises(KafkaUnavailableError):
        describe_topics(never, ["half"])


@pytest.mark.parametrize(("failure", "has_another"), [(KafkaError._TIMED_OUT, False), (KafkaError.INVALID_REQUEST, True)])
def test_what_no_other_broker_helps_is_an_error(failure: int, has_another: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "REQUEST_LIMIT_S", 0.1)
    client: Any = Client(failure, has_another=has_another)
    with pytest.raises(KafkaUnavailableError):
        describe_topics(client, ["half"])
    assert (client.asked > 1) is (failure == KafkaError._TIMED_OUT)
