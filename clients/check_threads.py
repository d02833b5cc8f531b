"""Runs the threads that answer checks: each asks the listener, and sends the answer."""

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from confluent_kafka import KafkaError

from halfway.clients.listener import Answer
from halfway.clients.messages import CheckRequest
from halfway.clients.open_checks import CheckTask, OpenChecks
from halfway.schemas.records import RecordError

log = logging.getLogger(__name__)

_RETRY_S = 1.0


class Answers(NamedTuple):
    """Where answers come from, and where they go."""

    of: Callable[[CheckRequest], Answer]
    """Returns the answer to a check."""
    send: Callable[[CheckRequest, Answer, Callable[[KafkaError | None], None]], None]
    """Queues the op record of an answer, or raises. The callback gets None once it is acknowledged, or the error."""


class CheckWorkers(ABC):
    """What answers checks: threads, or tasks of an event loop. Only one other thread calls `put` and `dismiss`.

    Args:
        open_checks: learns what became of each check.
    """

    def __init__(self, open_checks: OpenChecks) -> None:
        """Store where to tell what became of a check."""
        self._open_checks = open_checks

    @abstractmethod
    def start(self) -> None:
        """Begin to answer."""

    @abstractmethod
    def put(self, task: CheckTask) -> None:
        """Queue a check."""

    @abstractmethod
    def dismiss(self) -> None:
        """Let the workers end after the queued checks."""

    @abstractmethod
    def stop(self, deadline_s: float | None) -> bool:
        """Start no more listeners, and wait for those that run.

        Args:
            deadline_s: the time by `time.monotonic()` at which to stop waiting; None to wait until they end.

        Returns:
            True if all listeners have ended.
        """

    @abstractmethod
    def are_alive(self) -> bool:
        """Return True if a worker has not ended."""

    @abstractmethod
    def is_one(self) -> bool:
        """Return True if the caller is one of them."""

    def can_answer(self) -> bool:
        """Return False if no check will ever be answered here any more. Other instances should get them then."""
        return True

    def on_delivered(self, task: CheckTask, error: KafkaError | None) -> None:
        """Note what became of an answer. The sender's thread calls it."""
        if error is None:
            self._open_checks.finish(task)
        else:
            self.put_off(task, str(error))

    def on_failure(self, task: CheckTask, error: Exception) -> None:
        """Note that an answer was not queued. One that cannot be a record is given up, and the job asks again."""
        if not isinstance(error, RecordError):
            self.put_off(task, str(error))
            return
        log.error("event=answer_refused transaction_id=%r error=%r", task.request.transaction_id, str(error))
        self._open_checks.finish(task)

    def put_off(self, task: CheckTask, why: str) -> None:
        """Resend an answer later. Its check's offset is not committed before the answer is acknowledged."""
        request = task.request
        log.warning("event=answer_not_sent transaction_id=%r check=%d error=%r", request.transaction_id, request.check_times, why)
        self._open_checks.put_off(task, time.monotonic() + _RETRY_S)


class CheckThreads(CheckWorkers):
    """Threads that answer checks.

    Args:
        group: the producer group, for the names of the threads.
        answers: finds and sends the answers.
        open_checks: learns what became of each check.
        count: how many threads there are.
    """

    def __init__(self, group: str, answers: Answers, open_checks: OpenChecks, count: int) -> None:
        """Store what the threads need. Starts none."""
        super().__init__(open_checks)
        self._answers = answers
        self._tasks: queue.SimpleQueue[CheckTask | None] = queue.SimpleQueue()
        self._listener_ended, self._running, self._is_stopping = threading.Condition(), 0, False
        self._names = [f"halfway-check-{group}-{number}" for number in range(count)]
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads."""
        for name in self._names:
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def put(self, task: CheckTask) -> None:
        """Queue a check."""
        self._tasks.put(task)

    def dismiss(self) -> None:
        """Let the threads end after the queued checks."""
        for _ in self._threads:
            self._tasks.put(None)

    def stop(self, deadline_s: float | None) -> bool:
        """Start no more listeners, and wait for those that run."""
        with self._listener_ended:
            self._is_stopping = True
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            return self._listener_ended.wait_for(lambda: self._running == 0, left_s)

    def are_alive(self) -> bool:
        """Return True if a thread has not ended."""
        return any(thread.is_alive() for thread in self._threads)

    def is_one(self) -> bool:
        """Return True if the calling thread is one of them."""
        return threading.current_thread() in self._threads

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            if not self._begin(task):
                continue
            try:
                try:
                    task.answer = task.answer or self._answers.of(task.request)
                finally:
                    self._end()
                self._answers.send(task.request, task.answer, partial(self.on_delivered, task))
            except Exception as error:  # Whatever it is, this thread goes on: later checks wait for it.
                self.on_failure(task, error)

    def _begin(self, task: CheckTask) -> bool:
        """Count a running listener and return True. If the check is not this instance's any more, drop it."""
        with self._listener_ended:
            if self._is_stopping:
                self._open_checks.drop(task)
            elif self._open_checks.keep_owned(task):
                self._running += 1
                return True
            return False

    def _end(self) -> None:
        with self._listener_ended:
            self._running -= 1
            self._listener_ended.notify_all()
