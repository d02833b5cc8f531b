"""`SqlTransactions` for SQLAlchemy's asyncio: the same statements in the same order, in its greenlets."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any, TypeVar, cast

from halfway.clients.messages import CheckRequest
from halfway.clients.sql.sql_transactions import WEEK_S, SqlTransactions
from halfway.clients.sql.sqlalchemy_database import LENT
from halfway.clients.transaction import TransactionDatabase, unscoped
from halfway.schemas.headers import LocalTransactionState
from halfway.schemas.records import type_of

T = TypeVar("T")


class AsyncSqlTransactions:
    """The transactions of a service with asyncio in its own database (`SqlTransactions`).

    An `AsyncTransactionProducer` takes it in place of a listener.

    Args:
        engine: SQLAlchemy's `AsyncEngine`, on aiosqlite or psycopg 3.
        lock_wait_ms: how long a check waits for a transaction that is still running.
        retention_s: after how long a row may be deleted.

    Raises:
        TypeError: `engine` is no `AsyncEngine`.
        ValueError: a number is too small.

    Example:
        producer = AsyncTransactionProducer(settings.kafka, "order-service", AsyncSqlTransactions(engine))
        async with producer.transaction() as tx:
            await tx.execute(insert(orders).values(item="apples"))
            tx.send("orders", body)
    """

    def __init__(self, engine: Any, *, lock_wait_ms: int = 1000, retention_s: int = WEEK_S) -> None:
        """Store the configuration. Does not connect."""
        if not hasattr(engine, "sync_engine"):
            raise TypeError(f"{type_of(engine)} is no AsyncEngine: make one with sqlalchemy.ext.asyncio.create_async_engine")
        self._engine = engine
        self._transactions = SqlTransactions(engine.sync_engine, lock_wait_ms=lock_wait_ms, retention_s=retention_s)
        self.database: TransactionDatabase = self._transactions

    async def create_table(self) -> None:
        """Create the table if it is missing (`SqlTransactions.create_table`)."""
        await self.run(self._transactions.create_table)

    async def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState:
        """Answer a check from the table alone (`SqlTransactions.check_local_transaction`)."""
        return await self.run(self._transactions.check_local_transaction, message)

    @asynccontextmanager
    async def connection(self, using: Any) -> AsyncIterator[Any]:
        """Lend a connection: `using`, an `AsyncSession` or `AsyncConnection`, or a new one if that is None."""
        if using is not None:
            yield unscoped(using)  # here: a statement may be executed in a task of its own
            return
        async with self._engine.connect() as connection:
            yield await connection.execution_options(**{LENT: True})

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a greenlet of SQLAlchemy."""
        return cast(T, await _concurrency().greenlet_spawn(function, *arguments))

    def wait_for(self, awaitable: Awaitable[T]) -> T:
        """Wait for something in a function that `run` calls."""
        return cast(T, _concurrency().await_only(awaitable))


def _concurrency() -> Any:
    return import_module("sqlalchemy.util")
