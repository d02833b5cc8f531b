"""What is awaited to its end, within time limits of asyncio and of anyio."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import anyio
import pytest

from halfway.clients.aio.async_transaction import to_its_end


async def commit(done: list[str]) -> None:
    await asyncio.sleep(0.3)
    done.append("committed")


@pytest.mark.parametrize(("scope", "is_raised"), [(anyio.move_on_after, False), (anyio.fail_after, True)])
def test_a_time_limit_of_anyio_ends_in_its_own_scope(scope: Callable[[float], AbstractContextManager[Any]], is_raised: bool) -> None:
    """It knows its own cancellation by its text. Another one would end the task."""

    async def run() -> list[str]:
        done: list[str] = []
        try:
            with scope(0.1):
                await to_its_end(commit(done))
        except TimeoutError:
            done.append("timed out")
        return done

    assert asyncio.run(run()) == ["committed", *(["timed out"] if is_raised else [])]


def test_so_does_a_time_limit_of_asyncio() -> None:
    async def run() -> list[str]:
        done: list[str] = []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await to_its_end(commit(done))
        return done

    assert asyncio.run(run()) == ["committed"]
