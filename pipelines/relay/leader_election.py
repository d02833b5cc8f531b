"""Chooses one active relay of those with one name: the member of a consumer group that gets the only partition."""

import logging
import math
import time
from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition

from halfway.clients.kafka.client_log import ClientLog
from halfway.clients.kafka.config import FOLLOW_LEADERS, librdkafka_config
from halfway.clients.kafka.diagnosis import missing_right
from halfway.schemas.errors import AccessError
from halfway.schemas.settings import KafkaSettings, Settings

log = logging.getLogger(__name__)

_SESSION_MS = 10_000
_STANDS_BY_S = 15.0
"""After this time at a start another one must be active: one that has died is out of the group by then."""
_PARTITION = 0


def relay_id(kafka: KafkaSettings, name: str) -> str:
    """Return the id of the consumer group of the relays of one name, and of their transactions.

    It names their topic: two Halfways in one Kafka, each with a relay called `relay`, would otherwise fence each other
    for ever. Neither topic nor name has a slash.
    """
    return f"halfway-relay/{kafka.relay_topic}/{name}"


class LeaderElection:
    """A member of the group. The one that holds the partition is active, and the others stand by.

    A member that dies or freezes loses the partition after 10 s, one that leaves loses it at once. It may learn that
    late, so the election only chooses who goes on: the transactional producer makes sure that nobody else writes.
    """

    def __init__(self, settings: Settings) -> None:
        """Join in the background."""
        self._user, self._group = settings.kafka.security.login, relay_id(settings.kafka, settings.relay.name)
        self.is_leader = False
        self._stands_by_from_s = time.monotonic() + _STANDS_BY_S
        options: dict[str, Any] = {
            **librdkafka_config(settings.kafka, ClientLog()),
            **FOLLOW_LEADERS,
            "group.id": self._group,
            "client.id": f"halfway-{settings.relay.name}",
            "session.timeout.ms": _SESSION_MS,
            "max.poll.interval.ms": max(300_000, 2 * settings.relay.transaction_timeout),
            # Who has the partition keeps it when others join.
            "partition.assignment.strategy": "cooperative-sticky",
            "enable.auto.commit": False,
        }
        self._consumer = Consumer(options)
        self._consumer.subscribe([settings.kafka.relay_topic], on_assign=self._take, on_revoke=self._leave, on_lost=self._leave)

    def serve(self, wait_s: float) -> bool:
        """Do what the group asks for, for up to `wait_s`, and return True if this relay is active.

        Raises:
            AccessError: this user may not join the group.
        """
        message = self._consumer.poll(wait_s)
        error = None if message is None else message.error()
        if error is not None and error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
            raise AccessError(missing_right(self._user, "Read", "group", self._group))
        if not self.is_leader and time.monotonic() > self._stands_by_from_s:
            self._stand_by()
        return self.is_leader

    def close(self) -> None:
        """Leave the group, so that another relay becomes active at once."""
        self.is_leader = False
        self._consumer.close()

    def _take(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        consumer.incremental_assign(partitions)
        if not any(each.partition == _PARTITION for each in partitions):
            return
        # Only the assignment counts: positions are read by offset.
        consumer.pause(partitions)
        self.is_leader, self._stands_by_from_s = True, math.inf
        log.info("event=relay_active")

    def _leave(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        if any(each.partition == _PARTITION for each in partitions):
            self._stand_by()

    def _stand_by(self) -> None:
        self.is_leader, self._stands_by_from_s = False, math.inf
        log.info("event=relay_standing_by")
