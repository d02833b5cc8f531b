"""One database transaction of an event loop, and the messages that become readable if it commits."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar, runtime_checkable

from halfway.clients.messages import CheckRequest, SendResult
from halfway.clients.transaction import LocalTransaction, TransactionDatabase
from halfway.schemas.headers import LocalTransactionState

T = TypeVar("T")


@runtime_checkable
class AsyncTransactionDatabase(Protocol):
    """A database that holds a row for each transaction (`AsyncSqlTransactions`).

    The steps of a transaction are those of `LocalTransaction`, in the same code. It runs in a greenlet, which leaves
    the event loop to other tasks where the database or Kafka is waited for.
    """

    database: TransactionDatabase
    """The database as code in a greenlet reaches it."""

    def connection(self, using: Any) -> AbstractAsyncContextManager[Any]:
        """Lend a connection: `using`, or a new one if that is None."""

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a greenlet."""

    def wait_for(self, awaitable: Awaitable[T]) -> T:
        """Wait for something in a function that `run` calls."""

    async def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState:
        """Answer a check."""


class AsyncLocalTransaction:
    """One database transaction, and the messages that become readable if it commits.

    Attributes:
        transaction_id: the id of its row. The ids of its messages begin with it.
        connection: the `AsyncConnection` or `AsyncSession` that it runs on.
    """

    def __init__(self, transaction: LocalTransaction, connection: Any) -> None:
        """Use a transaction that was begun. `AsyncTransactionProducer.transaction` calls it."""
        self._transaction, self.connection = transaction, connection
        self.transaction_id = transaction.transaction_id

    @property
    def results(self) -> list[SendResult]:
        """Return the result of each send, in order, once the block has ended; empty unless Kafka has all halves."""
        return self._transaction.results

    async def execute(self, statement: Any, parameters: Any = None) -> Any:
        """Execute a statement in the transaction, as the connection or session would.

        Args:
            statement: a construct of SQLAlchemy.
            parameters: as SQLAlchemy takes them.

        Returns:
            SQLAlchemy's result.
        """
        return await self.connection.execute(statement, parameters)

    def send(
        self,
        topic: str,
        body: bytes,
        *,
        tags: str | None = None,
        keys: str | None = None,
        properties: Mapping[str, str] | None = None,
        queue_id: int = 0,
        immunity_s: int | None = None,
    ) -> str:
        """Add a message, which becomes readable if the transaction commits. It is sent at the end of the block.

        The arguments are those of `TransactionProducer.send_in_transaction`.

        Returns:
            The message's own transaction id.

        Raises:
            ValueError: an argument breaks the contract (docs/contract.md).
            SendError: the body is larger than the producer's `max_body_bytes`.
            RuntimeError: the transaction has ended, or its messages are being sent.
            TypeError: it is in a savepoint.
        """
        return self._transaction.send(topic, body, tags=tags, keys=keys, properties=properties, queue_id=queue_id, immunity_s=immunity_s)


async def to_its_end(awaitable: Awaitable[T]) -> T:
    """Await something to its end, also if this task is cancelled meanwhile. The cancellation is raised after it."""
    ending = asyncio.ensure_future(awaitable)
    cancelled: asyncio.CancelledError | None = None
    while not ending.done():
        try:
            await asyncio.wait([ending])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not ending.cancelled():
            ending.exception()  # Take note of it: the cancellation is raised in its place.
        raise cancelled  # This very one: anyio knows its own by their text.
    return ending.result()
