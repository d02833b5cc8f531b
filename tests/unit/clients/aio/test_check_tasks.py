"""What becomes of a check whose task the application cancels."""

import asyncio
import time
from collections.abc import Callable

import pytest

from halfway import CheckRequest, LocalTransactionState
from halfway.clients.aio.check_tasks import CheckTasks, LoopAnswers
from halfway.clients.listener import Answer
from halfway.clients.open_checks import OpenChecks
from halfway.schemas.headers import check_id

REQUEST = CheckRequest(
    transaction_id="t1", topic="orders", body=b"", producer_group="shop", check_times=1, check_id=check_id("t1", 0, 0, 1)
)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_check_whose_task_is_cancelled_at_any_step_is_answered_later(steps: int) -> None:
    asyncio.run(cancel_after(steps))


async def cancel_after(steps: int) -> None:
    """Cancel all other tasks after some steps of the loop, as an application does that ends a part of itself."""
    open_checks, goes_on, sent = OpenChecks(max_open=10), asyncio.Event(), []

    async def answer(_: CheckRequest) -> Answer:
        await goes_on.wait()
        return Answer(LocalTransactionState.COMMIT)

    def send(request: CheckRequest, _: Answer, on_delivered: Callable[[None], None]) -> None:
        sent.append(request)
        on_delivered(None)

    loop = asyncio.get_running_loop()
    tasks = CheckTasks(LoopAnswers(answer, send, lambda: loop), open_checks, 1)
    open_checks.assign({0: 0})
    task = open_checks.add(0, 0, REQUEST)
    assert task is not None
    tasks.put(task)
    for _ in range(steps):
        await asyncio.sleep(0)
    for other in asyncio.all_tasks() - {asyncio.current_task()}:
        other.cancel()
    goes_on.set()
    for _ in range(5):
        await asyncio.sleep(0)
    for again in open_checks.due(time.monotonic() + 10):
        tasks.put(again)
    while tasks.are_alive():
        await asyncio.sleep(0)
    assert (sent, open_checks.count(), open_checks.to_commit()) == ([REQUEST], 0, {0: 1})
