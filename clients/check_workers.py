"""What answers checks, in threads or in an event loop: each asks the listener, and sends the answer."""

import logging
import threading
import time
from abc import ABC, abstractmethod

from confluent_kafka import KafkaError

from halfway.clients.open_checks import CheckTask, OpenChecks
from halfway.schemas.records import RecordError

log = logging.getLogger(__name__)

_RETRY_S = 1.0


class CheckWorkers(ABC):
    """What answers checks: threads, or tasks of an event loop. Only one other thread calls `put` and `dismiss`.

    Args:
        open_checks: learns what became of each check.
    """

    def __init__(self, open_checks: OpenChecks) -> None:
        """Store where to tell what became of a check."""
        self._open_checks = open_checks
        self._ended, self._running, self._is_stopping = threading.Condition(), 0, False

    @abstractmethod
    def start(self) -> None:
        """Begin to answer."""

    @abstractmethod
    def put(self, task: CheckTask) -> None:
        """Queue a check."""

    @abstractmethod
    def dismiss(self) -> None:
        """Let the workers end after the queued checks."""

    def stop(self, deadline_s: float | None) -> bool:
        """Start no more listeners, and wait for those that run.

        Args:
            deadline_s: the time by `time.monotonic()` at which to stop waiting; None to wait until they end.

        Returns:
            True if all listeners have ended.
        """
        with self._ended:
            self._is_stopping = True
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            return self._ended.wait_for(lambda: self._running == 0, left_s)

    @abstractmethod
    def are_alive(self) -> bool:
        """Return True if a worker has not ended."""

    @abstractmethod
    def is_worker_calling(self) -> bool:
        """Return True if a worker calls."""

    def can_answer(self) -> bool:
        """Return False if no check will ever be answered here any more. Other instances should get them then."""
        return True

    def on_delivered(self, task: CheckTask, error: KafkaError | None) -> None:
        """Note what became of an answer. The sender's thread calls it."""
        if error is None:
            self._open_checks.finish(task)
        else:
            self.resend_later(task, str(error))

    def on_failure(self, task: CheckTask, error: Exception) -> None:
        """Note that an answer was not queued. One that cannot be a record is given up, and the job asks again."""
        if not isinstance(error, RecordError):
            self.resend_later(task, str(error))
            return
        log.error("event=answer_refused transaction_id=%r error=%r", task.request.transaction_id, str(error))
        self._open_checks.finish(task)

    def resend_later(self, task: CheckTask, why: str) -> None:
        """Resend an answer later. Its check's offset is not committed before the answer is acknowledged."""
        request = task.request
        log.warning("event=answer_not_sent transaction_id=%r check=%d error=%r", request.transaction_id, request.check_times, why)
        self._open_checks.resend_later(task, time.monotonic() + _RETRY_S)

    def begin(self, task: CheckTask) -> bool:
        """Count a running listener and return True. If the check is not this instance's any more, drop it."""
        with self._ended:
            if self._is_stopping:
                self._open_checks.drop(task)
            elif self._open_checks.keep_owned(task):
                self._running += 1
                return True
            return False

    def end(self) -> None:
        """Note that a listener has ended."""
        with self._ended:
            self._running -= 1
            self._ended.notify_all()
