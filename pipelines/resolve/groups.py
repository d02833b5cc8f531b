"""Finds the producer groups that cannot answer checks (R15): those that are away, and those that are behind.

A group is away if its consumer group `txn-check-*` exists and has no member. `check_lag.py` says which are behind.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from uuid import UUID

from confluent_kafka import ConsumerGroupState, KafkaException
from confluent_kafka.admin import ListConsumerGroupsResult
from pyspark.sql import SparkSession

from halfway.pipelines.kafka.admin import admin_client
from halfway.pipelines.kafka.rights import verify_check_groups
from halfway.pipelines.resolve.check_lag import CheckLag
from halfway.schemas.errors import HalfwayError, KafkaUnavailableError
from halfway.schemas.headers import MAX_TICK_BYTES, check_group
from halfway.schemas.settings import KafkaSettings
from halfway.schemas.tick_value import TickValue

log = logging.getLogger(__name__)

ASK_EVERY_S = 1.0
GRACE_S = 60.0
"""How long a group that Kafka no longer lists counts as away, since Kafka last listed it or a broker did not answer. A
broker that has just started lists groups while it loads them."""
_SHORTEST_S = 0.1
_LONGEST_STEP_S = 5.0
"""The most that the time between two listings counts."""
_ANY_JOB = str(UUID(int=0))
_STALE_S = 30.0
"""After so long without an answer, as in a job that stood still, a group may be away by now."""
_ANSWER_LIMIT_S = 5.0
_FIRST_ANSWER_LIMIT_S = 10.0


class GroupWatch:
    """Knows which producer groups are away or behind, from Kafka's last answer.

    It asks in a thread of its own, and only the first answer is waited for: a slow or failing Kafka delays no tick.
    While Kafka fails, its last answer stands, because a group wrongly held to be away is only asked later, and a group
    wrongly held to be present could lose messages.
    """

    def __init__(
        self,
        spark: SparkSession,
        kafka: KafkaSettings,
        check_interval_ms: int,
        now_ms: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to ask. Sends no request.

        Args:
            spark: see `CheckLag`.
            kafka: where Kafka is.
            check_interval_ms: a group is behind that has not passed a request for half of it, when it counts (R5).
            now_ms: returns the time by which Kafka's records are stamped.
            clock: returns seconds.
        """
        # Kafka answers the requests of a connection in order. With the ticks' client, a slow listing would delay ticks.
        self._client = admin_client(kafka)
        self._check_lag = CheckLag(spark, kafka, self._client)
        self._check_interval_ms, self._now_ms, self._clock = check_interval_ms, now_ms, clock
        # A group that is stuck must be found before its next check is due.
        self._ask_every_s = min(ASK_EVERY_S, max(_SHORTEST_S, check_interval_ms / 4000))
        self._away_since_s: dict[str, float] = {}
        self._behind_since_s: dict[str, float] = {}
        self._listed_s: dict[str, float] = {}
        """When Kafka last listed a group, or a broker did not answer, by `_listing_s`."""
        self._listing_s = 0.0
        """The time in which Kafka was being asked, in s. A gap between two listings counts `_LONGEST_STEP_S` at most:
        no broker could say in it that it has loaded its groups."""
        self._last_listing_s = clock()
        self._absent: list[str] = []
        self._is_failing = False
        self._probe_s = -math.inf
        """When to ask again whether this user may Describe groups: before one that is left out ends to be away."""
        self._left_out = 0
        self._known_s = self._answered_s = -math.inf
        self._has_answer, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="groups", daemon=True)

    def take_up(self, listed_ms_ago: Mapping[str, int]) -> None:
        """Take up the groups of a former run: a broker that has just started may not list them yet.

        Args:
            listed_ms_ago: what `listed_ms_ago` returned then.
        """
        self._listed_s = {group: self._listing_s - ms_ago / 1000 for group, ms_ago in listed_ms_ago.items()}

    def listed_ms_ago(self) -> dict[str, int]:
        """Return the groups that Kafka knows, and how long ago it last listed each of them or did not answer."""
        return {group: round((self._listing_s - at_s) * 1000) for group, at_s in self._listed_s.items()}

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def close(self) -> None:
        """Stop asking; waits for the answers that are due: the client must outlive its requests."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(2 * _ANSWER_LIMIT_S)
        self._disconnect()

    def absent(self) -> list[str]:
        """Return the producer groups that are away or behind.

        If they do not all fit into a tick, returns those that left last. The others count as present.

        Raises:
            KafkaUnavailableError: there has been no answer yet: a group wrongly held to be present could lose messages.
        """
        self._wait_for_answer()
        return self._absent

    def known_s(self) -> float | None:
        """Return as of when it is known who is absent. A check counts only if it was sent half an interval before (R5).

        Call it before `absent`, which is then at least as new.

        Returns:
            None if Kafka's last answer is older than 30 s and than half an interval. No check counts then.

        Raises:
            KafkaUnavailableError: there has been no answer yet.
        """
        self._wait_for_answer()
        is_old = self._clock() - self._answered_s > max(_STALE_S, self._check_interval_ms / 2_000)
        return None if is_old else self._known_s

    def _wait_for_answer(self) -> None:
        if not self._has_answer.wait(_FIRST_ANSWER_LIMIT_S):
            raise KafkaUnavailableError("Kafka has not listed its consumer groups yet: check that all its brokers answer")

    def ask(self) -> None:
        """Ask Kafka once, and keep its answer."""
        began_s = self._clock()
        try:
            away, present, failure = self._ask_for_away()
        except (KafkaException, HalfwayError) as error:
            self._listed_s = dict.fromkeys(self._listed_s, self._listing_s)
            return self._note_failure(error.args[0])
        try:
            behind, known_s = self._ask_for_behind(present, began_s)
        except (KafkaException, HalfwayError) as error:
            if not self._has_answer.is_set():
                return self._note_failure(error.args[0])
            # Who is new or back may be behind.
            behind = {**dict.fromkeys(present - self._check_lag.known_groups(), began_s), **self._behind_since_s}
            known_s, failure = self._known_s, error.args[0]
        self._note_failure(failure)
        _log_changes("group_away", self._away_since_s, away, present)
        _log_changes("group_behind", self._behind_since_s, behind, {*present, *away})
        self._away_since_s, self._behind_since_s = away, behind
        since_s = {**away, **behind}
        # Of a group that counts as present something must be known, or no check counts: the others must be named.
        untold = self._check_lag.untold()
        fitting = fit(sorted(since_s, key=lambda group: (group not in untold, -since_s[group], group)))
        left_out = len(since_s) - len(fitting)
        if left_out > self._left_out:
            log.warning("event=absent_groups_left_out groups=%d effect=they_count_as_present", left_out)
        self._left_out = left_out
        self._absent = fitting
        if failure is None:
            self._answered_s = self._clock()
            if untold <= set(fitting):
                self._known_s = known_s
        self._has_answer.set()
        return None

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self.ask()
            except Exception:
                # The thread must not end: the last answer would stand for ever.
                log.exception("event=absent_groups_not_known effect=the_last_answer_stands")
            self._closing.wait(self._ask_every_s)

    def _ask_for_away(self) -> tuple[dict[str, float], set[str], object]:
        """Return since when groups are away, which ones have a member, and why a broker has not answered.

        A group that is not listed and was, up to `GRACE_S` ago, is away: its broker does not answer, or loads it.

        Raises:
            AccessError: Kafka leaves groups out, because this user may not Describe them.
        """
        answer: ListConsumerGroupsResult = self._client.result(self._client.list_consumer_groups(request_timeout=_ANSWER_LIMIT_S))
        if self._clock() >= self._probe_s:
            verify_check_groups(self._client)
            self._probe_s = self._clock() + GRACE_S / 2
        groups = answer.valid or ()
        empty = set(producer_groups(group.group_id for group in groups if group.state == ConsumerGroupState.EMPTY))
        listed = set(producer_groups(group.group_id for group in groups if group.state != ConsumerGroupState.DEAD))
        now_s = self._clock()
        self._listing_s += min(now_s - self._last_listing_s, _LONGEST_STEP_S)
        self._last_listing_s = now_s
        listed_s = {**self._listed_s, **dict.fromkeys(listed, self._listing_s)}
        if answer.errors:
            listed_s = dict.fromkeys(listed_s, self._listing_s)
        self._listed_s = {group: at_s for group, at_s in listed_s.items() if self._listing_s - at_s <= GRACE_S}
        away = {group: self._away_since_s.get(group, now_s) for group in empty | (self._listed_s.keys() - listed)}
        return away, listed - empty, answer.errors[0] if answer.errors else None

    def _ask_for_behind(self, present: set[str], began_s: float) -> tuple[dict[str, float], float]:
        """Return since when groups are behind, and as of when: a check counts that was sent half an interval before."""
        wait_s = self._check_interval_ms / 2_000
        found = self._check_lag.behind(present, self._now_ms() - self._check_interval_ms // 2, began_s, began_s - wait_s)
        now_s = self._clock()
        return {group: self._behind_since_s.get(group, now_s) for group in found}, self._check_lag.known_s

    def _note_failure(self, cause: object) -> None:
        """Log a failure that is new, or that the failure is over if there is no cause."""
        if cause is not None and not self._is_failing:
            log.warning("event=absent_groups_not_known effect=the_last_answer_stands cause=%r", str(cause))
        elif cause is None and self._is_failing:
            log.info("event=absent_groups_known_again")
        if cause is not None:
            self._disconnect()
        self._is_failing = cause is not None

    def _disconnect(self) -> None:
        with suppress(KafkaUnavailableError):
            self._check_lag.close()


def producer_groups(consumer_groups: Iterable[str]) -> list[str]:
    """Return the producer groups that these consumer groups answer checks for; other consumer groups are skipped."""
    prefix = check_group("")
    return [group.removeprefix(prefix) for group in consumer_groups if group.startswith(prefix) and group != prefix]


def fit(groups: Sequence[str]) -> list[str]:
    """Return the groups that fit into a tick. The first ones have precedence."""
    room, fitting = MAX_TICK_BYTES - len(TickValue(job=_ANY_JOB).to_bytes()), list[str]()
    for group in groups:
        size = len(json.dumps(group)) + len(", ")
        if size <= room:  # a name that is too long hides no other
            fitting.append(group)
            room -= size
    return fitting


def _log_changes(event: str, before: Mapping[str, object], now: Mapping[str, object], known: Collection[str]) -> None:
    """Log which groups have begun to be away or behind, and which have ended. Kafka may have forgotten those."""
    for group in sorted(now.keys() - before.keys()):
        log.info("event=%s group=%r", event, group)
    for group in sorted(before.keys() - now.keys()):
        log.info("event=%s_no_more group=%r is_known_to_kafka=%r", event, group, group in known)
