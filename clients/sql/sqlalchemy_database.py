"""A SQLAlchemy engine: begins transactions on its connections, and on a service's own sessions and connections."""

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from halfway.clients.sql.sqlalchemy_transactions import (
    ConnectionTransaction,
    SessionTransaction,
    no_transaction,
    note_lost,
    note_rollback,
    raised_by_sqlalchemy,
    roll_back_left_open,
)
from halfway.clients.transaction import DatabaseTransaction, unscoped
from halfway.schemas.records import type_of

LENT = "halfway_lent"
"""The execution option of a connection that Halfway has made for a block, and that the end of the block gives back."""
_BLOCK = "halfway.block"
"""Key of `Connection.info`: the transaction that a block is to end."""


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
        _engines.add(engine)
        event, engines = import_module("sqlalchemy.event"), import_module("sqlalchemy").Engine
        if not event.contains(engines, "handle_error", note_lost):
            # Of the class: for sessions of another engine of this database, and called before what an engine has.
            event.listen(engines, "handle_error", note_lost)
            event.listen(engines, "rollback", note_rollback)
            event.listen(engines, "reset", roll_back_left_open)

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
        other = info.get(_BLOCK, no_transaction)()
        if other is not None and other.is_active:  # Its end would commit without what this block adds, or this one's without its.
            raise TypeError(
                "the transaction of this session or connection has a block already, whose end commits it: use a session, and add messages "
                "to its transaction by producer.on_commit(session)"
            )
        info[_BLOCK] = weakref.ref(transaction)  # A connection that is forgotten goes back to its pool.
        begun.guard()
        return begun

    def _transaction_of(self, using: Any) -> ConnectionTransaction | SessionTransaction:
        if using is None:
            return ConnectionTransaction(self._engine.connect(), is_ours=True)
        using = _synchronous(using)
        if not hasattr(using, "in_nested_transaction"):
            raise TypeError(f"{type_of(using)} is no Session or Connection of SQLAlchemy: pass one, or nothing for a new connection")
        if hasattr(using, "flush"):
            return SessionTransaction(using)
        return ConnectionTransaction(using, is_ours=LENT in using.get_execution_options())

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
        with raised_by_sqlalchemy(dialect.dbapi):
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


def _forget_connections() -> None:
    """Let the engines of a forked process make new connections: two processes on one commit each other's transactions.

    A server may load the application, and so create the table, before it forks. The parent's connections stay open.
    """
    for engine in list(_engines):
        engine.dispose(close=False)


_engines: "weakref.WeakSet[Any]" = weakref.WeakSet()
if hasattr(os, "register_at_fork"):  # Windows does not fork.
    os.register_at_fork(after_in_child=_forget_connections)


def _synchronous(using: Any) -> Any:
    """Return the session or connection that SQLAlchemy's greenlets use, of one of asyncio."""
    using = unscoped(using)
    return getattr(using, "sync_session", None) or getattr(using, "sync_connection", None) or using
