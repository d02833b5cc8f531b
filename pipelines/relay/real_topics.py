"""Knows the real topics: how many partitions each has, and why one takes no messages. Never makes one."""

import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from confluent_kafka.admin import AclOperation, TopicDescription

from halfway.clients.kafka.diagnosis import missing_right
from halfway.pipelines.kafka.admin import Admin, describe_each
from halfway.pipelines.relay.positions import Refusal
from halfway.schemas.errors import AccessError

_KNOWN_FOR_S = 10.0


class RealTopic(NamedTuple):
    """A real topic as Kafka describes it."""

    partitions: int
    refusal: tuple[Refusal, str] | None = None
    """Why it takes no messages, and what to do."""


class RealTopics:
    """Asks Kafka for topics, and keeps for some seconds what it said of those that take messages.

    A producer's own question would make Kafka create a missing topic, where brokers are set to do that.
    """

    def __init__(self, client: Admin, clock: Callable[[], float] = time.monotonic) -> None:
        """Take an admin client, which this keeps. No outcome depends on the clock."""
        self._client, self._clock = client, clock
        self._known: dict[str, tuple[float, RealTopic]] = {}

    def of(self, names: Collection[str]) -> dict[str, RealTopic]:
        """Return each of these topics.

        Raises:
            KafkaUnavailableError: Kafka cannot be reached or does not answer for 10 s; in a failover, for 30 s.
        """
        now_s = self._clock()
        asked = [name for name in names if name not in self._known or self._known[name][0] <= now_s]
        found = self._asked(asked) if asked else {}
        self._known.update({name: (now_s + _KNOWN_FOR_S, topic) for name, topic in found.items() if topic.refusal is None})
        return {name: found.get(name) or self._known[name][1] for name in names}

    def forget(self) -> None:
        """Forget what Kafka has said, so that the next call asks again."""
        self._known.clear()

    def _asked(self, names: Collection[str]) -> dict[str, RealTopic]:
        described = describe_each(self._client, names, with_operations=True)
        return {name: self._judged(name, described.get(name)) for name in names}

    def _judged(self, name: str, described: TopicDescription | AccessError | None) -> RealTopic:
        if isinstance(described, AccessError):
            return RealTopic(0, (Refusal.NO_RIGHT, str(described)))
        if described is None or not described.partitions:
            return RealTopic(0, (Refusal.NO_TOPIC, f"there is no topic {name}: `halfway topics create --real {name}` makes it"))
        allowed = set(described.authorized_operations or ())
        if allowed and AclOperation.WRITE not in allowed:
            return RealTopic(0, (Refusal.NO_RIGHT, missing_right(self._client.user, "Write", "topic", name)))
        headless = [partition.id for partition in described.partitions if partition.leader is None or partition.leader.id < 0]
        if headless:
            return RealTopic(0, (Refusal.UNAVAILABLE, f"partition {headless[0]} of topic {name} has no leader: are all brokers up?"))
        return RealTopic(len(described.partitions))
