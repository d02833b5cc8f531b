"""What an application tells Halfway about its local transactions, and how it is asked."""

import logging
import unicodedata
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from halfway.clients.messages import CheckRequest, HalfMessage
from halfway.schemas.headers import LocalTransactionState

log = logging.getLogger(__name__)

MAX_REMARK_BYTES = 1024


class TransactionListener(Protocol):
    """The application's side of a transactional message; both methods may be called by several threads at once.

    `check_local_transaction` must answer from what is durable: the process that sent the half may be gone, and another instance of
    the group is asked instead. Write the transaction's id in the same local transaction as the business data, and look it up here.

    Example:
        class Orders:
            def execute_local_transaction(self, message: HalfMessage, arg: Order) -> LocalTransactionState:
                with database.begin() as transaction:
                    transaction.insert(arg)
                    transaction.insert_outbox_id(message.transaction_id)
                return LocalTransactionState.COMMIT

            def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState:
                known = database.has_outbox_id(message.transaction_id)
                return LocalTransactionState.COMMIT if known else LocalTransactionState.UNKNOWN
    """

    def execute_local_transaction(self, message: HalfMessage, arg: Any) -> LocalTransactionState | None:
        """Run the local transaction; the half is stored. None and an exception count as UNKNOWN: the outcome is asked for later."""
        ...

    def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState | None:
        """Say how the local transaction ended. None and an exception count as UNKNOWN: the question comes again."""
        ...


class Answer(NamedTuple):
    """What a listener said; `remark` says why if that is UNKNOWN for want of a proper answer."""

    state: LocalTransactionState
    remark: str | None = None
    error: BaseException | None = None


def ask(method: Callable[..., LocalTransactionState | None], *arguments: object, catch: type[BaseException] = Exception) -> Answer:
    """Call a listener's method; None, an exception, or what is not a LocalTransactionState counts as UNKNOWN (design §7).

    Args:
        method: a bound method of the listener.
        *arguments: what it is called with.
        catch: which exceptions count as an answer; others are the caller's.
    """
    try:
        said: object = method(*arguments)
    except catch as error:
        return Answer(LocalTransactionState.UNKNOWN, remark_of(f"{type(error).__name__}: {_text_of(error)}"), error)
    if isinstance(said, LocalTransactionState):
        return Answer(said)
    return Answer(LocalTransactionState.UNKNOWN, remark_of(f"the listener returned {_kind_of(said)}, not a LocalTransactionState"))


def remark_of(text: str) -> str:
    """Return `text` fit for the `REMARK` header: one line without control characters, at most 1 KiB of UTF-8."""
    spaced = " ".join(text.split())
    clean = "".join(character for character in spaced if unicodedata.category(character) not in ("Cc", "Cs"))
    return clean.encode()[:MAX_REMARK_BYTES].decode(errors="ignore")


def log_unknown(message: HalfMessage, check_times: int, answer: Answer) -> None:
    """Log why a listener gave no proper answer; what it was asked about is not logged."""
    if answer.state is LocalTransactionState.UNKNOWN and answer.remark is not None:
        log.warning(
            "event=listener_gave_no_answer transaction_id=%r check=%d error=%s",
            message.transaction_id,
            check_times,
            type(answer.error).__name__ if answer.error else "no_state",
            exc_info=answer.error,
        )


def _kind_of(said: object) -> str:
    return "None" if said is None else f"a {type(said).__name__}"


def _text_of(error: BaseException) -> str:
    """Return an exception's text; an application's exception may fail at that, too."""
    try:
        return str(error)
    except Exception:
        return "(it has no text)"
