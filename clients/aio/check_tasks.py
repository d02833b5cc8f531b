"""Runs the tasks that answer checks in an event loop: each asks the listener, and sends the answer."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from confluent_kafka import KafkaError

from halfway.clients.check_workers import CheckWorkers
from halfway.clients.listener import Answer
from halfway.clients.messages import CheckRequest
from halfway.clients.open_checks import CheckTask, OpenChecks


class LoopAnswers(NamedTuple):
    """Where answers come from, and where they go, in the event loop."""

    of: Callable[[CheckRequest], Awaitable[Answer]]
    """Finds the answer to a check."""
    send: Callable[[CheckRequest, Answer, Callable[[KafkaError | None], None]], None]
    """Queues the op record of an answer, or raises. The callback gets None once it is acknowledged, or the error."""
    loop: Callable[[], asyncio.AbstractEventLoop]
    """Returns the loop of the producer, which has started."""


class CheckTasks(CheckWorkers):
    """Tasks of an event loop that answer checks.

    Once the loop is closed, the consumer ends, and other instances get its checks.

    Args:
        answers: finds and sends the answers.
        open_checks: learns what became of each check.
        count: how many tasks there are at once.
    """

    def __init__(self, answers: LoopAnswers, open_checks: OpenChecks, count: int) -> None:
        """Run no task yet."""
        super().__init__(open_checks)
        self._answers, self._count = answers, count
        self._waiting: deque[CheckTask] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unfinished = 0

    def start(self) -> None:
        """Do nothing: tasks are made for checks."""

    def put(self, task: CheckTask) -> None:
        """Give a check to the loop."""
        with suppress(RuntimeError):  # The loop is closed.
            self._answers.loop().call_soon_threadsafe(self._add, task)
        with self._ended:
            self._unfinished += 1

    def dismiss(self) -> None:
        """Do nothing: tasks end with their checks."""

    def stop(self, deadline_s: float | None) -> bool:
        """Start no more listeners, and wait for those that run."""
        with self._ended:
            self._is_stopping = True
        with suppress(RuntimeError):  # The loop is closed, and its tasks with it.
            self._answers.loop().call_soon_threadsafe(self._answer_waiting)
        return super().stop(deadline_s)

    def are_alive(self) -> bool:
        """Return True if a check was put and is neither answered nor dropped."""
        with self._ended:
            return self._unfinished > 0

    def can_answer(self) -> bool:
        """Return False if the loop is closed, and its tasks with it."""
        return not self._answers.loop().is_closed()

    def is_worker_calling(self) -> bool:
        """Return True in a task that runs the listener."""
        with suppress(RuntimeError):  # There is no loop in this thread.
            return asyncio.current_task() in self._tasks
        return False

    def _add(self, task: CheckTask) -> None:
        self._waiting.append(task)
        self._answer_waiting()

    def _answer_waiting(self) -> None:
        """Start tasks for the checks that wait. Drop those that are not this instance's any more."""
        while self._waiting and (self._is_stopping or len(self._tasks) < self._count):
            task = self._waiting.popleft()
            if self.begin(task):
                answering = asyncio.get_running_loop().create_task(self._answer(task))
                self._tasks.add(answering)
                answering.add_done_callback(partial(self._on_ended, task))
            else:
                self._finish()

    async def _answer(self, task: CheckTask) -> None:
        try:
            task.answer = task.answer or await self._answers.of(task.request)
            self._answers.send(task.request, task.answer, partial(self.on_delivered, task))
        except Exception as error:
            self.on_failure(task, error)

    def _on_ended(self, task: CheckTask, answering: "asyncio.Task[None]") -> None:
        if answering.cancelled():  # Also before its first step. If the loop ends, the group's next instance gets the check.
            self.resend_later(task, "its task was cancelled")
        self._tasks.discard(answering)
        self._finish()
        self.end()
        self._answer_waiting()

    def _finish(self) -> None:
        with self._ended:
            self._unfinished -= 1
