"""Defines the listener that an application with asyncio implements, and asks it."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Protocol

from halfway.clients.listener import Answer, Arg_contra, answered, failed
from halfway.clients.messages import CheckRequest, HalfMessage
from halfway.schemas.headers import LocalTransactionState


class AsyncTransactionListener(Protocol[Arg_contra]):
    """The application's side of a transactional message, in coroutines, if `AsyncSqlTransactions` does not fit.

    What a `TransactionListener` must do holds here too: answer checks from durable data, and take the place of an id
    that is not there.
    """

    async def execute_local_transaction(self, message: HalfMessage, arg: Arg_contra) -> LocalTransactionState | None:
        """Run the local transaction. Kafka has stored the half. If the task is cancelled, a check asks for the outcome.

        Args:
            message: the half.
            arg: the `arg` of `send_in_transaction`.

        Returns:
            The outcome. None and an exception count as UNKNOWN: a check asks for the outcome later.
        """
        ...

    async def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState | None:
        """Return the outcome of the local transaction. None and an exception count as UNKNOWN: the job asks again."""
        ...


async def ask_in_loop(
    method: Callable[..., Awaitable[LocalTransactionState | None]], *arguments: object, catch: type[BaseException] = Exception
) -> Answer:
    """Await a listener's method. None, an exception, or anything but a LocalTransactionState counts as UNKNOWN.

    A plain function's answer counts too: it has run by then, and what it has committed must not be discarded.

    Args:
        method: a bound method of the listener.
        *arguments: the method's arguments.
        catch: the exceptions that count as UNKNOWN. Others are raised, and so is the cancellation of the task.
    """
    try:
        returned: object = method(*arguments)
        if inspect.isawaitable(returned):
            returned = await returned
    except catch as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        return failed(error)
    return answered(returned)
