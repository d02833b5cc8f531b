"""Transactions of SQLAlchemy: of a connection, and of a service's session."""

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any

from halfway.clients.sql.drivers import driver_of, errors_of
from halfway.clients.sql.savepoint_transaction import SavepointTransaction
from halfway.schemas.errors import RolledBackError

_OF_SESSION = "halfway.of_session"
"""Key of `Connection.info`, while a session's transaction is to write a row, or has and is not known to be over."""
_SAVEPOINT = "halfway.savepoint"
"""Key of `Session.info`: the transaction that has the savepoint of its first block."""
_LOST = "halfway.lost"
"""Key of `Connection.info`: the transaction that the database has rolled back."""


class _SqlAlchemyTransaction(SavepointTransaction):
    """What is the same for a connection and for a session. The database's errors are raised as SQLAlchemy's.

    Otherwise a service that runs a block again, as after a serialization failure, would have two classes to catch.
    """

    connection: Any
    _is_refused = False
    _forget_guard: Callable[[], None] = staticmethod(lambda: None)

    def guard(self) -> None:
        """Refuse each commit until the end of the block: it would write the data without the messages.

        It may come after the block, when a signal handler has raised an exception in the block's first or last lines.
        """
        self._forget_guard = self.at_commit(self._refuse)

    def _refuse(self) -> None:
        self._is_refused = True
        raise RolledBackError(
            "a transaction was committed that a block is to end, or that a block has left open because a signal came. It is rolled back, "
            "and no message becomes readable: leave the commit to the block"
        )

    def flush(self) -> None:
        """Execute what is held back.

        Raises:
            RolledBackError: a commit was refused, and the block has gone on.
        """
        if self._is_refused:
            self._refuse()

    @abstractmethod
    def at_commit(self, act: Callable[[], None]) -> Callable[[], None]:
        """Call `act` before the transaction commits. Returns a function that ends this."""

    @abstractmethod
    def place(self) -> tuple[dict[str, Any], Any]:
        """Return where it is noted that a block is to end the transaction, and the transaction, begun."""

    def execute(self, statement: Any, parameters: Any = None) -> Any:
        """Execute a statement of SQLAlchemy."""
        return self.connection.execute(statement, parameters)

    def errors_as_the_services(self) -> AbstractContextManager[None]:
        return raised_by_sqlalchemy(errors_of(self.raw()))


@contextmanager
def raised_by_sqlalchemy(errors: Any) -> Iterator[None]:
    """Raise the errors of a driver, `errors.Error` and those below it, as SQLAlchemy's."""
    try:
        yield
    except errors.Error as error:
        raise import_module("sqlalchemy.exc").DBAPIError.instance(None, None, error, errors.Error) from error


def note_lost(context: Any) -> None:
    """Remember that the database has rolled back a transaction that SQLAlchemy takes for open, of a block or not."""
    connection = context.connection
    if connection is None or connection.invalidated or context.is_disconnect or connection.get_transaction() is None:
        return
    raw = connection.connection.dbapi_connection
    with suppress(TypeError):  # `begin` refuses the driver
        if driver_of(raw).has_rolled_back(context.original_exception, raw, context.statement or ""):
            connection.info[_LOST] = weakref.ref(connection.get_transaction())


def no_transaction() -> None:
    """Stand for a weak reference to none."""


def _refuse_lost(connection: Any) -> None:
    lost = connection.info.get(_LOST, no_transaction)()
    if lost is not None and lost is connection.get_transaction():
        raise RolledBackError(
            "the database has rolled this transaction back, or may have, as after a deadlock, so that it takes no message. Let such an "
            "error end the transaction, and run it again"
        )


def note_rollback(connection: Any) -> None:
    """Note that a connection is rolled back."""
    if not connection.invalidated:
        connection.info.pop(_OF_SESSION, None)


def roll_back_left_open(raw: Any, pooled: Any, state: Any) -> None:
    """Roll back what a session leaves open that was to write a row: the next session would commit it.

    SQLAlchemy leaves it open where a listener of the commit, or SQLite in its COMMIT, raises an error, and the session
    is closed. The pool calls this when it resets a connection, and deals with what is raised here. Only then is there
    something to wait for: a cancellation in it would cost SQLAlchemy 2.0 the connection's place in the pool.
    """
    if pooled is not None and state.asyncio_safe and pooled.info.pop(_OF_SESSION, False):
        raw.rollback()


def _listen(target: Any, name: str, call: Callable[..., None]) -> Callable[[], None]:
    event = import_module("sqlalchemy.event")
    event.listen(target, name, call)
    return partial(event.remove, target, name, call)


def _or_roll_back(act: Callable[[], None], connection: Any) -> None:
    """Call `act` while a connection commits. After an error SQLAlchemy takes the transaction for ended: it ends."""
    try:
        act()
    except BaseException:
        with suppress(Exception):
            connection.connection.dbapi_connection.rollback()
        raise


class ConnectionTransaction(_SqlAlchemyTransaction):
    """The transaction of a connection."""

    def __init__(self, connection: Any, *, is_ours: bool) -> None:
        """Use the connection's transaction, or begin one. At its end, a connection that `is_ours` is closed."""
        self.connection, self.is_ours = connection, is_ours
        try:
            self._transaction = connection.get_transaction() or connection.begin()
        except BaseException:
            self._close()
            raise

    def set_savepoint(self) -> None:
        """Set a savepoint where the block begins.

        Raises:
            RolledBackError: the database has rolled the transaction back.
        """
        _refuse_lost(self.connection)
        super().set_savepoint()

    def place(self) -> tuple[dict[str, Any], Any]:
        """Return the connection's notes, and the transaction."""
        return self.connection.info, self._transaction

    def is_nested(self) -> bool:
        """Return True in `begin_nested()`."""
        return bool(self.connection.in_nested_transaction())

    def raw(self) -> Any:
        """Return the DB-API connection below."""
        return self.connection.connection.dbapi_connection

    def at_commit(self, act: Callable[[], None]) -> Callable[[], None]:
        """Call `act` when the connection commits. Returns a function that ends this."""
        return _listen(self.connection, "commit", partial(self._act_at, act))

    def _act_at(self, act: Callable[[], None], connection: Any) -> None:
        if connection.get_transaction() is self._transaction:
            _or_roll_back(act, connection)

    def commit(self, write: Callable[[], None]) -> None:
        """Write the row and commit."""
        write()
        self._forget_guard()
        self._transaction.commit()
        self._close()

    def abandon(self) -> None:
        """Roll the connection back."""
        with suppress(Exception):
            self.connection.rollback()  # whatever transaction it is in: the block may have ended ours
            self._forget_guard()
        with suppress(Exception):
            self.raw().rollback()  # SQLAlchemy takes a transaction whose commit has failed for ended; SQLite does not
        self._close()

    def _close(self) -> None:
        if self.is_ours:
            with suppress(Exception):
                self.connection.close()


class SessionTransaction(_SqlAlchemyTransaction):
    """The transaction of a session, in which several producers may have a block.

    They share one savepoint, which the first block sets and the first row releases: in MariaDB a second
    savepoint of a name replaces the first, and elsewhere hides that the first one's transaction is over.
    """

    is_ours = False

    def __init__(self, session: Any) -> None:
        """Use the session.

        Raises:
            TypeError: it is bound to a connection. If that is in a transaction, the session's commit commits nothing.
                Or it commits in two phases.
        """
        # Tests of a service join each session to a transaction that they roll back, and say so by this mode.
        is_bound = hasattr(session.get_bind(), "in_transaction")
        self._is_of_test = is_bound and getattr(session, "join_transaction_mode", None) == "create_savepoint"
        if is_bound and not self._is_of_test:
            raise TypeError(
                "the session is bound to a connection, whose transaction would decide what its commit does: bind it to the engine. Tests "
                'that roll everything back use join_transaction_mode="create_savepoint"'
            )
        if session.twophase:
            raise TypeError("the session commits in two phases, of which the row would see the first: make it without twophase=True")
        self.connection = session
        self._committing: Any = None
        self._root: Any = None
        self._info: dict[str, Any] = {}

    def place(self) -> tuple[dict[str, Any], Any]:
        """Return the connection's notes, and the transaction. The connection of a test may have several sessions."""
        session = self.connection
        transaction = session.get_transaction() or session.begin()
        return (session if self._is_of_test else session.connection()).info, transaction

    def set_savepoint(self) -> None:
        """Set a savepoint where the first block begins."""
        _refuse_lost(self.connection.connection())  # which may begin the transaction
        self._root = self.connection.get_transaction()
        if self.connection.info.get(_SAVEPOINT) is not self._root:
            super().set_savepoint()
            self.connection.info[_SAVEPOINT] = self._root

    def release_savepoint(self) -> None:
        """Release the savepoint, if no other block has. Raises the driver's error if it is another transaction's."""
        if self.connection.get_transaction() is not self._root:
            raise errors_of(self.raw()).OperationalError("the session is in another transaction")
        if self.connection.info.pop(_SAVEPOINT, None) is not None:
            super().release_savepoint()

    def flush(self) -> None:
        """Execute what the session still holds."""
        super().flush()
        self.connection.flush()

    def is_nested(self) -> bool:
        """Return True in `begin_nested()`, of the session or of its connection."""
        session = self.connection
        if session.in_nested_transaction():
            return True
        # A test's connection is in a savepoint for the whole session.
        return not self._is_of_test and session.in_transaction() and bool(session.connection().in_nested_transaction())

    def raw(self) -> Any:
        """Return the DB-API connection below."""
        return self._committing or self.connection.connection().connection.dbapi_connection

    def at_commit(self, act: Callable[[], None]) -> Callable[[], None]:
        """Call `act` when the session's connection commits, when its own events and all that they write are over.

        Otherwise the database may refuse a statement that comes later, and not the commit: PostgreSQL then rolls back
        without an error.

        Returns:
            A function that ends this.
        """
        if self._is_of_test:
            return _listen(self.connection, "before_commit", partial(self._act_before, act, self.connection.get_transaction()))
        connection = self.connection.connection()
        self._info = connection.info
        self._info[_OF_SESSION] = True
        return _listen(connection, "commit", partial(self._act_at, act))

    def _act_before(self, act: Callable[[], None], transaction: Any, session: Any) -> None:
        if session.get_transaction() is transaction and not session.in_nested_transaction():
            act()

    def _act_at(self, act: Callable[[], None], connection: Any) -> None:
        self._committing = connection.connection.dbapi_connection  # The session tells nothing while it commits.
        try:
            _or_roll_back(act, connection)
        finally:
            self._committing = None

    def commit(self, write: Callable[[], None]) -> None:
        """Commit the session."""
        forget = self.at_commit(write)
        self._forget_guard()
        try:
            self.connection.commit()
            self.note_commit()
        finally:
            forget()

    def note_commit(self) -> None:
        """Note that the session has committed: its connection leaves nothing open."""
        self._info.pop(_OF_SESSION, None)

    def abandon(self) -> None:
        """Roll the session back."""
        with suppress(Exception):
            self.connection.rollback()
            self._forget_guard()
