"""`await session.commit()` sends the messages of its transaction: what `test_session_hook.py` tests, with asyncio."""

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from halfway import AsyncSqlTransactions, SendError
from halfway.testing import InMemoryHalfway, in_memory_halfway
from tests.support.stepwise import cancel_other_tasks, cancelled_after


class Shop:
    """A service whose sessions are committed elsewhere."""

    def __init__(self, halfway: InMemoryHalfway, file: Path) -> None:
        self.halfway, self.file = halfway, file
        self.engine = create_async_engine(f"sqlite+aiosqlite:///{file}")
        self.outbox = AsyncSqlTransactions(self.engine)
        self.producer = halfway.async_producer(self.outbox)

    async def order(self, session: AsyncSession, item: str) -> None:
        await session.execute(sqlalchemy.text("INSERT INTO orders VALUES (:item)"), {"item": item})
        (await self.producer.on_commit(session)).send("orders", item.encode())

    def orders(self) -> list[str]:
        with sqlite3.connect(self.file) as database:
            return [item for (item,) in database.execute("SELECT item FROM orders ORDER BY rowid")]

    def messages(self) -> list[str]:
        return [message.body.decode() for message in self.halfway.messages()]


Play = Callable[[Callable[[Shop], Coroutine[Any, Any, None]]], Shop]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """Run a scenario in an event loop of its own."""

    def run(scenario: Callable[[Shop], Coroutine[Any, Any, None]]) -> Shop:
        async def main() -> Shop:
            with in_memory_halfway() as halfway:
                shop = Shop(halfway, tmp_path / "shop.db")
                await shop.outbox.create_table()
                with sqlite3.connect(shop.file) as database:
                    database.execute("CREATE TABLE orders (item TEXT)")
                async with shop.producer:
                    await scenario(shop)
                await shop.engine.dispose()
                return shop

        return asyncio.run(main())

    return run


def test_each_commit_sends_the_messages_of_its_transaction(play: Play) -> None:
    async def scenario(shop: Shop) -> None:
        async with AsyncSession(shop.engine) as session:
            await shop.order(session, "apples")
            await shop.order(session, "pears")
            assert shop.messages() == []
            await session.commit()
            assert shop.messages() == ["apples", "pears"]
            async with session.begin():
                await shop.order(session, "plums")
            await session.commit()

    shop = play(scenario)
    assert shop.messages() == shop.orders() == ["apples", "pears", "plums"]


def test_a_rollback_forgets_them(play: Play) -> None:
    async def scenario(shop: Shop) -> None:
        async with AsyncSession(shop.engine) as session:
            await shop.order(session, "apples")
            await session.rollback()
            await shop.order(session, "pears")
            await session.commit()
            await shop.order(session, "plums")

    shop = play(scenario)
    assert shop.messages() == shop.orders() == ["pears"]
    assert shop.halfway.pending() == []


def test_a_half_that_fails_keeps_the_session_from_committing(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise SendError("Kafka is gone")

    async def scenario(shop: Shop) -> None:
        async with AsyncSession(shop.engine) as session:
            await shop.order(session, "apples")
            with monkeypatch.context() as patch:
                patch.setattr(shop.producer._sender, "store_halves", fail)
                with pytest.raises(SendError, match="Kafka is gone"):
                    await session.commit()
            with pytest.raises(sqlalchemy.exc.PendingRollbackError):
                await session.commit()
            await session.rollback()
            await shop.order(session, "pears")
            await session.commit()

    shop = play(scenario)
    assert shop.messages() == shop.orders() == ["pears"]


# A thread of aiosqlite may outlive the loop, if it was connecting.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("turns", range(25))
def test_a_commit_that_is_cancelled_is_looked_up_when_the_session_closes(play: Play, turns: int) -> None:
    """Cancel after each number of turns of the loop: while halves are stored, the row is written, or it commits."""

    async def scenario(shop: Shop) -> None:
        async def order() -> None:
            async with AsyncSession(shop.engine) as session:
                await shop.order(session, "apples")
                began.set()
                await session.commit()

        began = asyncio.Event()
        await cancelled_after(turns, asyncio.ensure_future(order()), began)

    shop = play(scenario)
    assert shop.messages() == shop.orders()
    assert shop.halfway.pending() == []


def test_only_an_async_session_is_taken(play: Play) -> None:
    async def scenario(shop: Shop) -> None:
        with pytest.raises(TypeError, match="is no AsyncSession"):
            await shop.producer.on_commit(shop.engine)

    play(scenario)


def test_a_start_that_somebody_cancelled_with_all_tasks_is_done_again(tmp_path: Path) -> None:
    async def play() -> None:
        with in_memory_halfway() as halfway:
            shop = Shop(halfway, tmp_path / "shop.db")
            started = asyncio.create_task(shop.producer.start())
            await asyncio.sleep(0)
            await cancel_other_tasks()
            assert started.cancelled()
            await shop.producer.start()
            await shop.producer.close()
            await shop.engine.dispose()

    asyncio.run(play())
