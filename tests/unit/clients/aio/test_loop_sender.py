"""What a task of an event loop learns about a record that found the queue full."""

import asyncio
import time
from typing import Any

import pytest

from halfway.clients.aio.loop_sender import LoopReport, LoopSender
from halfway.schemas.errors import QueueFullError
from halfway.schemas.records import Record

RECORD = Record(b"id", b"body", [])
LIMIT_S = 0.05


class FullQueue:
    """A connection whose queue is full until a test makes room."""

    def __init__(self) -> None:
        self.has_room = False
        self.queued: list[Record] = []

    def is_refused(self) -> bool:
        return False

    def try_send(self, _topic: str, record: Record, _report: object) -> bool:
        if self.has_room:
            self.queued.append(record)
        return self.has_room

    def queue_full(self) -> QueueFullError:
        return QueueFullError("full")


async def waiting(queue: Any) -> tuple[LoopSender, LoopReport, "asyncio.Task[None]"]:
    sender = LoopSender(int(LIMIT_S * 1000))
    sender.bind(asyncio.get_running_loop(), queue)
    report = LoopReport(asyncio.get_running_loop().create_future(), sender._arrived)
    task = asyncio.create_task(sender.send_half("half", RECORD, report))
    await asyncio.sleep(0)
    return sender, report, task


def test_a_half_that_finds_no_room_in_time_is_not_queued_later() -> None:
    async def run() -> None:
        queue = FullQueue()
        sender, report, task = await waiting(queue)
        with pytest.raises(QueueFullError):
            await task
        queue.has_room = True
        sender.on_served()
        await asyncio.sleep(0)
        assert (queue.queued, report.is_queued) == ([], False)

    asyncio.run(run())


@pytest.mark.parametrize("room_first", [True, False])
def test_a_half_that_was_queued_at_the_last_moment_is_not_reported_as_refused(room_first: bool) -> None:
    """A loop that stood still sees room and time-out in one turn. After a QueueFullError the id may be used again."""

    async def run() -> None:
        queue = FullQueue()
        sender, report, task = await waiting(queue)
        queue.has_room = True
        if room_first:
            sender.on_served()
        else:  # The time-out has cancelled the task, which has not run yet.
            asyncio.get_running_loop().call_later(LIMIT_S * 1.001, sender.on_served)
        time.sleep(2 * LIMIT_S)
        try:
            await task
        except QueueFullError:
            assert (queue.queued, report.is_queued) == ([], False)
        else:
            assert (queue.queued, report.is_queued) == ([RECORD], True)

    asyncio.run(run())
