"""Defines the listener that an application implements, and turns what it returns or raises into an answer."""

import inspect
import logging
import unicodedata
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from typing_extensions import TypeVar

from halfway.clients.listener_by_topic import ListenerByTopic
from halfway.clients.messages import CheckRequest, HalfMessage
from halfway.schemas.errors import HalfwayError
from halfway.schemas.headers import LocalTransactionState
from halfway.schemas.records import type_of

log = logging.getLogger(__name__)

MAX_REMARK_BYTES = 1024
Arg_contra = TypeVar("Arg_contra", contravariant=True, default=Any)
"""What a listener takes as its `arg`: a type checker infers it from the listener, for each send of its producer."""


class TransactionListener(Protocol[Arg_contra]):
    """The application's side of a transactional message, if `SqlTransactions` does not fit its data.

    Several threads may call both methods at once. `check_local_transaction` must answer from durable data: the process
    that sent the half may have died, and another instance of its group is asked instead. Write the transaction's id in
    the same local transaction as the business data, and look it up in the check. If the id is not there, insert it as
    rolled back and answer ROLLBACK: a local transaction that is still running then cannot commit. If it is there when
    it is to be written, look it up too: the message may be a resent one whose order is there. UNKNOWN each time ends in
    a discard.

    Example:
        class Orders:
            def execute_local_transaction(self, message: HalfMessage, arg: Order) -> LocalTransactionState:
                with database.begin() as transaction:
                    transaction.insert_id(message.transaction_id, "COMMIT")
                    transaction.insert(arg)
                return LocalTransactionState.COMMIT

            def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState:
                with database.begin() as transaction:
                    transaction.insert_id_if_missing(message.transaction_id, "ROLLBACK")
                    return LocalTransactionState(transaction.state_of(message.transaction_id))
    """

    def execute_local_transaction(self, message: HalfMessage, arg: Arg_contra) -> LocalTransactionState | None:
        """Run the local transaction. Kafka has stored the half.

        Args:
            message: the half.
            arg: the `arg` of `send_in_transaction`.

        Returns:
            The outcome. None and an exception count as UNKNOWN: a check asks for the outcome later.
        """
        ...

    def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState | None:
        """Return the outcome of the local transaction. None and an exception count as UNKNOWN: the job asks again."""
        ...


def verify_listener(listener: Any, *, takes_coroutines: bool) -> None:
    """Refuse what cannot answer, before a half is sent: its checks would bring no verdict, and end in a discard.

    Raises:
        TypeError: a method is missing, or is a coroutine where none is awaited.
    """
    for name in ("execute_local_transaction", "check_local_transaction"):
        method = getattr(listener, name, None)
        if not callable(method):
            database = "AsyncSqlTransactions" if takes_coroutines else "SqlTransactions"
            raise TypeError(f"{type_of(listener)} is no listener, because it has no {name}, and no database, which is {database} here")
        if inspect.iscoroutinefunction(method) and not takes_coroutines:
            raise TypeError(f"{name} of {type_of(listener)} is a coroutine: use an AsyncTransactionProducer")
    for each in listener.listeners if isinstance(listener, ListenerByTopic) else ():
        verify_listener(each, takes_coroutines=takes_coroutines)


class Answer(NamedTuple):
    """A listener's answer. `remark` gives the reason for an UNKNOWN if the listener returned no state."""

    state: LocalTransactionState
    remark: str | None = None
    error: BaseException | None = None


def ask(method: Callable[..., LocalTransactionState | None], *arguments: object, catch: type[BaseException] = Exception) -> Answer:
    """Call a listener's method. None, an exception, or anything but a LocalTransactionState counts as UNKNOWN.

    Args:
        method: a bound method of the listener.
        *arguments: the method's arguments.
        catch: the exceptions that count as UNKNOWN. Others are raised.
    """
    try:
        returned: object = method(*arguments)
    except catch as error:
        return failed(error)
    return answered(returned)


def failed(error: BaseException) -> Answer:
    """Return the answer of a listener that has raised an error. SQLAlchemy's own text would have the parameters."""
    hide_parameters(error)
    said = getattr(error, "orig", None) or error
    return Answer(LocalTransactionState.UNKNOWN, remark_of(f"{type(error).__name__}: {_text_of(said)}"), error)


def answered(returned: object) -> Answer:
    """Return the answer of a listener that has returned a value."""
    if isinstance(returned, LocalTransactionState):
        return Answer(returned)
    return Answer(LocalTransactionState.UNKNOWN, remark_of(f"the listener returned {type_of(returned)}, not a LocalTransactionState"))


def remark_of(text: str) -> str:
    """Return `text` as a `REMARK` header holds it: one line without control characters, at most 1 KiB of UTF-8."""
    spaced = " ".join(text.split())
    clean = "".join(character for character in spaced if unicodedata.category(character) not in ("Cc", "Cs"))
    return clean.encode()[:MAX_REMARK_BYTES].decode(errors="ignore")


def log_unknown(message: HalfMessage, check_times: int, answer: Answer) -> None:
    """Log why a listener returned no state. The message's content is not logged."""
    if answer.state is not LocalTransactionState.UNKNOWN or answer.remark is None:
        return
    # The text of an error that Halfway itself has found says it all, and the error may come with each check.
    is_told = isinstance(answer.error, HalfwayError) and answer.error.__cause__ is None
    log.warning(
        "event=listener_gave_no_answer transaction_id=%r check=%d error=%s detail=%r",
        message.transaction_id,
        check_times,
        type(answer.error).__name__ if answer.error else "no_state",
        _text_of(answer.error) if answer.error and is_told else None,
        exc_info=None if is_told else answer.error,
    )


def hide_parameters(error: BaseException | None) -> None:
    """Let errors of SQLAlchemy, and those that have led to this one, leave the parameters of the statement out."""
    left, seen = [error], set[int]()
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            if any(base.__module__.startswith("sqlalchemy.") for base in type(each).__mro__):
                each.hide_parameters = True  # type: ignore[attr-defined]
                # A PendingRollbackError quotes the error before it.
                each.args = tuple(str(argument).partition(" Original exception was:")[0] for argument in each.args)
            left += [each.__cause__, each.__context__, *(each.exceptions if isinstance(each, BaseExceptionGroup) else ())]


def _text_of(error: BaseException) -> str:
    """Return an exception's text. The `__str__` of an application's exception may itself fail, in any way."""
    try:
        return str(error)
    except BaseException:
        return "(it has no text)"
