"""Transactions of SQLAlchemy: on connections of an engine, and on a service's own sessions and connections."""

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any

from halfway.clients.sql.drivers import driver_of, errors_of
from halfway.clients.sql.marked_transaction import MarkedTransaction
from halfway.clients.transaction import DatabaseTransaction, unscoped
from halfway.schemas.errors import RolledBackError
from halfway.schemas.records import type_of

LENT = "halfway_lent"
"""The execution option of a connection that Halfway has made for a block, and that the end of the block gives back."""
_BLOCK = "halfway.block"
"""Key of `Connection.info`: the transaction that a block is to end."""
_UNWRITTEN = "halfway.unwritten"
"""Key of `Connection.info`, while a session's transaction is to write a row and has not."""
_MARKED = "halfway.marked"
"""Key of `Session.info`: the transaction that holds the mark."""
_LOST = "halfway.lost"
"""Key of `Connection.info`: the transaction that the database has rolled back."""


class SqlAlchemyDatabase:
    """Connections of a SQLAlchemy engine, and the sessions and connections that a service has of it."""

    def __init__(self, engine: Any) -> None:
        """Store the engine.

        Raises:
            TypeError: its pool lends a connection that is in use, as that of a SQLite database in memory does.
        """
        pools = import_module("sqlalchemy.pool")
        if isinstance(engine.pool, (pools.StaticPool, pools.SingletonThreadPool)):
            raise TypeError(
                f"the engine's {type(engine.pool).__name__} lends one connection to several, so that a check would roll back the "
                "service's transaction: use a file, not a SQLite database in memory"
            )
        self._engine = engine
        event, engines = import_module("sqlalchemy.event"), import_module("sqlalchemy").Engine
        if not event.contains(engines, "handle_error", _note_rolled_back):
            # Of the class: for sessions of another engine of this database, and called before what an engine has.
            event.listen(engines, "handle_error", _note_rolled_back)
            event.listen(engines, "checkin", _roll_back_unwritten)

    def begin(self, using: Any) -> DatabaseTransaction:
        """Begin a transaction on a new connection, or use the one of a Session or Connection.

        Raises:
            TypeError: its transaction has a block already, or the session is one that `SessionTransaction` refuses, or
                `using` is neither.
        """
        begun = self._transaction_of(using)
        try:
            info, transaction = begun.place()
        except BaseException:
            begun.abandon()
            raise
        other = info.get(_BLOCK, _no_transaction)()
        if other is not None and other.is_active:  # Its end would commit without what this block adds, or this one's without its.
            raise TypeError(
                "the transaction of this session or connection has a block already, whose end commits it: use a session, and add messages "
                "to its transaction by producer.on_commit(session)"
            )
        info[_BLOCK] = weakref.ref(transaction)  # A connection that is forgotten goes back to its pool.
        begun.guard()
        return begun

    def _transaction_of(self, using: Any) -> "_ConnectionTransaction | SessionTransaction":
        if using is None:
            return _ConnectionTransaction(self._engine.connect(), is_ours=True)
        using = _synchronous(using)
        if not hasattr(using, "in_nested_transaction"):
            raise TypeError(f"{type_of(using)} is no Session or Connection of SQLAlchemy: pass one, or nothing for a new connection")
        if hasattr(using, "flush"):
            return SessionTransaction(using)
        return _ConnectionTransaction(using, is_ours=LENT in using.get_execution_options())

    @contextmanager
    def idle_connection(self, using: Any = None) -> Iterator[Any]:
        """Lend a DB-API connection without a transaction: that of a Connection, or else one of the pool's own.

        Args:
            using: what a block was given that has just ended. While it holds a connection, the pool may have no other.
        """
        used = _synchronous(using)
        if used is None or hasattr(used, "flush") or used.closed or used.in_transaction():
            with self._pooled_connection() as connection:
                yield connection
            return
        try:
            yield used.connection.dbapi_connection
        except BaseException as error:
            # What a signal or a cancellation leaves set, such as autocommit, is not for the service's next transaction.
            if not isinstance(error, self._engine.dialect.dbapi.Error):
                used.invalidate()
            raise

    @contextmanager
    def _pooled_connection(self) -> Iterator[Any]:
        """Lend the DB-API connection of a pooled connection. After an error, which is SQLAlchemy's, it is thrown away.

        If the database has closed it, as in a restart, the pool replaces all others too, as SQLAlchemy would: they are
        closed as well, and each would cost a check.
        """
        dialect = self._engine.dialect
        with _raised_by_sqlalchemy(dialect.dbapi):
            pooled = self._engine.raw_connection()
            connection = pooled.dbapi_connection
            try:
                yield connection
            except BaseException as error:
                if isinstance(error, dialect.dbapi.Error) and dialect.is_disconnect(error, connection, None):
                    self._engine.dispose(close=False)
                pooled.invalidate()
                raise
            finally:
                pooled.close()


def _synchronous(using: Any) -> Any:
    """Return the session or connection that SQLAlchemy's greenlets use, of one of asyncio."""
    using = unscoped(using)
    return getattr(using, "sync_session", None) or getattr(using, "sync_connection", None) or using


class _SqlAlchemyTransaction(MarkedTransaction):
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
        return _raised_by_sqlalchemy(errors_of(self.raw()))


@contextmanager
def _raised_by_sqlalchemy(errors: Any) -> Iterator[None]:
    try:
        yield
    except errors.Error as error:
        raise import_module("sqlalchemy.exc").DBAPIError.instance(None, None, error, errors.Error) from error


def _note_rolled_back(context: Any) -> None:
    """Remember that the database has rolled back a transaction that SQLAlchemy takes for open. It may have no mark."""
    connection = context.connection
    if connection is None or connection.invalidated or context.is_disconnect or connection.get_transaction() is None:
        return
    raw = connection.connection.dbapi_connection
    with suppress(TypeError):  # `begin` refuses the driver
        if driver_of(raw).has_rolled_back(context.original_exception, raw, context.statement or ""):
            connection.info[_LOST] = weakref.ref(connection.get_transaction())


def _no_transaction() -> None:
    """Stand for a weak reference to none."""


def _refuse_lost(connection: Any) -> None:
    lost = connection.info.get(_LOST, _no_transaction)()
    if lost is not None and lost is connection.get_transaction():
        raise RolledBackError(
            "the database has rolled this transaction back, or may have, as after a deadlock, so that it takes no message. Let such an "
            "error end the transaction, and run it again"
        )


def _roll_back_unwritten(raw: Any, pooled: Any) -> None:
    """Roll back what a session leaves open without its row: the next one would commit it, and not the message.

    SQLAlchemy leaves it open where a listener of the commit raises an error, and the session is closed.
    """
    if pooled.info.pop(_UNWRITTEN, False) and raw is not None:
        try:
            raw.rollback()
        except Exception:
            pooled.invalidate()


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


class _ConnectionTransaction(_SqlAlchemyTransaction):
    def __init__(self, connection: Any, *, is_ours: bool) -> None:
        self.connection, self.is_ours = connection, is_ours
        try:
            self._transaction = connection.get_transaction() or connection.begin()
        except BaseException:
            self._close()
            raise

    def mark(self) -> None:
        _refuse_lost(self.connection)
        super().mark()

    def place(self) -> tuple[dict[str, Any], Any]:
        return self.connection.info, self._transaction

    def is_nested(self) -> bool:
        return bool(self.connection.in_nested_transaction())

    def raw(self) -> Any:
        return self.connection.connection.dbapi_connection

    def at_commit(self, act: Callable[[], None]) -> Callable[[], None]:
        return _listen(self.connection, "commit", partial(self._act_at, act))

    def _act_at(self, act: Callable[[], None], connection: Any) -> None:
        if connection.get_transaction() is self._transaction:
            _or_roll_back(act, connection)

    def commit(self, write: Callable[[], None]) -> None:
        write()
        self._forget_guard()
        self._transaction.commit()
        self._close()

    def abandon(self) -> None:
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

    They share one mark, which is that of the first block and which the first row takes away: in MariaDB a second
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
        is_bound = hasattr(session.bind, "in_transaction")
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

    def place(self) -> tuple[dict[str, Any], Any]:
        """Return the connection's notes, and the transaction. The connection of a test may have several sessions."""
        session = self.connection
        transaction = session.get_transaction() or session.begin()
        return (session if self._is_of_test else session.connection()).info, transaction

    def mark(self) -> None:
        """Mark where the first block begins."""
        _refuse_lost(self.connection.connection())  # which may begin the transaction
        self._root = self.connection.get_transaction()
        if self.connection.info.get(_MARKED) is not self._root:
            super().mark()
            self.connection.info[_MARKED] = self._root

    def release_mark(self, connection: Any) -> None:
        """Take the mark away, if no other block has. Raises the database's error if it is another transaction's."""
        if self.connection.get_transaction() is not self._root:
            raise errors_of(connection).OperationalError("the session is in another transaction")
        if self.connection.info.pop(_MARKED, None) is not None:
            super().release_mark(connection)

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
        connection.info[_UNWRITTEN] = True
        return _listen(connection, "commit", partial(self._act_at, act))

    def _act_before(self, act: Callable[[], None], transaction: Any, session: Any) -> None:
        if session.get_transaction() is transaction and not session.in_nested_transaction():
            act()

    def _act_at(self, act: Callable[[], None], connection: Any) -> None:
        self._committing = connection.connection.dbapi_connection  # The session tells nothing while it commits.
        try:
            _or_roll_back(act, connection)
            connection.info.pop(_UNWRITTEN, None)
        finally:
            self._committing = None

    def commit(self, write: Callable[[], None]) -> None:
        """Commit the session."""
        forget = self.at_commit(write)
        self._forget_guard()
        try:
            self.connection.commit()
        finally:
            forget()

    def abandon(self) -> None:
        """Roll the session back."""
        with suppress(Exception):
            self.connection.rollback()
            self._forget_guard()
