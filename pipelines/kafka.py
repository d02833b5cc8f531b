"""Kafka's administration: one way to make a client that is quiet, quick to give up, and says why in one line."""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from schemas.errors import KafkaUnavailableError
from schemas.settings import Settings

REQUEST_LIMIT_S = 10.0
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

    def __call__(self, error: KafkaError) -> None:
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

    def last_error(self) -> KafkaError | None:
        """Return the last error of the connections to the brokers."""
        self.poll(0)  # serves `error_cb`
        return self._last_error.error


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
        KafkaUnavailableError: if Kafka cannot be reached or does not answer within 10 s.
    """
    # All topics are asked for: to ask for one by name makes it, on brokers that create topics by themselves.
    known = requested(client, lambda: client.list_topics(timeout=REQUEST_LIMIT_S)).topics
    return {topic: len(known[topic].partitions) for topic in topics if topic in known and known[topic].partitions}


def requested(client: Admin, request: Callable[[], _T]) -> _T:
    """Return what `request` returns, its failure as one line that says why.

    Raises:
        KafkaUnavailableError: if Kafka cannot be reached, refuses us, or fails the request.
    """
    try:
        return request()
    except KafkaException as error:
        raise unavailable(client, error.args[0]) from None


def unavailable(client: Admin, failure: KafkaError) -> KafkaUnavailableError:
    """Return the error to raise for a request that failed, with the cause that the connection told, where it did."""
    cause = (client.last_error() if failure.code() < 0 else None) or failure
    return KafkaUnavailableError(f"Kafka cannot be reached, or refuses us: {_text(cause)}")


def _text(error: object) -> str:
    text = (error.str() or error.name()) if isinstance(error, KafkaError) else str(error)
    return " ".join(text.split())
