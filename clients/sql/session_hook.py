"""Sends the messages of a SQLAlchemy session when the service calls `session.commit()`."""

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

from halfway.clients.sql.sqlalchemy_transactions import SessionTransaction
from halfway.clients.transaction import IN_SAVEPOINT, DatabaseTransaction, LocalTransaction, TransactionDatabase, TransactionSource
from halfway.schemas.headers import LocalTransactionState

log = logging.getLogger(__name__)


class SessionHook:
    """The events of one session. It prepares when the session's connection commits, and concludes after it.

    The session itself commits and rolls back. If its commit fails, the row is looked up, as in a block.
    """

    def __init__(self, session: Any, database: TransactionDatabase) -> None:
        """Listen to the session's events, for as long as it is used."""
        self.session, self._database = session, database
        self._block: LocalTransaction | None = None
        self._transaction: Any = None
        self._of_session: SessionTransaction | None = None
        self._forget_commit: Callable[[], None] = _nothing
        self._is_committed = False
        event = import_module("sqlalchemy.event")
        event.listen(session, "after_commit", self._after_commit)
        event.listen(session, "after_transaction_end", self._after_end)

    def block(self, make: Callable[[TransactionSource], LocalTransaction]) -> LocalTransaction:
        """Return the block of the session's transaction, which this begins if there is none.

        Raises:
            TypeError: the session is in a savepoint. If that were rolled back, its messages would be sent all the same.
        """
        if self.session.in_nested_transaction():
            raise TypeError(IN_SAVEPOINT)
        if not self.session.in_transaction():
            self.session.begin()
        if self._transaction is not self.session.get_transaction():
            self._conclude()  # A listener of the service has come before `_after_end`.
        if self._block is None:
            transaction = _OfSession(self.session, self._database)
            block = make(transaction)
            self._forget_commit, self._of_session = transaction.at_commit(self._at_commit), transaction
            self._block, self._transaction = block, self.session.get_transaction()  # last: a signal may come at any moment
        return self._block

    def _at_commit(self) -> None:
        if self._block is not None and not self._block.is_written:
            self._block.prepare()
            self._block.write_row()

    def _after_commit(self, session: Any) -> None:
        if self._block is None or session.in_nested_transaction():
            return
        if self._of_session is not None:
            self._of_session.note_commit()
        block = self._end()
        block.conclude()
        self._is_committed = True

    def _after_end(self, _: Any, transaction: Any) -> None:
        """Conclude a transaction that has not committed, as far as the session knows."""
        if transaction.parent is not None:
            return
        if self._is_committed:
            # Only now has the session given its connection back: the pool may have no second one.
            self._is_committed = False
            self._database.clean_up()
        if transaction is self._transaction:
            self._conclude()

    def _conclude(self) -> None:
        """Conclude the block of a transaction that the session has left, if there is one."""
        if self._block is None:
            return
        block = self._end()
        if not block.is_written:
            block.abandon("the session was rolled back or closed")
            return
        try:
            block.commit_failed(RuntimeError("the session's commit failed"))
        except Exception as error:  # The caller has the database's own error.
            log.warning("event=session_not_committed transaction_id=%r error=%s", block.transaction_id, type(error).__name__)

    def _end(self) -> LocalTransaction:
        block, self._block, self._transaction = cast(LocalTransaction, self._block), None, None
        self._forget_commit()
        # A session that is kept must not keep the connection from its pool.
        self._forget_commit, self._of_session = _nothing, None
        return block


def _nothing() -> None:
    """Do nothing."""


class _OfSession(SessionTransaction):
    """The session's transaction as a block sees it. The session commits it, and rolls it back."""

    def __init__(self, session: Any, database: TransactionDatabase) -> None:
        super().__init__(session)
        self._database = database

    def begin(self, _: Any) -> DatabaseTransaction:
        return self

    def new_id(self) -> str:
        return self._database.new_id()

    def outcome_of(self, transaction_id: str, born_at_ms: int) -> LocalTransactionState:
        return self._database.outcome_of(transaction_id, born_at_ms)

    def commit(self, write: Callable[[], None]) -> None:
        """Do nothing: the session has committed."""

    def abandon(self) -> None:
        """Do nothing: the caller of `session.commit()` gets the error, and rolls back."""
