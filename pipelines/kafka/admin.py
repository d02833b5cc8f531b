"""Kafka's administration: one way to make a client that is quiet, quick to give up, and says why in one line."""

import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient, TopicDescription

from halfway.clients.kafka.diagnosis import WRONG_LOGIN, missing_right, tls_problem
from halfway.schemas.errors import AccessError, KafkaUnavailableError
from halfway.schemas.headers import check_group
from halfway.schemas.settings import KafkaSettings, Settings

REQUEST_LIMIT_S = 10.0
FETCH_GROUP, OPERATOR_GROUP = "halfway-fetch", "halfway-operator"
"""Named by consumers that never join one: librdkafka asks for a group's coordinator all the same, which takes the right to Describe it."""
_POLL_S = 0.2
_NOT_THERE = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.LEADER_NOT_AVAILABLE)
_T = TypeVar("_T")

log = logging.getLogger(__name__)
librdkafka_log = logging.getLogger("halfway.librdkafka")
# Without a handler of ours librdkafka's lines go to stderr; the errors that matter come back as exceptions.
librdkafka_log.addHandler(logging.NullHandler())
librdkafka_log.propagate = False


class _LastError:
    """Keeps the last error of a client's connections. It knows not the client: see `Admin`."""

    def __init__(self) -> None:
        self.error: KafkaError | None = None
        self.is_new = False

    def __call__(self, error: KafkaError) -> None:
        self.is_new = True
        # "All brokers are down" and "disconnected" follow the error that says why, or go before it.
        if self.error is None or _rank(error) >= _rank(self.error):
            self.error = error


def _rank(error: KafkaError) -> int:
    """How much an error tells."""
    return {KafkaError._ALL_BROKERS_DOWN: 0, KafkaError._TRANSPORT: 1}.get(error.code(), 2)


class Admin(AdminClient):
    """An AdminClient that knows the last error of its connections, which tells more than `Local: Timed out` does.

    Hold it until the results of its requests are there. Nothing it refers to may refer back to it: the garbage collector might
    then destroy it in librdkafka's own thread, which ends the process.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Make a client; nothing is connected before the first request."""
        self._last_error = _LastError()
        own: dict[str, Any] = {
            "client.id": "halfway-admin",
            "error_cb": self._last_error,
            "socket.connection.setup.timeout.ms": 5_000,
            "reconnect.backoff.max.ms": 1_000,
        }
        super().__init__({**own, **config}, logger=librdkafka_log)
        self._way_in = {name: config.get(name) for name in ("bootstrap.servers", "security.protocol", "ssl.ca.location") if name in config}
        self._has_answered = False
        self.user: str | None = config.get("sasl.username")
        self.protocol = str(config.get("security.protocol", "PLAINTEXT"))

    def last_error(self) -> KafkaError | None:
        """Return the last error of the connections to the brokers."""
        self.poll(0)  # serves `error_cb`
        return self._last_error.error

    def note_answer(self) -> None:
        """Take note that Kafka has answered: errors before that do not count any more."""
        self._has_answered = True
        self._last_error.error = None

    def refusal(self) -> str | None:
        """Return why waiting is of no use, and what to do: a wrong password, a wrong protocol or a certificate that is refused.

        None once Kafka has answered: what is wrong then is one broker's, or for a time.
        """
        self.poll(0)
        is_new, self._last_error.is_new = self._last_error.is_new, False
        return self.diagnosis() if is_new and not self._has_answered else None

    def diagnosis(self) -> str | None:
        """Return what the last error of the connections means, where it is more than that nobody answers."""
        error = self.last_error()
        if error is None:
            return None
        return f"{WRONG_LOGIN} ({_text(error)})" if error.code() == KafkaError._AUTHENTICATION else tls_problem(self._way_in)


def admin(settings: Settings) -> Admin:
    """Return an admin client for the Kafka of the settings; nothing is connected before the first request.

    Raises:
        SettingsError: if no Kafka is configured.
        KafkaUnavailableError: if librdkafka refuses the settings, for instance a CA file that is not there.
    """
    try:
        return Admin(settings.kafka.as_librdkafka_dict())
    except KafkaException as error:
        raise KafkaUnavailableError(f"cannot use Kafka with these settings: {_text(error.args[0])}") from None


def partition_counts(client: Admin, topics: Collection[str]) -> dict[str, int]:
    """Return the number of partitions of each of `topics` that exists; the missing ones are left out.

    Raises:
        AccessError: this user may not see one of them.
        KafkaUnavailableError: if Kafka cannot be reached or does not answer within 10 s.
    """
    found = describe_topics(client, topics)
    return {topic: len(found[topic].partitions) for topic in topics if topic in found and found[topic].partitions}


def describe_topics(client: Admin, topics: Collection[str], *, with_operations: bool = False) -> dict[str, TopicDescription]:
    """Return what Kafka says of each of `topics` that exists; unlike a consumer's or producer's, this question makes no topic.

    Args:
        client: who asks.
        topics: their names.
        with_operations: whether to ask what this user may do with them, too.

    Raises:
        AccessError: this user may not see one of them.
        KafkaUnavailableError: if Kafka cannot be reached or does not answer within 10 s.
    """
    names = TopicCollection(list(topics))
    futures = client.describe_topics(names, include_authorized_operations=with_operations, request_timeout=REQUEST_LIMIT_S)
    found: dict[str, TopicDescription] = {}
    for topic, future in futures.items():
        try:
            found[topic] = _result(client, future)
        except KafkaException as error:
            failure: KafkaError = error.args[0]
            if failure.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                raise AccessError(missing_right(client.user, "Describe", "topic", topic)) from None
            if failure.code() not in _NOT_THERE:
                raise unavailable(client, failure) from None
    return found


def missing_rights(
    client: Admin, topics: Mapping[str, Collection[AclOperation]], groups: Collection[str] = (), group_prefixes: Collection[str] = ()
) -> list[str]:
    """Return what this user may not do of what is needed, in words that say how to allow it; topics that do not exist are passed over.

    Args:
        client: who asks. Kafka answers whether or not it has an authorizer.
        topics: what is needed of each.
        groups: consumer groups that must be seen (Describe).
        group_prefixes: the same for all groups whose names begin so.

    Raises:
        AccessError: this user may not see one of the topics.
        KafkaUnavailableError: if Kafka cannot be reached or does not answer within 10 s.
    """
    missing = []
    for topic, description in describe_topics(client, topics, with_operations=True).items():
        allowed = set(description.authorized_operations or ())
        # Who sees a topic may at least Describe it: a Kafka that names nothing does not tell.
        wanted = topics[topic] if allowed else ()
        missing += [missing_right(client.user, _name(operation), "topic", topic) for operation in wanted if operation not in allowed]
    probes = {**dict.fromkeys(groups, False), **dict.fromkeys(group_prefixes, True)}
    for group, is_prefix in probes.items():
        [future] = client.describe_consumer_groups([group], request_timeout=REQUEST_LIMIT_S).values()
        try:
            _result(client, future)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
                missing.append(missing_right(client.user, "Describe", "group", group, is_prefix=is_prefix))
    return missing


def check_rights(
    client: Admin, topics: Mapping[str, Collection[AclOperation]], groups: Collection[str] = (), group_prefixes: Collection[str] = ()
) -> None:
    """Refuse to begin what would fail half-way for want of a right; see `missing_rights`.

    Raises:
        AccessError: a right is missing.
        KafkaUnavailableError: if Kafka cannot be reached or does not answer within 10 s.
    """
    missing = missing_rights(client, topics, groups, group_prefixes)
    if missing:
        raise AccessError("; ".join(missing))


def job_rights(settings: KafkaSettings) -> dict[str, tuple[AclOperation, ...]]:
    """Return what the job does with each topic: it writes its ticks to both that it reads."""
    both = (AclOperation.READ, AclOperation.WRITE)
    return {
        settings.half_topic: (*both, AclOperation.DESCRIBE_CONFIGS),
        settings.op_topic: both,
        settings.check_topic: (AclOperation.WRITE,),
    }


JOB_GROUPS = {"groups": (FETCH_GROUP,), "group_prefixes": (check_group(""),)}
"""What the job asks of groups: whether a producer group's instances are there (R15), and its own, by which librdkafka wants to read."""


def _name(operation: AclOperation) -> str:
    return str(operation.name).title().replace("_", "")


def requested(client: Admin, request: Callable[[], _T]) -> _T:
    """Return what `request` returns, its failure as one line that says why.

    Raises:
        KafkaUnavailableError: if Kafka cannot be reached, refuses us, or fails the request.
    """
    try:
        return request()
    except KafkaException as error:
        raise unavailable(client, error.args[0]) from None


def _result(client: Admin, future: "Future[_T]") -> _T:
    while True:
        try:
            answer = future.result(_POLL_S)
        except TimeoutError:
            refusal = client.refusal()
            if refusal:
                raise KafkaUnavailableError(refusal) from None
        else:
            client.note_answer()
            return answer


def unavailable(client: Admin, failure: KafkaError) -> KafkaUnavailableError:
    """Return the error to raise for a request that failed, with the cause that the connection told, where it did."""
    diagnosis = client.diagnosis() if failure.code() < 0 else None
    if diagnosis:
        return KafkaUnavailableError(diagnosis)
    cause = (client.last_error() if failure.code() < 0 else None) or failure
    hint = f": is kafka.security.protocol ({client.protocol}) the port's, or does it want a user?"
    text = _text(cause) + (hint if cause.code() == KafkaError._ALL_BROKERS_DOWN else "")
    return KafkaUnavailableError(f"Kafka cannot be reached, or refuses us: {text}")


def _text(error: object) -> str:
    text = (error.str() or error.name()) if isinstance(error, KafkaError) else str(error)
    return " ".join(text.split())
