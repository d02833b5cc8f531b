"""Answers the check requests of one producer group (docs/contract.md).

One thread owns the Kafka consumer: it polls, pauses and commits. Listeners run in other threads, so a slow listener
does not cost the group membership. A check's offset is committed after Kafka has acknowledged its answer, never before.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from halfway.clients.kafka.config import librdkafka_config, log_error
from halfway.clients.kafka.diagnosis import missing_right
from halfway.clients.listener import Answer, TransactionListener, ask
from halfway.clients.messages import CheckRequest
from halfway.clients.open_checks import CheckTask, OpenChecks
from halfway.schemas.errors import HalfwayError
from halfway.schemas.headers import PGROUP, check_group
from halfway.schemas.records import Headers, RecordError
from halfway.schemas.settings import KafkaSettings

log = logging.getLogger(__name__)

AnswerSender = Callable[[CheckRequest, Answer, Callable[[KafkaError | None], None]], None]
"""Queues the op record of an answer, or raises. The callback gets None once it is acknowledged, or else the error."""

_POLL_S = 0.1
_PAUSED_POLL_S = 0.01
_COMMIT_INTERVAL_S = 0.5
_RETRY_S = 1.0
_FETCH_KBYTES = 16 * 1024


class CheckAnswerer:
    """Answers the checks of one producer group until it is stopped.

    Args:
        settings: where Kafka is, and how to log in.
        group: the producer group.
        listener: the application's listener.
        send: sends an answer.
        threads: how many checks are answered at once.
        max_open: how many checks may be read and not yet answered. At this number the consumer pauses.
        session_timeout_ms: when Kafka gives a dead instance's partitions to another one.
        message_bytes: the size of the largest record.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        group: str,
        listener: TransactionListener,
        send: AnswerSender,
        *,
        threads: int,
        max_open: int,
        session_timeout_ms: int,
        message_bytes: int,
    ) -> None:
        """Store the configuration. Does not connect."""
        self._settings, self._group, self._listener, self._send_answer = settings, group, listener, send
        self._max_open, self._session_timeout_ms, self._message_bytes = max_open, session_timeout_ms, message_bytes
        self._open_checks = OpenChecks()
        self._tasks: queue.SimpleQueue[CheckTask | None] = queue.SimpleQueue()
        self._stopping, self._abandoned, self._has_left = threading.Event(), threading.Event(), threading.Event()
        self._listener_ended, self._running = threading.Condition(), 0
        self._is_paused = False
        self._last_error: int | None = None
        self._next_commit_s = 0.0
        self._consumer: Consumer | None = None
        self._poller = threading.Thread(target=self._run, name=f"halfway-checks-{group}", daemon=True)
        self._workers = [
            threading.Thread(target=self._answer, name=f"halfway-check-{group}-{number}", daemon=True) for number in range(threads)
        ]

    def start(self) -> None:
        """Join the consumer group in the background."""
        self._consumer = Consumer(self._config())
        self._consumer.subscribe([self._settings.check_topic], on_assign=_log_assigned, on_revoke=self._on_revoke, on_lost=self._on_lost)
        for thread in (self._poller, *self._workers):
            thread.start()

    def stop(self, deadline_s: float | None) -> bool:
        """Start no more listeners, and wait for those that run.

        The offsets of checks that were read and not begun stay uncommitted: the group's next owner reads them again.

        Args:
            deadline_s: the time by `time.monotonic()` at which to stop waiting; None to wait until they end.

        Returns:
            True if all listeners have ended.
        """
        self._stopping.set()
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        with self._listener_ended:
            return self._listener_ended.wait_for(lambda: self._running == 0, left_s)

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
        """Return True if the calling thread is one that runs the listener."""
        return threading.current_thread() in self._workers

    def _config(self) -> dict[str, Any]:
        return {
            **librdkafka_config(self._settings),
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
            "message.max.bytes": self._message_bytes,
            "queued.max.messages.kbytes": _FETCH_KBYTES,
            # librdkafka waits 1000 ms by default before it fills a full queue again. The queue is empty sooner.
            "fetch.queue.backoff.ms": 10,
            "topic.metadata.refresh.interval.ms": 30_000,
        }

    # The methods from here to `_on_lost` run in the thread that owns the consumer, which calls the callbacks too.

    def _run(self) -> None:
        consumer = cast(Consumer, self._consumer)
        try:
            while not self._stopping.is_set():
                self._serve(consumer, self._step)
            self._drain(consumer)
        except Exception:
            log.exception("event=check_consumer_died group=%r", self._group)
        finally:
            self._dismiss_workers()
            try:
                consumer.close()
            finally:
                self._has_left.set()

    def _serve(self, consumer: Consumer, step: Callable[[Consumer], None]) -> None:
        try:
            step(consumer)
        except KafkaException as error:
            log.error("event=check_consumer_error group=%r error=%s", self._group, error.args[0])
            (self._abandoned if self._stopping.is_set() else self._stopping).wait(_RETRY_S)

    def _step(self, consumer: Consumer) -> None:
        self._pause_or_resume(consumer)
        for task in self._open_checks.due(time.monotonic()):
            self._tasks.put(task)
        if time.monotonic() >= self._next_commit_s:
            self._commit(consumer)
            self._next_commit_s = time.monotonic() + _COMMIT_INTERVAL_S
        message = consumer.poll(_PAUSED_POLL_S if self._is_paused else _POLL_S)
        if message is not None:
            self._receive(message)

    def _drain(self, consumer: Consumer) -> None:
        """Wait for the workers and the acknowledgements. Keep polling, which serves rebalances and commits."""
        self._open_checks.end()
        self._dismiss_workers()
        while not self._abandoned.is_set() and (self._open_checks.count() or any(worker.is_alive() for worker in self._workers)):
            self._serve(consumer, self._poll_paused)
        self._serve(consumer, self._commit)

    @staticmethod
    def _poll_paused(consumer: Consumer) -> None:
        consumer.pause(consumer.assignment())
        consumer.poll(_PAUSED_POLL_S)

    def _dismiss_workers(self) -> None:
        """Let the workers end after the queued checks. Only this thread queues checks, so none can follow."""
        for _ in self._workers:
            self._tasks.put(None)

    def _pause_or_resume(self, consumer: Consumer) -> None:
        """Bound the number of open checks. Each call pauses again: a rebalance may have added partitions."""
        open_checks = self._open_checks.count()
        if open_checks >= self._max_open:
            consumer.pause(consumer.assignment())
            if not self._is_paused:
                log.info("event=checks_paused open=%d", open_checks)
            self._is_paused = True
        elif self._is_paused and open_checks <= self._max_open // 2:
            consumer.resume(consumer.assignment())
            self._is_paused = False
            log.info("event=checks_resumed open=%d", open_checks)

    def _receive(self, message: Message) -> None:
        error = message.error()
        if error is not None:
            self._log_refusal(error)
            return
        self._last_error = None
        task = self._open_checks.add(cast(int, message.partition()), cast(int, message.offset()), self._request_of(message))
        if task is not None:
            self._tasks.put(task)

    def _log_refusal(self, error: KafkaError) -> None:
        """Log why no checks arrive. Log a missing right once: librdkafka reports it each second."""
        rights = {
            KafkaError.TOPIC_AUTHORIZATION_FAILED: ("topic", self._settings.check_topic),
            KafkaError.GROUP_AUTHORIZATION_FAILED: ("group", check_group(self._group)),
        }
        right = rights.get(error.code())
        if right is None:
            log_error(error)
        elif self._last_error != error.code():
            log.error("event=checks_refused error=%s", missing_right(self._settings.security.user, "Read", *right))
        self._last_error = error.code()

    def _request_of(self, message: Message) -> CheckRequest | None:
        """Return the check that a record holds; None if it is for another group or breaks the contract."""
        try:
            headers = cast(Headers, message.headers() or [])
            groups = [value for name, value in headers if name == PGROUP]
            if groups and self._group.encode() not in groups:
                return None
            return CheckRequest.from_record(message.key(), message.value(), headers)
        except (RecordError, UnicodeDecodeError) as error:
            # confluent_kafka raises UnicodeDecodeError if the name of a header is not UTF-8.
            detail = error if isinstance(error, RecordError) else "the name of a header is not UTF-8"
            log.warning("event=check_skipped partition=%s offset=%s detail=%r", message.partition(), message.offset(), str(detail))
            return None

    def _commit(self, consumer: Consumer) -> None:
        """Commit the offsets that advanced. librdkafka completes commits before it gives up a partition."""
        moved = self._open_checks.to_commit()
        if moved:
            offsets = [TopicPartition(self._settings.check_topic, partition, offset) for partition, offset in moved.items()]
            try:
                consumer.commit(offsets=offsets, asynchronous=True)
            except KafkaException:
                for partition in moved:
                    self._open_checks.commit_failed(partition)
                raise

    def _on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        for partition in partitions:
            failure = error or partition.error
            if failure is None:
                continue
            log.warning("event=check_commit_failed partition=%d error=%s", partition.partition, failure)
            self._open_checks.commit_failed(partition.partition)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        try:
            self._commit(consumer)
        except KafkaException as error:
            log.warning("event=check_commit_failed error=%s", error.args[0])
        self._on_lost(consumer, partitions)

    def _on_lost(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        numbers = [partition.partition for partition in partitions]
        log.info("event=check_partitions_revoked partitions=%s", numbers)
        self._open_checks.revoke(numbers)

    # The methods from here on run in the worker threads, `_on_delivered` in the sender's thread.

    def _answer(self) -> None:
        while (task := self._tasks.get()) is not None:
            if not self._begin(task):
                continue
            if task.answer is None:
                # sys.exit() in a listener must not end this thread: later checks wait for it.
                task.answer = ask(self._listener.check_local_transaction, task.request, catch=BaseException)
            self._end()
            try:
                self._send_answer(task.request, task.answer, partial(self._on_delivered, task))
            except (HalfwayError, KafkaException) as error:
                self._put_off(task, str(error))

    def _begin(self, task: CheckTask) -> bool:
        """Count a running listener and return True. If the check is not this instance's any more, drop it."""
        with self._listener_ended:
            if not self._stopping.is_set() and self._open_checks.is_owned(task):
                self._running += 1
                return True
        self._open_checks.drop(task)
        return False

    def _end(self) -> None:
        with self._listener_ended:
            self._running -= 1
            self._listener_ended.notify_all()

    def _on_delivered(self, task: CheckTask, error: KafkaError | None) -> None:
        if error is None:
            self._open_checks.finish(task)
        else:
            self._put_off(task, str(error))

    def _put_off(self, task: CheckTask, why: str) -> None:
        """Resend an answer later. Its check's offset is not committed before the answer is acknowledged."""
        request = task.request
        log.warning("event=answer_not_sent transaction_id=%r check=%d error=%s", request.transaction_id, request.check_times, why)
        self._open_checks.put_off(task, time.monotonic() + _RETRY_S)


def _log_assigned(_: Consumer, partitions: list[TopicPartition]) -> None:
    log.info("event=check_partitions_assigned partitions=%s", [partition.partition for partition in partitions])
