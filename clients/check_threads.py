"""Runs the threads that answer checks."""

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from confluent_kafka import KafkaError

from halfway.clients.check_workers import CheckWorkers
from halfway.clients.listener import Answer
from halfway.clients.messages import CheckRequest
from halfway.clients.open_checks import CheckTask, OpenChecks


class Answers(NamedTuple):
    """Where answers come from, and where they go."""

    of: Callable[[CheckRequest], Answer]
    """Returns the answer to a check."""
    send: Callable[[CheckRequest, Answer, Callable[[KafkaError | None], None]], None]
    """Queues the op record of an answer, or raises. The callback gets None once it is acknowledged, or the error."""


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

    def are_alive(self) -> bool:
        """Return True if a thread has not ended."""
        return any(thread.is_alive() for thread in self._threads)

    def is_worker_calling(self) -> bool:
        """Return True if the calling thread is one of them."""
        return threading.current_thread() in self._threads

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            if not self.begin(task):
                continue
            try:
                try:
                    task.answer = task.answer or self._answers.of(task.request)
                finally:
                    self.end()
                self._answers.send(task.request, task.answer, partial(self.on_delivered, task))
            except Exception as error:  # Whatever it is, this thread goes on: later checks wait for it.
                self.on_failure(task, error)
