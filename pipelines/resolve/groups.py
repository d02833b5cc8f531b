"""Which producer groups are away (R15), asked of Kafka: the consumer groups `txn-check-*` that it knows and that have no member."""

import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple

from confluent_kafka import ConsumerGroupState, KafkaException
from confluent_kafka.admin import ListConsumerGroupsResult

from halfway.pipelines.kafka.admin import admin
from halfway.schemas.headers import check_group
from halfway.schemas.settings import Settings

log = logging.getLogger(__name__)

ASK_EVERY_S = 1.0
MAX_BYTES = 32 * 1024
"""Of the JSON in a tick, which goes to every bucket: about a thousand groups. Above 64 KiB a tick would be refused (R14)."""
GRACE_S = 60.0
"""How long a group that Kafka does not list any more is still away: a broker that has just started lists groups as it loads them."""
_ANSWER_LIMIT_S = 5.0


class _Away(NamedTuple):
    """When a group was first found away, and when last, in seconds."""

    since_s: float
    seen_s: float


class GroupWatch:
    """Knows which producer groups are away, from what Kafka last said.

    Only the first question is waited for. Later ones are asked in passing, and an answer counts from the call after it has come: a
    slow or failing Kafka delays no tick. While it fails the last answer stands, since a group wrongly held to be away is only asked
    later, and one wrongly held to be present could lose messages. Before any answer no group is away.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare to ask; nothing is connected before the first question. `clock` is in seconds."""
        self._admin = admin(settings)
        self._clock = clock
        self._asked_s: float | None = None
        self._question: Future[ListConsumerGroupsResult] | None = None
        """The one whose answer has not been taken yet."""
        self._away: dict[str, _Away] = {}
        self._is_failing = False
        self._left_out = 0

    def absent(self) -> list[str]:
        """Return the producer groups that are away; of too many for a tick those that left last, the others count as present."""
        if self._asked_s is None:
            self._ask()
            self._take_answer(_ANSWER_LIMIT_S)
        else:
            self._take_answer(0.0)
        if self._question is None and self._clock() - (self._asked_s or 0.0) >= ASK_EVERY_S:
            self._ask()
        fitting = fit(sorted(self._away, key=lambda group: (-self._away[group].since_s, group)))
        left_out = len(self._away) - len(fitting)
        if left_out > self._left_out:
            log.warning("event=absent_groups_left_out groups=%d effect=they_count_as_present", left_out)
        self._left_out = left_out
        return fitting

    def close(self) -> None:
        """Wait for the answer that is due: the client must not go before it."""
        if self._question is not None:
            with suppress(KafkaException, TimeoutError):
                self._question.result(2 * _ANSWER_LIMIT_S)

    def _ask(self) -> None:
        self._asked_s = self._clock()
        self._question = self._admin.list_consumer_groups(request_timeout=_ANSWER_LIMIT_S)

    def _take_answer(self, limit_s: float) -> None:
        """Take over what Kafka says, if it says it within `limit_s`."""
        if self._question is None:
            return
        try:
            answer: ListConsumerGroupsResult = self._question.result(limit_s)
        except TimeoutError:
            return
        except KafkaException as error:
            self._question = None
            self._failed(error.args[0])
            return
        self._question = None
        if answer.errors:
            # Some brokers have not answered: groups that only these know are where they were.
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
        self._note_changes(unseen.keys() | found.keys())
        self._away = {**unseen, **found}

    def _note_changes(self, away: set[str]) -> None:
        for event, groups in (("group_away", away - self._away.keys()), ("group_back", self._away.keys() - away)):
            for group in sorted(groups):
                log.info("event=%s group=%r", event, group)

    def _failed(self, cause: object) -> None:
        if not self._is_failing:
            log.warning("event=absent_groups_not_known effect=the_last_answer_stands cause=%r", str(cause))
        self._is_failing = True


def producer_groups(consumer_groups: Iterable[str]) -> list[str]:
    """Return the producer groups whose checks these consumer groups read; other consumer groups are passed over."""
    prefix = check_group("")
    return [group.removeprefix(prefix) for group in consumer_groups if group.startswith(prefix) and group != prefix]


def fit(groups: Sequence[str]) -> list[str]:
    """Return as many of the first groups as fit into a tick."""
    room = MAX_BYTES
    for count, group in enumerate(groups):
        room -= len(json.dumps(group)) + len(", ")
        if room < 0:
            return list(groups[:count])
    return list(groups)
