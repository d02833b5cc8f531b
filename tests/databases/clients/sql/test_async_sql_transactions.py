"""The same promises with SQLAlchemy's asyncio, on aiosqlite and on psycopg's asynchronous connections."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine

from halfway import AsyncSqlTransactions, CheckRequest, LocalTransactionState, RolledBackError, SettingsError, SqlTransactions
from halfway.clients.testing.in_memory_producers import InMemoryAsyncProducer
from halfway.clients.transaction import LocalTransaction
from halfway.schemas.headers import check_id
from halfway.testing import in_memory_halfway
from tests.support.database_servers import PostgresServer
from tests.support.sql_world import SqlWorld
from tests.support.stepwise import cancelled_after

COMMIT, ROLLBACK = LocalTransactionState.COMMIT, LocalTransactionState.ROLLBACK

Scenario = Callable[["AsyncShop"], Coroutine[Any, Any, None]]
Play = Callable[[Scenario], SqlWorld]


class AsyncShop:
    """A service with asyncio: what it reaches its database with, and what it would have sent."""

    def __init__(self, engine: Any, world: SqlWorld) -> None:
        self.engine, self.world = engine, world
        self.outbox = AsyncSqlTransactions(engine, lock_wait_ms=1000)

    @asynccontextmanager
    async def begun(self, using: Any = None) -> AsyncIterator[LocalTransaction]:
        sender = self.world.sender.as_sender()
        store = partial(self.world.records.store_halves, sender)
        async with self.outbox.connection(using) as connection:
            block = await self.outbox.run(LocalTransaction, self.outbox.database, connection, self.world.records, sender, store)
            await connection.execute(sqlalchemy.text("INSERT INTO orders VALUES ('apples')"))
            block.send("orders", b"apples")
            yield block

    async def ask(self, block: LocalTransaction) -> LocalTransactionState:
        return await AsyncSqlTransactions(self.engine, lock_wait_ms=1000).check_local_transaction(check_of(block))


def check_of(block: LocalTransaction) -> CheckRequest:
    name = f"{block.transaction_id}.0"
    return CheckRequest(
        transaction_id=name,
        topic="orders",
        body=b"",
        producer_group="shop",
        born_at_ms=2**42,
        check_times=1,
        check_id=check_id(name, 0, 7, 1),
    )


@pytest.fixture(params=["sqlite", "postgresql"])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Play:
    """Run a scenario in an event loop with a new engine."""
    if request.param == "sqlite":
        file = tmp_path / "shop.db"
        url, world = f"sqlite+aiosqlite:///{file}", SqlWorld("sqlite", lambda: sqlite3.connect(file), lambda: sqlite3.connect(file))
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        url, world = server.url, SqlWorld("postgresql", server.connect, server.connect)

    def run(scenario: Scenario) -> SqlWorld:
        async def main() -> None:
            engine = create_async_engine(url)
            try:
                await scenario(AsyncShop(engine, world))
            finally:
                await engine.dispose()

        asyncio.run(main())
        return world

    return run


def test_another_instance_answers_from_the_row(play: Play) -> None:
    async def scenario(shop: AsyncShop) -> None:
        async with shop.begun() as block:
            await shop.outbox.run(block.finish)
        assert await shop.ask(block) is COMMIT
        assert shop.world.outbox.check_local_transaction(check_of(block)) is COMMIT, "an instance with threads too"

    world = play(scenario)
    assert (world.orders(), world.sender.actions()) == (["apples"], ["COMMIT"])


def test_a_check_that_comes_first_keeps_the_block_from_committing(play: Play) -> None:
    async def scenario(shop: AsyncShop) -> None:
        if shop.world.kind == "sqlite":
            async with shop.outbox.connection(None) as connection:  # SQLite has one writer: the check comes before it
                sender = shop.world.sender.as_sender()
                store = partial(shop.world.records.store_halves, sender)
                block = await shop.outbox.run(LocalTransaction, shop.outbox.database, connection, shop.world.records, sender, store)
                block.send("orders", b"apples")
                assert await shop.ask(block) is ROLLBACK
                with pytest.raises(RolledBackError):
                    await shop.outbox.run(block.finish)
            return
        async with shop.begun() as block:
            assert await shop.ask(block) is ROLLBACK
            with pytest.raises(RolledBackError):
                await shop.outbox.run(block.finish)
        assert await shop.ask(block) is ROLLBACK

    world = play(scenario)
    assert (world.orders(), world.sender.actions()) == ([], ["ROLLBACK"])


def test_a_transaction_that_is_still_running_is_not_guessed(play: Play) -> None:
    async def scenario(shop: AsyncShop) -> None:
        await shop.outbox.create_table()
        async with shop.begun() as block:
            await shop.outbox.run(block.prepare)
            await shop.outbox.run(block.write_row)
            with pytest.raises(Exception, match=r"lock timeout|database is locked"):
                await shop.ask(block)
            await shop.outbox.run(block.conclude)
        assert await shop.ask(block) is COMMIT

    assert play(scenario).orders() == ["apples"]


def test_a_session_of_the_service_is_used(play: Play) -> None:
    async def scenario(shop: AsyncShop) -> None:
        await shop.outbox.create_table()
        async with AsyncSession(shop.engine) as session:
            await session.execute(sqlalchemy.text("INSERT INTO orders VALUES ('before')"))
            async with shop.begun(session) as block:
                await shop.outbox.run(block.finish)
            async with shop.begun(session) as lost:
                await shop.outbox.run(lost.abandon, "ValueError")

    world = play(scenario)
    assert (world.orders(), world.sender.actions()) == (["apples", "before"], ["COMMIT"])


def test_a_scoped_session_is_that_of_the_task_which_began_the_block(play: Play) -> None:
    """`asyncio.wait_for` and `gather` run what they are given in a task of its own."""

    async def scenario(shop: AsyncShop) -> None:
        scoped = async_scoped_session(async_sessionmaker(shop.engine), scopefunc=asyncio.current_task)
        with in_memory_halfway() as halfway:
            async with halfway.async_producer(shop.outbox) as producer:
                async with producer.transaction(scoped) as tx:
                    await asyncio.gather(tx.execute(sqlalchemy.text("INSERT INTO orders VALUES ('apples')")))
                    tx.send("orders", b"apples")
                (await producer.on_commit(scoped)).send("orders", b"pears")
                await scoped.execute(sqlalchemy.text("INSERT INTO orders VALUES ('pears')"))
                await scoped.commit()
                await scoped.remove()
            assert [message.body for message in halfway.messages()] == [b"apples", b"pears"]

    assert play(scenario).orders() == ["apples", "pears"]


def test_autocommit_is_refused(play: Play) -> None:
    async def scenario(shop: AsyncShop) -> None:
        with pytest.raises(SettingsError, match="autocommit"):
            async with AsyncShop(shop.engine.execution_options(isolation_level="AUTOCOMMIT"), shop.world).begun():
                pass

    assert play(scenario).sender.actions() == []


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_commit_that_is_refused_needs_no_second_connection_and_no_second_transaction(play: Play, *, is_ours: bool) -> None:
    """The row is looked up. With a connection of its own for each of many that are refused at once, they would wait."""

    async def scenario(shop: AsyncShop) -> None:
        async with shop.engine.begin() as connection:
            for table in ("item", "stock"):
                await connection.execute(sqlalchemy.text(f"DROP TABLE IF EXISTS {table}"))
            await connection.execute(sqlalchemy.text("CREATE TABLE stock (id INT PRIMARY KEY)"))
            await connection.execute(sqlalchemy.text("CREATE TABLE item (id INT REFERENCES stock (id) DEFERRABLE INITIALLY DEFERRED)"))
        engine = create_async_engine(shop.engine.url, pool_size=1, max_overflow=0 if is_ours else 1, pool_timeout=3)
        if shop.world.kind == "sqlite":
            sqlalchemy.event.listen(engine.sync_engine, "connect", lambda made, _: made.execute("PRAGMA foreign_keys = ON"))
        outbox = AsyncSqlTransactions(engine, lock_wait_ms=1000)
        await outbox.create_table()

        async def order(producer: InMemoryAsyncProducer, using: Any) -> None:
            async with producer.transaction(using) as tx:
                await tx.execute(sqlalchemy.text("INSERT INTO item VALUES (7)"))
                tx.send("orders", b"apples")

        with in_memory_halfway() as halfway:
            async with halfway.async_producer(outbox) as producer, AsyncExitStack() as stack:
                using = None if is_ours else await stack.enter_async_context(engine.connect())
                with pytest.raises(sqlalchemy.exc.IntegrityError):
                    await order(producer, using)
            assert (halfway.messages(), halfway.pending()) == ([], [])
        await engine.dispose()

    play(scenario)


def test_each_kind_of_engine_has_its_class() -> None:
    with pytest.raises(TypeError, match="is no AsyncEngine"):
        AsyncSqlTransactions(sqlalchemy.create_engine("sqlite://"))
    with pytest.raises(TypeError, match="for AsyncSqlTransactions"):
        SqlTransactions(create_async_engine("sqlite+aiosqlite://"))


# A thread of aiosqlite may outlive the loop, if it was connecting.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("turns", range(0, 24, 3))
def test_a_session_whose_commit_is_cancelled_leaves_order_and_message_or_neither(play: Play, turns: int) -> None:
    messages: list[bytes] = []

    async def scenario(shop: AsyncShop) -> None:
        async def order() -> None:
            async with AsyncSession(shop.engine) as session:
                await session.execute(sqlalchemy.text("INSERT INTO orders VALUES ('apples')"))
                (await producer.on_commit(session)).send("orders", b"apples")
                began.set()
                await session.commit()

        await shop.outbox.create_table()
        began = asyncio.Event()
        with in_memory_halfway() as halfway:
            async with halfway.async_producer(shop.outbox) as producer:
                await cancelled_after(turns, asyncio.ensure_future(order()), began)
            assert halfway.pending() == []
            messages.extend(message.body for message in halfway.messages())

    assert [item.encode() for item in play(scenario).orders()] == messages
