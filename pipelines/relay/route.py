"""Decides where a committed message goes: its Kafka topic, its partition, and the record that it becomes."""

from fnmatch import fnmatchcase
from typing import NamedTuple

from halfway.clients.reading.committed import CommittedMessage
from halfway.pipelines.kafka.writer import ANY_PARTITION
from halfway.pipelines.relay.positions import Refusal
from halfway.schemas.headers import BORN_TIMESTAMP, KEYS, PGROUP, TAGS, TRANSACTION_ID, HeaderList
from halfway.schemas.settings import Settings, is_topic_name

_KAFKAS_OWN = "__"


class RelayedRecord(NamedTuple):
    """A record for a real topic, and the message that it is of."""

    topic: str
    """The Kafka topic."""
    partition: int
    """A partition, or ANY_PARTITION: it follows from the key."""
    key: bytes
    value: bytes
    headers: HeaderList
    named: str
    """The topic that the message names."""
    transaction_id: str


class Router:
    """The mapping and the allow-list of the settings."""

    def __init__(self, settings: Settings) -> None:
        """Take the settings' groups `relay` and `kafka`."""
        self._topics, self._allow = settings.relay.topics, settings.relay.allow
        self._own = settings.kafka.own_topics()

    def is_allowed(self, named: str) -> bool:
        """Return True if messages that name this topic go on. The others stay in the table."""
        return any(fnmatchcase(named, pattern) for pattern in self._allow)

    def topic_of(self, named: str) -> str:
        """Return the Kafka topic of the messages that name this topic."""
        return self._topics.get(named, named)

    def refusal(self, topic: str) -> tuple[Refusal, str] | None:
        """Return why no message goes to a Kafka topic of this name; None if messages may.

        A service chooses the topic. One that reached Halfway's own topics could settle the transactions of others.
        """
        remedy = "map it to another one in relay.topics, or take it out of relay.allow"
        if topic in self._own:
            return Refusal.OWN_TOPIC, f"{topic} is one of Halfway's own topics: {remedy}"
        if topic.startswith(_KAFKAS_OWN):
            return Refusal.OWN_TOPIC, f"{topic} is one of Kafka's own topics: {remedy}"
        if not is_topic_name(topic):
            return Refusal.NO_TOPIC, f"{topic!r} is no name of a Kafka topic: {remedy}"
        return None

    def record_of(self, message: CommittedMessage, partitions: int) -> RelayedRecord:
        """Return the record of a message.

        The key is what the service calls the message's `keys`, such as an order number, so that all messages of one
        order are in one partition; the transaction id where the service set none. The table does not tell a queue 0
        that a service chose from one that it left open, so that 0 goes by the key.

        Args:
            message: a row of `messages`.
            partitions: how many the Kafka topic has.
        """
        own: list[tuple[str, str | None]] = [(TAGS, message.tags), (KEYS, message.keys), (PGROUP, message.producer_group)]
        born_at_ms = round(message.born_at.timestamp() * 1000)  # before 1970 the half had no such header, and cannot have it
        own += [(BORN_TIMESTAMP, str(born_at_ms) if born_at_ms >= 0 else None), (TRANSACTION_ID, message.transaction_id)]
        # A property may have the name of one of ours. Ours is the last, which counts.
        headers: HeaderList = [(name, None if value is None else value.encode()) for name, value in message.properties.items()]
        headers += [(name, value.encode()) for name, value in own if value is not None]
        return RelayedRecord(
            topic=self.topic_of(message.topic),
            partition=message.queue_id if 0 < message.queue_id < partitions else ANY_PARTITION,
            key=(message.keys or message.transaction_id).encode(),
            value=message.body,
            headers=headers,
            named=message.topic,
            transaction_id=message.transaction_id,
        )
