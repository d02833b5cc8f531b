"""Provides an admin client for Kafka that prints nothing, times out soon, and explains a failure in one line."""

import logging
import re
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from confluent_kafka import OFFSET_INVALID, Consumer, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, ListOffsetsResultInfo, TopicDescription

from halfway.clients.kafka.diagnosis import WRONG_LOGIN, missing_right, tls_problem
from halfway.schemas.errors import AccessError, KafkaUnavailableError
from halfway.schemas.settings import KafkaSettings

REQUEST_LIMIT_S = 10.0
FAILOVER_LIMIT_S = 30.0
"""While another broker answers: Kafka names a dead controller or leader until its session ends, usually after 9 s."""
_ATTEMPT_LIMIT_S = 3.0
_LOOK_UP_LIMIT_S = 1.0
_GROUP_LIMIT_S = 5.0
_POLL_S = 0.2
_NOT_THERE = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.LEADER_NOT_AVAILABLE)
_GONE = (KafkaError._TIMED_OUT, KafkaError._TRANSPORT)
_T = TypeVar("_T")

librdkafka_log = logging.getLogger("halfway.librdkafka")
# Without a handler librdkafka prints to stderr. The errors that matter come back as exceptions.
librdkafka_log.addHandler(logging.NullHandler())
librdkafka_log.propagate = False


class _LastError:
    """Keeps the last error of a client's connections. Does not refer to the client: see `Admin`."""

    def __init__(self) -> None:
        self.error: KafkaError | None = None
        self.is_new = False

    def __call__(self, error: KafkaError) -> None:
        self.is_new = True
        # "All brokers are down" and "disconnected" come before or after the error that gives the cause.
        if self.error is None or _rank(error) >= _rank(self.error):
            self.error = error


def _rank(error: KafkaError) -> int:
    """Return how much an error explains; a larger number explains more."""
    return {KafkaError._ALL_BROKERS_DOWN: 0, KafkaError._TRANSPORT: 1}.get(error.code(), 2)


_IS_HERE = re.compile(r"(?:127\.0\.0\.1|localhost):([0-9]+)")


class Admin(AdminClient):
    """An AdminClient that keeps the last error of its connections, which explains more than `Local: Timed out` does.

    Keep a reference to it until the results of its requests have arrived. Nothing it refers to may refer back to it:
    the garbage collector might then destroy it in librdkafka's own thread, which ends the process.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Make a client. Connects with the first request."""
        self._last_error = _LastError()
        own: dict[str, Any] = {
            "client.id": "halfway-admin",
            "socket.connection.setup.timeout.ms": 5_000,
            # librdkafka prefers the broker that it used last, also a frozen one until a request to it times out.
            "socket.timeout.ms": 3_000,
            "reconnect.backoff.max.ms": 1_000,
        }
        self._config: dict[str, Any] = {**own, **config}
        callbacks: dict[str, Any] = {"error_cb": self._last_error}
        super().__init__({**callbacks, **self._config}, logger=librdkafka_log)
        self._askers: dict[str, Consumer] = {}
        """Group → a consumer that never joins it."""
        self.servers = str(config.get("bootstrap.servers", ""))
        self._has_answered = False
        names = ("sasl.username", "sasl.oauthbearer.client.id", "sasl.kerberos.principal")
        self.user: str | None = next((config[name] for name in names if name in config), None)
        self.protocol = str(config.get("security.protocol", "PLAINTEXT"))

    def last_error(self) -> KafkaError | None:
        """Return the last error of the connections to the brokers."""
        self.poll(0)  # serves `error_cb`
        return self._last_error.error

    def refusal(self) -> str | None:
        """Return why waiting is useless, and what to do: a wrong password, a wrong protocol or a refused certificate.

        Returns None once Kafka has answered: a later error concerns one broker, or passes.
        """
        self.poll(0)
        is_new, self._last_error.is_new = self._last_error.is_new, False
        return self.diagnosis() if is_new and not self._has_answered else None

    def diagnosis(self) -> str | None:
        """Return what the last error of the connections means; None if it only means that no broker answers."""
        error = self.last_error()
        if error is None:
            return None
        return f"{WRONG_LOGIN} ({_text(error)})" if error.code() == KafkaError._AUTHENTICATION else tls_problem(self._config)

    def may_describe_group(self, group: str) -> bool | None:
        """Return whether this user may Describe a consumer group; None if Kafka does not tell within 5 s.

        A consumer asks that never joins the group. An admin client's own request to the coordinator of a group ends the
        process if the connection breaks while it is sent (librdkafka #4605, #5397).
        """
        asker = self._askers.pop(group, None)
        if asker is None:
            asker = Consumer({**self._config, "group.id": group, "enable.auto.commit": False}, logger=librdkafka_log)
        answer = _may_describe(asker)
        if answer:
            self._askers[group] = asker
        else:  # It says once that it may not: the next question takes another one.
            asker.close()
        return answer

    def result(self, future: "Future[_T]") -> _T:
        """Wait for the result of a request.

        Raises:
            KafkaUnavailableError: Kafka refuses the connection, and waiting is useless.
            KafkaException: the request failed.
        """
        while True:
            try:
                answer = future.result(_POLL_S)
            except TimeoutError:
                refusal = self.refusal()
                if refusal:
                    raise KafkaUnavailableError(refusal) from None
            else:
                self._has_answered, self._last_error.error = True, None
                return answer

    def offset(self, future: "Future[ListOffsetsResultInfo]") -> int:
        """Wait for the offset that `list_offsets` has asked for.

        Raises:
            KafkaUnavailableError: Kafka refuses the connection, and waiting is useless.
            KafkaException: the partition has no leader, or one that does not answer.
        """
        offset = self.result(future).offset
        if offset == OFFSET_INVALID:  # so librdkafka says that there was no answer in time
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return int(offset)


def _may_describe(asker: Consumer) -> bool | None:
    """Return whether a consumer's user may Describe its group; None if Kafka does not tell in time."""
    ends_s = time.monotonic() + _GROUP_LIMIT_S
    while time.monotonic() < ends_s:
        try:
            asker.committed([TopicPartition("any", 0)], timeout=_POLL_S)
        except KafkaException as failure:
            # Who may not Describe the group is not told its coordinator, and waits for it: `poll` says why.
            said = asker.poll(0)
            errors = (failure.args[0], None if said is None else said.error())
            if any(error is not None and error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED for error in errors):
                return False
        else:
            return True
    return None


def admin_client(kafka: KafkaSettings) -> Admin:
    """Return an admin client. Connects with the first request.

    Raises:
        SettingsError: no Kafka is configured.
        KafkaUnavailableError: librdkafka refuses the settings, for instance because a CA file is missing.
    """
    try:
        return Admin(kafka.as_librdkafka_dict())
    except KafkaException as error:
        raise KafkaUnavailableError(f"cannot use Kafka with these settings: {_text(error.args[0])}") from None


def partition_counts(client: Admin, topics: Collection[str]) -> dict[str, int]:
    """Return the number of partitions of each of `topics`; missing topics are left out.

    Raises:
        AccessError: this user may not describe one of them.
        KafkaUnavailableError: Kafka cannot be reached or does not answer for 10 s; in a failover, for 30 s.
    """
    found = describe_topics(client, topics)
    return {topic: len(found[topic].partitions) for topic in topics if topic in found and found[topic].partitions}


def topic_ids(client: Admin, topics: Collection[str]) -> dict[str, str]:
    """Return Kafka's id of each of `topics` that exists. No other topic, of this name or in another Kafka, has it.

    Raises:
        AccessError: this user may not describe one of them.
        KafkaUnavailableError: Kafka cannot be reached or does not answer for 10 s; in a failover, for 30 s.
    """
    return {topic: str(description.topic_id) for topic, description in describe_topics(client, topics).items()}


def describe_topics(client: Admin, topics: Collection[str], *, with_operations: bool = False) -> dict[str, TopicDescription]:
    """Return Kafka's description of each of `topics` that exists. Creates no topic, unlike a consumer's request.

    Args:
        client: an admin client.
        topics: their names.
        with_operations: also ask which operations this user is authorized for.

    Raises:
        AccessError: this user may not describe one of them.
        KafkaUnavailableError: Kafka cannot be reached or does not answer for 10 s; in a failover, for 30 s.
    """
    found: dict[str, TopicDescription] = {}
    for topic, answer in describe_each(client, topics, with_operations=with_operations).items():
        if isinstance(answer, AccessError):
            raise answer
        found[topic] = answer
    return found


def describe_each(client: Admin, topics: Collection[str], *, with_operations: bool = False) -> dict[str, TopicDescription | AccessError]:
    """Return what `describe_topics` does, and the error of each topic that this user may not describe.

    Raises:
        KafkaUnavailableError: Kafka cannot be reached or does not answer for 10 s; in a failover, for 30 s.
    """
    return in_failover_too(client, lambda limit_s: _described(client, topics, with_operations, limit_s))


def in_failover_too(client: Admin, ask: Callable[[float], _T]) -> _T:
    """Return the answer to a request to the controller. In a failover, ask again until another broker is it.

    Args:
        client: the client that asks.
        ask: sends the request, and waits for the answer for this many seconds. Raises a KafkaException if none comes.

    Raises:
        KafkaUnavailableError: Kafka cannot be reached or does not answer for 10 s; in a failover, for 30 s.
    """
    began_s = time.monotonic()
    deadline_s = began_s + REQUEST_LIMIT_S

    def at_most(limit_s: float) -> float:
        return max(0.1, min(limit_s, deadline_s - time.monotonic()))

    while True:
        try:
            return ask(at_most(_ATTEMPT_LIMIT_S))
        except KafkaException as error:
            if error.args[0].code() not in _GONE or time.monotonic() >= deadline_s:
                raise unavailable(client, error.args[0]) from None
        # librdkafka sends this request to the broker that was the controller when it last asked. If that one has died,
        # it waits for it, and takes a core meanwhile, until somebody asks for the brokers that there are. They name a
        # dead one until its session ends.
        while time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            with suppress(KafkaException):
                client.list_topics(timeout=at_most(_LOOK_UP_LIMIT_S))
                deadline_s = began_s + FAILOVER_LIMIT_S
                break


def _described(client: Admin, topics: Collection[str], with_operations: bool, limit_s: float) -> dict[str, TopicDescription | AccessError]:
    names = TopicCollection(list(topics))
    futures = client.describe_topics(names, include_authorized_operations=with_operations, request_timeout=limit_s)
    found: dict[str, TopicDescription | AccessError] = {}
    for topic, future in futures.items():
        try:
            found[topic] = client.result(future)
        except KafkaException as error:
            failure: KafkaError = error.args[0]
            if failure.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                found[topic] = AccessError(missing_right(client.user, "Describe", "topic", topic))
            elif failure.code() not in _NOT_THERE:
                raise
    return found


def unavailable(client: Admin, failure: KafkaError) -> KafkaUnavailableError:
    """Return the error to raise for a failed request, with the cause that the connection reported."""
    diagnosis = client.diagnosis() if failure.code() < 0 else None
    if diagnosis:
        return KafkaUnavailableError(diagnosis)
    cause = (client.last_error() if failure.code() < 0 else None) or failure
    hint = f": is kafka.security.protocol ({client.protocol}) the port's, or does it want a user?"
    text = _text(cause) + (hint if cause.code() == KafkaError._ALL_BROKERS_DOWN else "")
    here = _IS_HERE.fullmatch(client.servers) if failure.code() < 0 else None
    text += f": `halfway broker start --port {here[1]}` starts a local one" if here else ""
    return KafkaUnavailableError(f"Kafka cannot be reached, or refuses us: {text}")


def _text(error: object) -> str:
    text = (error.str() or error.name()) if isinstance(error, KafkaError) else str(error)
    return " ".join(text.split())
