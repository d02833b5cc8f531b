"""Cancels a coroutine at one of its awaits or all tasks of a loop, and measures how long an event loop is busy."""

import asyncio
import gc
import time
from collections.abc import Awaitable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest


async def cancel_other_tasks() -> None:
    """Cancel all tasks of the loop but this one, and wait until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class CancelledAt:
    """Awaits something, and cancels the task at one of the points where it waits.

    Args:
        awaitable: what to await.
        step: the number of the point, from 0.
        again: cancel at each later point too, as AnyIO does.
    """

    def __init__(self, awaitable: Awaitable[Any], step: int, *, again: bool) -> None:
        self._awaitable, self._step, self._again = awaitable, step, again
        self.steps = 0
        """How often it has waited."""

    def __await__(self) -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        assert task is not None
        running = self._awaitable.__await__()
        answer, error = None, None
        while True:
            try:
                waits_for = running.send(answer) if error is None else running.throw(error)  # type: ignore[attr-defined]
            except StopIteration as done:
                return done.value
            if self.steps == self._step or (self._again and self.steps > self._step):
                task.cancel()
            self.steps += 1
            try:
                answer, error = (yield waits_for), None
            except BaseException as thrown:
                answer, error = None, thrown


async def cancelled_after(turns: int, task: "asyncio.Task[Any]", began: asyncio.Event) -> None:
    """Cancel a task after some turns of the loop, counted from `began`, and wait for its end."""
    await began.wait()
    for _ in range(turns):
        await asyncio.sleep(0.0002)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


class Turns:
    """How long the callbacks of an event loop have taken, in seconds of this thread's own processor time.

    Other threads and processes take time from a callback, which does not count: the tests share their machine. Nor does
    a collection of the objects that other tests have left.
    """

    def __init__(self) -> None:
        self.used_s: list[float] = []

    @contextmanager
    def counted(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        """Measure each callback in a block."""
        run = asyncio.Handle._run

        def measured(handle: asyncio.Handle) -> None:
            began_s = time.thread_time()
            run(handle)
            self.used_s.append(time.thread_time() - began_s)

        gc.freeze()
        try:
            with patch.context() as inner:
                inner.setattr(asyncio.Handle, "_run", measured)
                yield
        finally:
            gc.unfreeze()
