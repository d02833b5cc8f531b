"""The consumer that answers check requests for one producer group (design §2, §7).

One thread owns the Kafka consumer: it polls, pauses and commits. Listeners run in threads of their own, so that a slow one costs no
group membership. A check's offset is committed once its answer is acknowledged, and never past one that is still open.
"""

import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from clients.listener import Answer, TransactionListener, ask
from clients.message import CheckRequest
from schemas.errors import HalfwayError
from schemas.headers import PGROUP, check_group
from schemas.messages import Headers, RecordError
from schemas.settings import KafkaSettings

log = logging.getLogger(__name__)
librdkafka_log = logging.getLogger("clients.librdkafka")
# An application that sets up no logging is not to find librdkafka's lines on stderr; one that does gets them.
librdkafka_log.addHandler(logging.NullHandler())

AnswerSender = Callable[[CheckRequest, Answer, Callable[[KafkaError | None], None]], None]
"""Sends an answer's op record; the callback is told when it is acknowledged, or why not. Raises if it cannot even be queued."""

REMEMBERED_ANSWERS = 10_000
_POLL_S = 0.1
_PAUSED_POLL_S = 0.01
_COMMIT_INTERVAL_S = 0.5
_RETRY_S = 1.0
_CLOSE_LIMIT_S = 10.0
_FETCH_KBYTES = 16 * 1024


def librdkafka_config(settings: KafkaSettings) -> dict[str, Any]:
    """Return what producer and consumer have in common: the way into Kafka, and librdkafka's own log as Python's."""
    return {
        **settings.as_librdkafka_dict(),
        "client.id": "halfway",
        "logger": librdkafka_log,
        "error_cb": _log_error,
        # After an outage, be back within a second or two of Kafka; librdkafka would wait for up to ten.
        "reconnect.backoff.max.ms": 1_000,
        # Brokers close idle connections as a matter of course.
        "log.connection.close": False,
    }


@dataclass(eq=False, slots=True)
class Progress:
    """How far one partition is done: offsets in the order they came, some done before those in front of them."""

    position: int | None = None
    committed: int | None = None
    is_live: bool = True
    _open: deque[int] = field(default_factory=deque)
    _done: set[int] = field(default_factory=set)

    def begin(self, offset: int) -> None:
        """Take note of a record; one that is here already, or done, is not taken twice."""
        last = self._open[-1] if self._open else (self.position or 0) - 1
        if offset > last:
            self._open.append(offset)

    def finish(self, offset: int) -> None:
        """Take note that a record is done, and move `position`, the offset to commit, over all that are done in a row."""
        if self._open and offset >= self._open[0]:
            self._done.add(offset)
        while self._open and self._open[0] in self._done:
            self.position = self._open.popleft() + 1
            self._done.discard(self.position - 1)


@dataclass(eq=False, slots=True)
class _Task:
    """A check on its way: the records that asked it, and the answer once the listener gave one."""

    request: CheckRequest
    sources: list[tuple[Progress, int]]
    answer: Answer | None = None


class CheckAnswerer:
    """Answers the checks of one producer group until it is told to finish.

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
        self._lock = threading.Lock()
        self._progress: dict[int, Progress] = {}
        self._open: dict[str, _Task] = {}
        self._answered: OrderedDict[str, None] = OrderedDict()
        self._retries: deque[tuple[float, _Task]] = deque()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._stopping, self._abandoned = threading.Event(), threading.Event()
        self._gave_up = False
        self._is_paused = False
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

    def finish(self, deadline_s: float | None) -> bool:
        """Start no more listeners, wait until what the running ones say is acknowledged and committed, and leave the group.

        Checks that were read and not begun are another instance's, or come again: their offsets are not committed.

        Args:
            deadline_s: the time by `time.monotonic()` to give up at; None to wait as long as it takes.

        Returns:
            Whether all answers that were begun are out.
        """
        self._stopping.set()
        self._poller.join(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
        if self._poller.is_alive():
            self._abandoned.set()
            self._poller.join(_CLOSE_LIMIT_S)
        with self._lock:
            return not self._open and not self._gave_up

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
            "topic.metadata.refresh.interval.ms": 30_000,
        }

    # What follows, up to the workers, runs in the one thread that owns the consumer; also the rebalance and commit callbacks.

    def _run(self) -> None:
        consumer = cast(Consumer, self._consumer)
        try:
            while not self._stopping.is_set():
                try:
                    self._step(consumer)
                except KafkaException as error:
                    log.error("event=check_consumer_error group=%r error=%s", self._group, error.args[0])
                    self._stopping.wait(_RETRY_S)
            self._drain(consumer)
        except Exception:
            log.exception("event=check_consumer_died group=%r", self._group)
        finally:
            self._dismiss_workers()
            consumer.close()

    def _step(self, consumer: Consumer) -> None:
        self._pause_or_resume(consumer)
        self._retry_due()
        if time.monotonic() >= self._next_commit_s:
            self._commit(consumer, list(self._progress))
            self._next_commit_s = time.monotonic() + _COMMIT_INTERVAL_S
        message = consumer.poll(_PAUSED_POLL_S if self._is_paused else _POLL_S)
        if message is not None:
            self._receive(message)

    def _drain(self, consumer: Consumer) -> None:
        """Wait for the workers and the acknowledgements; poll on, so that rebalances and commits are served meanwhile."""
        with self._lock:
            for _, task in self._retries:
                self._give_up(task)
            self._retries.clear()
        self._dismiss_workers()
        while not self._abandoned.is_set() and (self._open or any(worker.is_alive() for worker in self._workers)):
            consumer.pause(consumer.assignment())
            consumer.poll(_PAUSED_POLL_S)
        self._commit(consumer, list(self._progress))

    def _dismiss_workers(self) -> None:
        """Let the workers end after what is queued. This thread alone queues checks: none can come to lie behind."""
        for _ in self._workers:
            self._tasks.put(None)

    def _pause_or_resume(self, consumer: Consumer) -> None:
        """Keep the number of open checks bounded. Pausing is repeated: a rebalance may have brought partitions that are not."""
        if len(self._open) >= self._max_open:
            consumer.pause(consumer.assignment())
            if not self._is_paused:
                log.info("event=checks_paused open=%d", len(self._open))
            self._is_paused = True
        elif self._is_paused and len(self._open) <= self._max_open // 2:
            consumer.resume(consumer.assignment())
            self._is_paused = False
            log.info("event=checks_resumed open=%d", len(self._open))

    def _retry_due(self) -> None:
        with self._lock:
            while self._retries and self._retries[0][0] <= time.monotonic():
                self._tasks.put(self._retries.popleft()[1])

    def _receive(self, message: Message) -> None:
        error = message.error()
        if error is not None:
            _log_error(error)
            return
        number, offset = cast(int, message.partition()), cast(int, message.offset())
        request = self._read(message)
        with self._lock:
            progress = self._progress.setdefault(number, Progress())
            progress.begin(offset)
            if request is None or request.check_id in self._answered:
                progress.finish(offset)
            elif request.check_id in self._open:
                self._open[request.check_id].sources.append((progress, offset))
            else:
                task = _Task(request, [(progress, offset)])
                self._open[request.check_id] = task
                self._tasks.put(task)

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

    def _commit(self, consumer: Consumer, numbers: list[int]) -> None:
        """Commit what is done in a row, where that moved. librdkafka completes commits before it gives a partition away."""
        offsets = []
        with self._lock:
            for number in numbers:
                progress = self._progress.get(number)
                if progress and progress.position is not None and progress.position != progress.committed:
                    progress.committed = progress.position
                    offsets.append(TopicPartition(self._settings.check_topic, number, progress.position))
        if offsets:
            consumer.commit(offsets=offsets, asynchronous=True)

    def _on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        for partition in partitions:
            failure = error or partition.error
            if failure is None:
                continue
            log.warning("event=check_commit_failed partition=%d error=%s", partition.partition, failure)
            with self._lock:
                progress = self._progress.get(partition.partition)
                if progress:
                    progress.committed = None

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        try:
            self._commit(consumer, [partition.partition for partition in partitions])
        except KafkaException as error:
            log.warning("event=check_commit_failed error=%s", error.args[0])
        self._on_lost(consumer, partitions)

    def _on_lost(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        """Forget the partitions: their next owner asks again what is open here; what a listener says even so does no harm (R2)."""
        log.info("event=check_partitions_revoked partitions=%s", [partition.partition for partition in partitions])
        with self._lock:
            for partition in partitions:
                progress = self._progress.pop(partition.partition, None)
                if progress:
                    progress.is_live = False

    # What follows runs in the worker threads, and for acknowledgements in the producer's.

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            if not self._is_wanted(task):
                continue
            if task.answer is None:
                # sys.exit() in a listener must not end the thread that all later checks wait for.
                task.answer = ask(self._listener.check_local_transaction, task.request, catch=BaseException)
            try:
                self._send_answer(task.request, task.answer, partial(self._on_delivered, task))
            except (HalfwayError, KafkaException) as error:
                self._put_off(task, str(error))

    def _is_wanted(self, task: _Task) -> bool:
        """Tell whether a check is still this instance's to answer; forget it if not."""
        with self._lock:
            if not self._stopping.is_set() and any(progress.is_live for progress, _ in task.sources):
                return True
            self._open.pop(task.request.check_id, None)
            return False

    def _on_delivered(self, task: _Task, error: KafkaError | None) -> None:
        if error is not None:
            self._put_off(task, str(error))
            return
        with self._lock:
            self._open.pop(task.request.check_id, None)
            self._answered[task.request.check_id] = None
            if len(self._answered) > REMEMBERED_ANSWERS:
                self._answered.popitem(last=False)
            for progress, offset in task.sources:
                progress.finish(offset)

    def _put_off(self, task: _Task, why: str) -> None:
        """Send an answer again later: until it is out, the check's offset is not committed."""
        request = task.request
        log.warning("event=answer_not_sent transaction_id=%r check=%d error=%s", request.transaction_id, request.check_times, why)
        with self._lock:
            if self._stopping.is_set():
                self._give_up(task)
            else:
                self._retries.append((time.monotonic() + _RETRY_S, task))

    def _give_up(self, task: _Task) -> None:
        """Leave an answer that did not get out to the next instance; the lock is held."""
        self._open.pop(task.request.check_id, None)
        self._gave_up = True


def _log_assigned(_: Consumer, partitions: list[TopicPartition]) -> None:
    log.info("event=check_partitions_assigned partitions=%s", [partition.partition for partition in partitions])


def _log_error(error: KafkaError) -> None:
    log.log(logging.ERROR if error.fatal() else logging.WARNING, "event=kafka_error code=%s error=%s", error.name(), error)
