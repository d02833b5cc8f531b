"""The consumer that answers check requests for one producer group (design §2, §7).

One thread owns the Kafka consumer: it polls, pauses and commits. Listeners run in threads of their own, so that a slow one costs no
group membership. A check's offset is committed once its answer is acknowledged, and never past one that is still open.
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
from halfway.clients.open_checks import Ledger, Task
from halfway.schemas.errors import HalfwayError
from halfway.schemas.headers import PGROUP, check_group
from halfway.schemas.records import Headers, RecordError
from halfway.schemas.settings import KafkaSettings

log = logging.getLogger(__name__)

AnswerSender = Callable[[CheckRequest, Answer, Callable[[KafkaError | None], None]], None]
"""Sends an answer's op record; the callback is told when it is acknowledged, or why not. Raises if it cannot even be queued."""

_POLL_S = 0.1
_PAUSED_POLL_S = 0.01
_COMMIT_INTERVAL_S = 0.5
_RETRY_S = 1.0
_FETCH_KBYTES = 16 * 1024


class CheckAnswerer:
    """Answers the checks of one producer group until it is told to stop.

    Args:
        settings: where Kafka is.
        group: the producer group.
        listener: who is asked.
        send: how an answer gets out.
        threads: how many listeners may run at once.
        max_open: how many checks may be read and not yet answered; beyond, the consumer pauses (and keeps its membership).
        session_timeout_ms: after how long a dead instance's partitions go to another one.
        message_bytes: the largest record to expect.
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
        """Take note; nothing connects before `start`."""
        self._settings, self._group, self._listener, self._send_answer = settings, group, listener, send
        self._max_open, self._session_timeout_ms, self._message_bytes = max_open, session_timeout_ms, message_bytes
        self._ledger = Ledger()
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._stopping, self._abandoned, self._has_left = threading.Event(), threading.Event(), threading.Event()
        self._listeners, self._asking = threading.Condition(), 0
        self._is_paused = False
        self._told: int | None = None
        self._next_commit_s = 0.0
        self._consumer: Consumer | None = None
        self._poller = threading.Thread(target=self._run, name=f"halfway-checks-{group}", daemon=True)
        self._workers = [
            threading.Thread(target=self._work, name=f"halfway-check-{group}-{number}", daemon=True) for number in range(threads)
        ]

    def start(self) -> None:
        """Join the group's consumers, in the background."""
        self._consumer = Consumer(self._config())
        self._consumer.subscribe([self._settings.check_topic], on_assign=_log_assigned, on_revoke=self._on_revoke, on_lost=self._on_lost)
        for thread in (self._poller, *self._workers):
            thread.start()

    def stop(self, deadline_s: float | None) -> bool:
        """Start no more listeners, and wait for those that are running.

        Checks that were read and not begun are another instance's, or come again: their offsets are not committed.

        Args:
            deadline_s: the time by `time.monotonic()` to give up at; None to wait as long as they take.

        Returns:
            Whether all have ended.
        """
        self._stopping.set()
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        with self._listeners:
            return self._listeners.wait_for(lambda: self._asking == 0, left_s)

    def leave(self, deadline_s: float) -> bool:
        """Wait until what the listeners said is acknowledged and committed and the group is left; after `stop`.

        All of that goes on in the thread that owns the consumer, and this one waits no longer than it is told: librdkafka's own close
        has no time limit, and was seen to hang where Kafka had just gone.

        Args:
            deadline_s: the time by `time.monotonic()` to give up at.

        Returns:
            Whether all answers that were begun are out, and the group is left.
        """
        has_left = self._has_left.wait(max(0.0, deadline_s - time.monotonic()))
        self._abandoned.set()
        return has_left and self._ledger.is_complete()

    def is_answering_here(self) -> bool:
        """Tell whether the calling thread is one that asks the listener."""
        return threading.current_thread() in self._workers

    def _config(self) -> dict[str, Any]:
        return {
            **librdkafka_config(self._settings),
            "group.id": check_group(self._group),
            # Where the group has committed nothing yet, the check that was sent just before it first came must not be lost: it may be
            # the last one (R6), and its message would be discarded. The price is that a new group, or one back after its offsets
            # expired, answers old checks that are retained. That changes no outcome: the first verdict won (R2, R10, R11).
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "on_commit": self._on_commit,
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": self._session_timeout_ms,
            "heartbeat.interval.ms": max(1, self._session_timeout_ms // 4),
            "message.max.bytes": self._message_bytes,
            "queued.max.messages.kbytes": _FETCH_KBYTES,
            # 1000 by default: a full queue would be empty again before that is over.
            "fetch.queue.backoff.ms": 10,
            "topic.metadata.refresh.interval.ms": 30_000,
        }

    # What follows, up to the workers, runs in the one thread that owns the consumer; also the rebalance and commit callbacks.

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
        for task in self._ledger.due(time.monotonic()):
            self._tasks.put(task)
        if time.monotonic() >= self._next_commit_s:
            self._commit(consumer)
            self._next_commit_s = time.monotonic() + _COMMIT_INTERVAL_S
        message = consumer.poll(_PAUSED_POLL_S if self._is_paused else _POLL_S)
        if message is not None:
            self._receive(message)

    def _drain(self, consumer: Consumer) -> None:
        """Wait for the workers and the acknowledgements; poll on, so that rebalances and commits are served meanwhile."""
        self._ledger.end()
        self._dismiss_workers()
        while not self._abandoned.is_set() and (self._ledger.open_checks() or any(worker.is_alive() for worker in self._workers)):
            self._serve(consumer, self._poll_paused)
        self._serve(consumer, self._commit)

    @staticmethod
    def _poll_paused(consumer: Consumer) -> None:
        consumer.pause(consumer.assignment())
        consumer.poll(_PAUSED_POLL_S)

    def _dismiss_workers(self) -> None:
        """Let the workers end after what is queued. This thread alone queues checks: none can come to lie behind."""
        for _ in self._workers:
            self._tasks.put(None)

    def _pause_or_resume(self, consumer: Consumer) -> None:
        """Keep the number of open checks bounded. Pausing is repeated: a rebalance may have brought partitions that are not."""
        open_checks = self._ledger.open_checks()
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
            self._tell(error)
            return
        self._told = None
        task = self._ledger.read(cast(int, message.partition()), cast(int, message.offset()), self._read(message))
        if task is not None:
            self._tasks.put(task)

    def _tell(self, error: KafkaError) -> None:
        """Log why no checks come, once: librdkafka repeats it each second."""
        rights = {
            KafkaError.TOPIC_AUTHORIZATION_FAILED: ("topic", self._settings.check_topic),
            KafkaError.GROUP_AUTHORIZATION_FAILED: ("group", check_group(self._group)),
        }
        right = rights.get(error.code())
        if right is None:
            log_error(error)
        elif self._told != error.code():
            log.error("event=checks_refused error=%s", missing_right(self._settings.security.user, "Read", *right))
        self._told = error.code()

    def _read(self, message: Message) -> CheckRequest | None:
        """Return the check if it is one for this group."""
        try:
            headers = cast(Headers, message.headers() or [])
            groups = [value for name, value in headers if name == PGROUP]
            if groups and self._group.encode() not in groups:
                return None
            return CheckRequest.from_record(message.key(), message.value(), headers)
        except (RecordError, UnicodeDecodeError) as error:
            # A header's name that is not UTF-8 fails in confluent_kafka, with UnicodeDecodeError.
            detail = error if isinstance(error, RecordError) else "a header's name is not UTF-8"
            log.warning("event=check_skipped partition=%s offset=%s detail=%r", message.partition(), message.offset(), str(detail))
            return None

    def _commit(self, consumer: Consumer) -> None:
        """Commit what is done in a row, where that moved. librdkafka completes commits before it gives a partition away."""
        moved = self._ledger.to_commit()
        if moved:
            offsets = [TopicPartition(self._settings.check_topic, partition, offset) for partition, offset in moved.items()]
            try:
                consumer.commit(offsets=offsets, asynchronous=True)
            except KafkaException:
                for partition in moved:
                    self._ledger.commit_failed(partition)
                raise

    def _on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        for partition in partitions:
            failure = error or partition.error
            if failure is None:
                continue
            log.warning("event=check_commit_failed partition=%d error=%s", partition.partition, failure)
            self._ledger.commit_failed(partition.partition)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        try:
            self._commit(consumer)
        except KafkaException as error:
            log.warning("event=check_commit_failed error=%s", error.args[0])
        self._on_lost(consumer, partitions)

    def _on_lost(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        numbers = [partition.partition for partition in partitions]
        log.info("event=check_partitions_revoked partitions=%s", numbers)
        self._ledger.revoke(numbers)

    # What follows runs in the worker threads, and for acknowledgements in the producer's.

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            if not self._begin(task):
                continue
            if task.answer is None:
                # sys.exit() in a listener must not end the thread that all later checks wait for.
                task.answer = ask(self._listener.check_local_transaction, task.request, catch=BaseException)
            self._end()
            try:
                self._send_answer(task.request, task.answer, partial(self._on_delivered, task))
            except (HalfwayError, KafkaException) as error:
                self._put_off(task, str(error))

    def _begin(self, task: Task) -> bool:
        """Count a listener, if the check is still this instance's to answer; forget the check if not."""
        with self._listeners:
            if not self._stopping.is_set() and self._ledger.is_wanted(task):
                self._asking += 1
                return True
        self._ledger.forget(task)
        return False

    def _end(self) -> None:
        with self._listeners:
            self._asking -= 1
            self._listeners.notify_all()

    def _on_delivered(self, task: Task, error: KafkaError | None) -> None:
        if error is None:
            self._ledger.answered(task)
        else:
            self._put_off(task, str(error))

    def _put_off(self, task: Task, why: str) -> None:
        """Send an answer again later: until it is out, the check's offset is not committed."""
        request = task.request
        log.warning("event=answer_not_sent transaction_id=%r check=%d error=%s", request.transaction_id, request.check_times, why)
        self._ledger.put_off(task, time.monotonic() + _RETRY_S)


def _log_assigned(_: Consumer, partitions: list[TopicPartition]) -> None:
    log.info("event=check_partitions_assigned partitions=%s", [partition.partition for partition in partitions])
