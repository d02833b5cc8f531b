"""Answers the check requests of one producer group (docs/contract.md).

One thread owns the Kafka consumer: it polls, pauses and commits. Listeners run in other threads or in an event loop
(`CheckWorkers`), so a slow listener does not cost the group membership. A check's offset is committed after Kafka has
acknowledged its answer, never before.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from halfway.clients.check_records import CheckRecords
from halfway.clients.check_workers import CheckWorkers
from halfway.clients.kafka.client_log import ClientLog
from halfway.clients.kafka.config import FOLLOW_LEADERS, READ_ANY_SIZE, librdkafka_config
from halfway.clients.kafka.diagnosis import missing_right
from halfway.clients.open_checks import OpenChecks
from halfway.schemas.errors import KafkaUnavailableError
from halfway.schemas.headers import check_group
from halfway.schemas.settings import KafkaSettings

log = logging.getLogger(__name__)

_POLL_S = 0.1
_PAUSED_POLL_S = 0.01
_COMMIT_INTERVAL_S = 0.5
_RETRY_S = 1.0
_LOOK_UP_LIMIT_S = 5.0
_LIST_LIMIT_S = 0.5
_MAKE_KNOWN_LIMIT_S = 1.0
_KNOWN_AT_END_S = 3.0
_JOIN_WITHIN_S = 5.0
_NOT_REACHED = {
    *(KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._WAIT_COORD),
    *(KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.NOT_COORDINATOR),
}
"""What a request ends with that Kafka or the group's coordinator has not answered: it may, a moment later."""
_FETCH_KBYTES = 16 * 1024


class CheckAnswerer:
    """Answers the checks of one producer group until it is stopped. Leaves the group while it cannot send answers.

    Args:
        settings: where Kafka is, and how to log in.
        group: the producer group.
        make_workers: makes what answers the checks that it is given.
        can_send: returns False while no answer can be sent.
        has_sent: returns True once Kafka has acknowledged a record of this instance.
        max_open: how many checks may be read and not yet answered. At this number the consumer pauses.
        session_timeout_ms: when Kafka gives a dead instance's partitions to another one.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        group: str,
        make_workers: Callable[[OpenChecks], CheckWorkers],
        can_send: Callable[[], bool],
        has_sent: Callable[[], bool],
        *,
        max_open: int,
        session_timeout_ms: int,
    ) -> None:
        """Store the configuration. Does not connect."""
        self._settings, self._group, self._can_send, self._has_sent = settings, group, can_send, has_sent
        self._topic, self._records = settings.check_topic_of(group), CheckRecords(settings, group)
        self._session_timeout_ms = session_timeout_ms
        self._open_checks = OpenChecks(max_open)
        self._workers = make_workers(self._open_checks)
        self._stopping, self._abandoned, self._has_left = threading.Event(), threading.Event(), threading.Event()
        self._is_member, self._is_paused = False, False
        self._is_known, self._is_making_known = False, False
        self._assigned: list[TopicPartition] = []
        self._last_error: int | None = None
        self._log = ClientLog()
        self._next_commit_s = self._next_look_up_s = self._join_by_s = 0.0
        self._consumer: Consumer | None = None

    def start(self) -> None:
        """Join the consumer group in the background.

        Raises:
            KafkaUnavailableError: librdkafka rejects the settings.
        """
        try:
            self._consumer = Consumer(self._config())
        except KafkaException as error:
            raise KafkaUnavailableError(f"cannot use Kafka with these settings: {error.args[0].str()}") from None
        self._join_by_s = time.monotonic() + _JOIN_WITHIN_S
        try:
            self._workers.start()
            threading.Thread(target=self._run, name=f"halfway-checks-{self._group}", daemon=True).start()
        except BaseException:  # no thread is left: what has started ends, and a later start begins again
            self._workers.dismiss()
            raise

    def stop(self, deadline_s: float | None) -> bool:
        """Start no more listeners, and wait for those that run.

        The offsets of checks that were read and not begun stay uncommitted: the group's next owner reads them again.

        Args:
            deadline_s: the time by `time.monotonic()` at which to stop waiting; None to wait until they end.

        Returns:
            True if all listeners have ended.
        """
        self._stopping.set()
        return self._workers.stop(deadline_s)

    def leave(self, deadline_s: float) -> bool:
        """Wait until the answers are acknowledged, their offsets committed and the group left. Call it after `stop`.

        The thread that owns the consumer does all of that. The caller only waits: librdkafka's own close has no time
        limit, and can hang if Kafka has just gone.

        Args:
            deadline_s: the time by `time.monotonic()` at which to stop waiting.

        Returns:
            True if every answer that was begun is acknowledged and the group is left.
        """
        has_left = self._has_left.wait(max(0.0, deadline_s - time.monotonic()))
        self._abandoned.set()
        return has_left and self._open_checks.is_complete()

    def is_answering_here(self) -> bool:
        """Return True if the caller is what runs the listener."""
        return self._workers.is_worker_calling()

    def _config(self) -> dict[str, Any]:
        return {
            **librdkafka_config(self._settings, self._log),
            "group.id": check_group(self._group),
            # A check that was sent before the group's first start may be the last one (R6). If the group skipped it,
            # the message would be discarded. So a group without committed offsets, new or expired, answers every check
            # that the topic holds. Answers to old checks change no outcome: the first verdict wins (R2, R10, R11).
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "on_commit": self._on_commit,
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": self._session_timeout_ms,
            "heartbeat.interval.ms": max(1, self._session_timeout_ms // 4),
            **READ_ANY_SIZE,
            "queued.max.messages.kbytes": _FETCH_KBYTES,
            # librdkafka waits 1000 ms by default before it fills a full queue again. The queue is empty sooner.
            "fetch.queue.backoff.ms": 10,
            **FOLLOW_LEADERS,
        }

    # The methods from here to `_on_lost` run in the thread that owns the consumer, which calls the callbacks too.

    def _run(self) -> None:
        consumer = cast(Consumer, self._consumer)
        try:
            while not self._stopping.is_set() and self._workers.can_answer():
                self._serve(consumer, self._step)
            if self._has_sent():
                self._make_known_at_end(consumer)
            self._drain(consumer)
        except Exception:
            log.exception("event=check_consumer_died group=%r", self._group)
        finally:
            self._workers.dismiss()
            if self._is_making_known and not self._is_member:
                # Kafka has gone meanwhile: `close` would wait for it, and there is no group to leave.
                self._has_left.set()
            try:
                consumer.close()
            finally:
                self._has_left.set()

    def _serve(self, consumer: Consumer, step: Callable[[Consumer], None]) -> None:
        try:
            step(consumer)
        except KafkaException as error:
            log.error("event=check_consumer_error group=%r error=%r", self._group, str(error.args[0]))
            (self._abandoned if self._stopping.is_set() else self._stopping).wait(_RETRY_S)

    def _step(self, consumer: Consumer) -> None:
        self._join_or_leave(consumer)
        self._begin_assigned(consumer)
        self._pause_or_resume(consumer)
        for task in self._open_checks.due(time.monotonic()):
            self._workers.put(task)
        if time.monotonic() >= self._next_commit_s:
            self._commit(consumer)
            self._next_commit_s = time.monotonic() + _COMMIT_INTERVAL_S
        message = consumer.poll(_PAUSED_POLL_S if self._is_paused else _POLL_S)
        if message is not None:
            self._receive(message)

    def _join_or_leave(self, consumer: Consumer) -> None:
        """Leave the group while answers cannot be sent.

        Other instances then get its checks. If there is none, the job does not count them (R15).
        """
        can_send = self._can_send()
        if can_send == self._is_member:
            return
        if can_send:
            if not self._is_known:
                self._make_known(consumer)
            if not self._is_known and time.monotonic() < self._join_by_s:
                return
            consumer.subscribe([self._topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost)
        else:
            consumer.unsubscribe()
            log.error("event=check_group_left group=%r cause=answers_cannot_be_sent", self._group)
        self._is_member = can_send

    def _make_known(self, consumer: Consumer) -> None:
        """Commit a position where the group has none, before it joins, which takes Kafka seconds.

        As long as a group has committed nothing, Kafka forgets it with its last member, and its checks would count
        though nobody reads them (R15): a short process would have ended by then. If Kafka takes it late, what an
        instance has answered that came and went meanwhile is answered again. It joins once Kafka has answered, or after
        `_JOIN_WITHIN_S`: with its first partition it commits a position too.
        """
        try:
            partitions = consumer.list_topics(self._topic, timeout=_LIST_LIMIT_S).topics[self._topic].partitions
            if not partitions:  # The topic was just made.
                return
            places = [TopicPartition(self._topic, partition) for partition in partitions]
            found = consumer.committed(places, timeout=_MAKE_KNOWN_LIMIT_S)
            begins = [TopicPartition(self._topic, place.partition, 0) for place in found if place.error is None and place.offset < 0]
            if not begins:
                self._note_answer(place.error for place in found)
                return
            consumer.commit(offsets=begins, asynchronous=True)  # Waiting for it has no time limit.
            self._is_making_known = True
            deadline_s = time.monotonic() + _MAKE_KNOWN_LIMIT_S
            while not self._is_known and time.monotonic() < deadline_s:
                consumer.poll(_PAUSED_POLL_S)
        except KafkaException as error:
            self._note_answer([error.args[0]])

    def _make_known_at_end(self, consumer: Consumer) -> None:
        """Make the group known before the process ends, if Kafka has not answered yet."""
        deadline_s = time.monotonic() + _KNOWN_AT_END_S
        if not self._is_known and self._is_member and not consumer.assignment():
            # Kafka takes no position from a member that waits for a partition.
            consumer.unsubscribe()
            self._is_member = False
        while not self._is_known and time.monotonic() < deadline_s:
            self._make_known(consumer)
            if not self._is_known and self._abandoned.wait(_POLL_S):
                break
        if not self._is_known:
            log.warning("event=check_group_not_known group=%r effect=its_checks_count_while_no_instance_runs", self._group)

    def _note_answer(self, errors: Iterable[KafkaError | None]) -> None:
        """Note whether Kafka has answered. It refuses where another instance is a member.

        It may refuse for a missing right too, which is logged after joining.
        """
        self._is_known = not any(error is not None and error.code() in _NOT_REACHED for error in errors)

    def _begin_assigned(self, consumer: Consumer) -> None:
        """Read new partitions on from where the group is.

        librdkafka looks that up once, and never reads the partition if the coordinator moves just then (librdkafka
        #5586). So each partition is handed to it with an offset.
        """
        if not self._assigned or time.monotonic() < self._next_look_up_s:
            return
        try:
            places = consumer.committed(self._assigned, timeout=_LOOK_UP_LIMIT_S)
            for place in places:
                if place.error is not None:
                    raise KafkaException(place.error)
        except KafkaException as error:  # The other partitions are served meanwhile.
            log.error("event=check_offsets_not_known group=%r error=%r", self._group, str(error.args[0]))
            self._next_look_up_s = time.monotonic() + _RETRY_S
            return
        offsets: dict[int, int | None] = {}
        for place in places:
            offsets[place.partition] = place.offset if place.offset >= 0 else None
            place.offset = place.offset if place.offset >= 0 else OFFSET_BEGINNING
        self._open_checks.assign(offsets)
        consumer.incremental_assign(places)
        self._assigned, self._next_commit_s = [], 0.0
        if not self._is_paused:
            # librdkafka keeps a pause when a partition goes to another instance, and when it comes back.
            consumer.resume(places)

    def _drain(self, consumer: Consumer) -> None:
        """Wait for the listeners and the acknowledgements. Keep polling, which serves rebalances and commits."""
        self._open_checks.end()
        self._workers.dismiss()
        while not self._abandoned.is_set() and self._workers.can_answer() and (self._open_checks.count() or self._workers.are_alive()):
            self._serve(consumer, self._poll_paused)
        self._serve(consumer, self._commit)

    @staticmethod
    def _poll_paused(consumer: Consumer) -> None:
        consumer.pause(consumer.assignment())
        consumer.poll(_PAUSED_POLL_S)

    def _pause_or_resume(self, consumer: Consumer) -> None:
        """Bound the number of open checks. Each call pauses again: a rebalance may have added partitions."""
        if self._open_checks.is_full():
            consumer.pause(consumer.assignment())
            if not self._is_paused:
                log.info("event=checks_paused open=%d", self._open_checks.count())
            self._is_paused = True
        elif self._is_paused and self._open_checks.has_room():
            consumer.resume(consumer.assignment())
            self._is_paused = False
            log.info("event=checks_resumed open=%d", self._open_checks.count())

    def _receive(self, message: Message) -> None:
        error = message.error()
        if error is not None:
            self._log_refusal(error)
            return
        self._last_error = None
        place = cast(int, message.partition()), cast(int, message.offset())
        task = self._open_checks.add(*place, self._records.request_of(message), message.timestamp()[1])
        if task is not None:
            self._workers.put(task)

    def _log_refusal(self, error: KafkaError) -> None:
        """Log why no checks arrive. Log a missing right once: librdkafka reports it each second."""
        rights = {
            KafkaError.TOPIC_AUTHORIZATION_FAILED: ("topic", self._topic),
            KafkaError.GROUP_AUTHORIZATION_FAILED: ("group", check_group(self._group)),
        }
        right = rights.get(error.code())
        if right is None:
            self._log.error(error)
        elif self._last_error != error.code():
            log.error("event=checks_refused error=%r", missing_right(self._settings.security.login, "Read", *right))
        self._last_error = error.code()

    def _commit(self, consumer: Consumer) -> None:
        """Commit the offsets that advanced. librdkafka completes commits before it gives up a partition."""
        moved = self._open_checks.to_commit()
        if moved:
            offsets = [TopicPartition(self._topic, partition, offset) for partition, offset in moved.items()]
            try:
                consumer.commit(offsets=offsets, asynchronous=True)
            except KafkaException:
                for partition in moved:
                    self._open_checks.commit_failed(partition)
                raise

    def _on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        self._is_making_known = False
        if not self._is_known:
            self._note_answer([error, *(partition.error for partition in partitions)])
        if not self._is_member:
            return
        for partition in partitions:
            failure = error or partition.error
            if failure is None:
                continue
            log.warning("event=check_commit_failed partition=%d error=%r", partition.partition, str(failure))
            self._open_checks.commit_failed(partition.partition)

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        log.info("event=check_partitions_assigned partitions=%s", [partition.partition for partition in partitions])
        consumer.incremental_assign([])  # Without a call librdkafka would begin them by itself.
        self._assigned += partitions

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        try:
            self._commit(consumer)
        except KafkaException as error:
            log.warning("event=check_commit_failed error=%r", str(error.args[0]))
        self._on_lost(consumer, partitions)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        numbers = [partition.partition for partition in partitions]
        log.info("event=check_partitions_revoked partitions=%s", numbers)
        not_begun = {place.partition for place in self._assigned}
        self._assigned = [place for place in self._assigned if place.partition not in numbers]
        self._open_checks.revoke(numbers)
        consumer.incremental_unassign([place for place in partitions if place.partition not in not_begun])
