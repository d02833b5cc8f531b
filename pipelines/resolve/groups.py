"""Finds the producer groups that are away (R15): their consumer groups `txn-check-*` exist and have no member."""

import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple

from confluent_kafka import ConsumerGroupState, KafkaException
from confluent_kafka.admin import ListConsumerGroupsResult

from halfway.pipelines.kafka.admin import admin_client
from halfway.schemas.headers import MAX_TICK_BYTES, check_group
from halfway.schemas.settings import KafkaSettings

log = logging.getLogger(__name__)

ASK_EVERY_S = 1.0
GRACE_S = 60.0
"""How long a group stays away after Kafka stops listing it: a broker that has just started lists groups while it loads
them."""
_ANSWER_LIMIT_S = 5.0


class _Away(NamedTuple):
    """When a group was found away first and last, in seconds."""

    since_s: float
    seen_s: float


class GroupWatch:
    """Knows which producer groups are away, from Kafka's last answer.

    Only the first request is waited for. Later ones run in the background, and the next call takes their answer: a slow
    or failing Kafka delays no tick. While Kafka fails, its last answer stands, because a group wrongly held to be away
    is only asked later, and a group wrongly held to be present could lose messages. Before the first answer no group is
    away.
    """

    def __init__(self, kafka: KafkaSettings, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare to ask. Sends no request.

        Args:
            kafka: where Kafka is.
            clock: returns seconds.
        """
        # Kafka answers the requests of a connection in order. With the ticks' client, a slow listing would delay ticks.
        self._client = admin_client(kafka)
        self._clock = clock
        self._asked_s: float | None = None
        self._request: Future[ListConsumerGroupsResult] | None = None
        """The request whose answer has not been taken yet."""
        self._away: dict[str, _Away] = {}
        self._is_failing = False
        self._left_out = 0

    def absent(self) -> list[str]:
        """Return the producer groups that are away.

        If they do not all fit into a tick, returns those that left last. The others count as present.
        """
        if self._asked_s is None:
            self._ask()
            self._take_answer(_ANSWER_LIMIT_S)
        else:
            self._take_answer(0.0)
        if self._request is None and self._clock() - (self._asked_s or 0.0) >= ASK_EVERY_S:
            self._ask()
        fitting = fit(sorted(self._away, key=lambda group: (-self._away[group].since_s, group)))
        left_out = len(self._away) - len(fitting)
        if left_out > self._left_out:
            log.warning("event=absent_groups_left_out groups=%d effect=they_count_as_present", left_out)
        self._left_out = left_out
        return fitting

    def close(self) -> None:
        """Wait for the answer that is due: the client must outlive its requests."""
        if self._request is not None:
            with suppress(KafkaException, TimeoutError):
                self._request.result(2 * _ANSWER_LIMIT_S)

    def _ask(self) -> None:
        self._asked_s = self._clock()
        self._request = self._client.list_consumer_groups(request_timeout=_ANSWER_LIMIT_S)

    def _take_answer(self, limit_s: float) -> None:
        """Take Kafka's answer over, if it arrives within `limit_s`."""
        if self._request is None:
            return
        try:
            answer: ListConsumerGroupsResult = self._request.result(limit_s)
        except TimeoutError:
            return
        except KafkaException as error:
            self._request = None
            self._failed(error.args[0])
            return
        self._request = None
        if answer.errors:
            # Some brokers have not answered. Groups that only they know keep their last state.
            self._failed(answer.errors[0])
        elif self._is_failing:
            log.info("event=absent_groups_known_again")
            self._is_failing = False
        groups = answer.valid or ()
        empty = set(producer_groups(group.group_id for group in groups if group.state == ConsumerGroupState.EMPTY))
        listed = set(producer_groups(group.group_id for group in groups if group.state != ConsumerGroupState.DEAD))
        now_s = self._clock()
        unseen = {
            group: away for group, away in self._away.items() if group not in listed and (answer.errors or now_s - away.seen_s <= GRACE_S)
        }
        found = {group: _Away(self._away[group].since_s if group in self._away else now_s, now_s) for group in empty}
        self._log_changes(unseen.keys() | found.keys())
        self._away = {**unseen, **found}

    def _log_changes(self, away: set[str]) -> None:
        for event, groups in (("group_away", away - self._away.keys()), ("group_back", self._away.keys() - away)):
            for group in sorted(groups):
                log.info("event=%s group=%r", event, group)

    def _failed(self, cause: object) -> None:
        if not self._is_failing:
            log.warning("event=absent_groups_not_known effect=the_last_answer_stands cause=%r", str(cause))
        self._is_failing = True


def producer_groups(consumer_groups: Iterable[str]) -> list[str]:
    """Return the producer groups that these consumer groups answer checks for; other consumer groups are skipped."""
    prefix = check_group("")
    return [group.removeprefix(prefix) for group in consumer_groups if group.startswith(prefix) and group != prefix]


def fit(groups: Sequence[str]) -> list[str]:
    """Return as many of the first groups as fit into a tick."""
    room = MAX_TICK_BYTES - len(json.dumps({"absent_groups": []}))
    for count, group in enumerate(groups):
        room -= len(json.dumps(group)) + len(", ")
        if room < 0:
            return list(groups[:count])
    return list(groups)
