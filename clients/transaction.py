"""One database transaction and the messages that become readable if it commits (docs/transactions.md)."""

import itertools
import logging
import re
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, runtime_checkable

from halfway.clients.group_records import GroupRecords, Sends, StoredHalf
from halfway.clients.listener import Answer, hide_parameters
from halfway.clients.messages import CheckRequest, HalfMessage, MessageFields, SendResult
from halfway.schemas.errors import OutcomeUnknownError, RolledBackError
from halfway.schemas.headers import LocalTransactionState

log = logging.getLogger(__name__)

Store = Callable[[Sequence[HalfMessage], str], list[StoredHalf]]
"""Signs and stores halves (`GroupRecords.store_halves`)."""
_MESSAGE_ID = re.compile(r"([0-9a-f]{32})\.\d+")


IN_SAVEPOINT = "messages cannot be added in a savepoint, because its rollback would not take them back"


def transaction_of(message_id: str) -> str | None:
    """Return the id of the transaction that sent a message; None if the message was sent in another way."""
    match = _MESSAGE_ID.fullmatch(message_id)
    return match and match[1]


def unscoped(given: Any) -> Any:
    """Return the session that a `scoped_session` of SQLAlchemy has for this thread or task; anything else as it is."""
    return given() if hasattr(given, "registry") else given


class DatabaseTransaction(Protocol):
    """One transaction of a database, begun and not ended."""

    connection: Any
    """What the block works with: a DB-API or SQLAlchemy connection, a session, Django's connection."""

    def execute(self, statement: Any, parameters: Any = None) -> Any:
        """Execute a statement in the database's own words."""

    def flush(self) -> None:
        """Let the database refuse what it would refuse."""

    def raw(self) -> Any:
        """Return the DB-API connection that the transaction is in."""

    def errors_as_the_services(self) -> AbstractContextManager[None]:
        """Return a context for statements of our own, whose errors are raised as those of the service's statements."""

    def set_savepoint(self) -> None:
        """Set a savepoint where the block begins, so that its end shows if the transaction was over before it."""

    def release_savepoint(self) -> None:
        """Release the savepoint. The driver raises its error if the transaction was over before the block."""

    def write_row(self, transaction_id: str, born_at_ms: int) -> None:
        """Write that the transaction commits. Raise RolledBackError if its place is taken, or if it is over."""

    def is_nested(self) -> bool:
        """Return True in a savepoint, whose rollback would leave the messages."""

    def commit(self, write: Callable[[], None]) -> None:
        """Call `write` as the last of the transaction's statements, and commit.

        Raises:
            BaseException: of `write` or what comes before it; then nothing is committed. Or of the commit, which may be
                done or not.
        """

    def abandon(self) -> None:
        """Roll back and let go. Raises nothing, also if the connection is lost."""

    def abandon_after(self, error: BaseException) -> None:
        """Roll back after an error of the block, unless the connection may be in another transaction by now."""


class TransactionSource(Protocol):
    """Begins transactions, and tells how they ended."""

    def begin(self, using: Any) -> DatabaseTransaction:
        """Begin a transaction."""

    def new_id(self) -> str:
        """Return the id of a new transaction, 32 hexadecimal digits. No other database gives it."""

    def outcome_of(self, transaction_id: str, born_at_ms: int) -> LocalTransactionState:
        """Return how a transaction ended. If that is open, end it."""


@runtime_checkable
class TransactionDatabase(TransactionSource, Protocol):
    """A database that holds a row for each transaction (`SqlTransactions`)."""

    def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState:
        """Answer a check."""

    def clean_up(self, using: Any = None) -> None:
        """Delete old rows now and then. `using` is what the block that has just ended was given."""

    def on_commit(self, session: Any, producer: Hashable, make: "Callable[[TransactionSource], LocalTransaction]") -> "LocalTransaction":
        """Return the block of a session's transaction for what `producer` sends. If there is none, `make` begins it."""


class LocalTransaction:
    """One database transaction, and the messages that become readable if it commits.

    Attributes:
        transaction_id: the id of its row. The ids of its messages begin with it.
        is_written: True once its row is written, or needs none: from then on it may have committed.
    """

    def __init__(self, source: TransactionSource, using: Any, records: GroupRecords, sender: Sends, store: Store) -> None:
        """Begin. `TransactionProducer.transaction` calls it."""
        self._source, self._records, self._sender, self._store = source, records, sender, store
        self._born_at_ms = time.time_ns() // 1_000_000
        self._numbers = itertools.count()
        self._messages: list[HalfMessage] = []
        self._halves: list[StoredHalf] = []
        self._state = LocalTransactionState.UNKNOWN
        self._is_open, self.is_written = True, False
        self.transaction_id = source.new_id()
        self._transaction = source.begin(using)
        try:
            self._transaction.set_savepoint()
        except BaseException:
            self._transaction.abandon()
            raise

    @property
    def results(self) -> list[SendResult]:
        """Return the result of each send, in order, once the block has ended; empty unless Kafka has all halves."""
        return [half.result(self._state) for half in self._halves]

    @property
    def connection(self) -> Any:
        """Return what the transaction runs on: a DB-API or SQLAlchemy connection, a session, or Django's connection."""
        return self._transaction.connection

    def execute(self, statement: Any, parameters: Any = None) -> Any:
        """Execute a statement in the transaction, as the connection or session would.

        Args:
            statement: SQL in the driver's words, or a construct of SQLAlchemy.
            parameters: as the driver takes them.

        Returns:
            A DB-API cursor, or SQLAlchemy's result.
        """
        return self._transaction.execute(statement, parameters)

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
            RuntimeError: the transaction has ended, or its messages are being sent.
            TypeError: it is in a savepoint.
            ValueError: an argument breaks the contract (docs/contract.md).
            SendError: the body is larger than the producer's `max_body_bytes`.
        """
        if not self._is_open:
            raise RuntimeError(
                f"transaction {self.transaction_id} takes no more messages: it has ended, or its messages are being sent. Add them in the "
                "block, or, with a session, by a new on_commit()"
            )
        if self._transaction.is_nested():
            raise TypeError(IN_SAVEPOINT)
        name = f"{self.transaction_id}.{next(self._numbers)}"
        fields = MessageFields(tags=tags, keys=keys, queue_id=queue_id, immunity_s=immunity_s)
        message = self._records.message(name, topic, body, properties, self._born_at_ms, **fields)
        self._records.verify(message)
        self._messages.append(message)
        return message.transaction_id

    def finish(self) -> None:
        """Store the halves, write the row, commit, and send COMMIT. `TransactionProducer.transaction` calls it.

        Raises:
            Exception: as `prepare` and `conclude`.
        """
        self.prepare()
        self.conclude()

    def prepare(self) -> None:
        """Store the halves.

        Raises:
            SendError: a half could not be stored.
            Exception: of the database, which has refused the transaction. In each case nothing is committed and no
                message becomes readable.
        """
        try:
            self._transaction.flush()
            self._is_open = False
            if self._messages:
                self._halves = self._store(self._messages, "its local transaction was rolled back")
        except BaseException as error:
            self.abandon(type(error).__name__)
            raise

    def write_row(self) -> None:
        """Write that the transaction commits, if it has messages. It is the last statement before the commit, and once.

        Raises:
            RolledBackError: a check has settled the transaction before it could commit, or it is over: the block or the
                database has rolled it back, and the block has gone on.
            Exception: of the database.
        """
        if self.is_written:
            return
        if self._state is LocalTransactionState.ROLLBACK:  # Its messages are taken back.
            raise RolledBackError(f"transaction {self.transaction_id} was rolled back, and is not to commit any more")
        try:
            if self._messages:
                self._transaction.write_row(self.transaction_id, self._born_at_ms)
        except BaseException as error:
            self.abandon(type(error).__name__)
            raise
        self.is_written = True

    def conclude(self) -> None:
        """Write the row, commit, and send COMMIT, after `prepare`.

        Raises:
            RolledBackError: as `write_row`.
            OutcomeUnknownError: nobody knows whether the transaction is committed.
            Exception: of the database. Nothing is committed and no message becomes readable.
        """
        try:
            self._transaction.commit(self.write_row)
            if not self.is_written:
                raise RuntimeError(f"transaction {self.transaction_id} was committed in a way that leaves out its messages")
        except BaseException as error:
            self.commit_failed(error)
        else:
            self._settle(LocalTransactionState.COMMIT)

    def fail(self, error: BaseException) -> None:
        """Roll back after an error of the block, unless the transaction may have committed."""
        if not self.is_written:
            self._roll_back(type(error).__name__, partial(self._transaction.abandon_after, error))

    def abandon(self, cause: str) -> None:
        """Roll back. The commit was not tried, so that the transaction can never commit. A second call does nothing."""
        self._roll_back(cause, self._transaction.abandon)

    def _roll_back(self, cause: str, end: Callable[[], None]) -> None:
        if self._state is LocalTransactionState.ROLLBACK:
            return
        try:
            end()
        finally:  # A task may be cancelled once more meanwhile.
            self._state, self._is_open = LocalTransactionState.ROLLBACK, False
            stored = [half.message for half in self._halves]
            self._records.roll_back(self._sender, stored, f"the local transaction was rolled back: {cause}")

    def commit_failed(self, error: BaseException) -> None:
        """Find out what a failed commit has done. A lost answer is not a rollback, so that only the row can tell.

        Raises:
            BaseException: the commit's error, if nothing is committed.
            OutcomeUnknownError: nobody knows whether the transaction is committed.
        """
        if not self.is_written:
            self.abandon(type(error).__name__)
            raise error
        self._transaction.abandon()
        if not self._halves:
            raise error
        try:
            state = self._source.outcome_of(self.transaction_id, self._born_at_ms)
        except Exception as failure:
            log.warning("event=commit_in_doubt transaction_id=%r error=%s", self.transaction_id, type(failure).__name__)
            state = LocalTransactionState.UNKNOWN
        if state is not LocalTransactionState.UNKNOWN:
            self._settle(state)
        if state is LocalTransactionState.COMMIT:  # a hook that runs after the commit has raised it, or an answer was lost
            hide_parameters(error)
            log.warning(
                "event=committed_in_spite_of_an_error transaction_id=%r error=%s", self.transaction_id, type(error).__name__, exc_info=error
            )
        if state is LocalTransactionState.UNKNOWN and isinstance(error, Exception):
            raise OutcomeUnknownError(
                f"the answer to the commit of transaction {self.transaction_id} was lost ({type(error).__name__}), and so was the "
                "look-up: a check finds out whether it is committed, and its messages follow. Look at your data before you run it again"
            ) from error
        if state is LocalTransactionState.ROLLBACK or not isinstance(error, Exception):
            raise error

    def _settle(self, state: LocalTransactionState) -> None:
        self._state = state
        self._records.settle(self._sender, [half.message for half in self._halves], Answer(state))
