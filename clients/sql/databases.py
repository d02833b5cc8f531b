"""What reaches the database of a service: SQLAlchemy, Django, or a function that makes DB-API connections."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from typing import Any

from halfway.clients.sql.drivers import driver_of
from halfway.clients.sql.savepoint_transaction import SavepointTransaction
from halfway.clients.sql.sqlalchemy_database import SqlAlchemyDatabase
from halfway.clients.transaction import DatabaseTransaction
from halfway.schemas.errors import RolledBackError, SettingsError
from halfway.schemas.records import type_of


def database_of(given: Any) -> "DbApiDatabase | SqlAlchemyDatabase | DjangoDatabase":
    """Return what reaches the database that a service has named.

    Raises:
        TypeError: it is no SQLAlchemy engine, no connection of Django, and no function.
    """
    if hasattr(given, "sync_engine"):
        raise TypeError(
            "an AsyncEngine is for AsyncSqlTransactions, with an AsyncTransactionProducer; for bookmarks give a synchronous Engine of the "
            "same database"
        )
    if hasattr(given, "raw_connection"):
        return SqlAlchemyDatabase(given)
    if hasattr(given, "settings_dict"):
        return DjangoDatabase(given.alias)
    if isinstance(given, type) or (callable(given) and not hasattr(given, "cursor")):  # A connection of sqlite3 can be called.
        return DbApiDatabase(given)
    raise TypeError(
        f"{type_of(given)} is no database: give a SQLAlchemy engine, django.db.connections[...], or a function that "
        "returns a new DB-API connection"
    )


class DbApiDatabase:
    """Connections that a function of the service makes."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        """Store the function."""
        self._connect = connect

    def begin(self, using: Any) -> DatabaseTransaction:
        """Begin a transaction on a new connection.

        Raises:
            TypeError: `using` is not None.
        """
        if using is not None:
            raise TypeError("a Session or Connection can only be passed where the database was given as a SQLAlchemy engine: leave it out")
        return _DbApiTransaction(self._connection())

    @contextmanager
    def idle_connection(self, _: Any = None) -> Iterator[Any]:
        """Lend a new connection, without a transaction."""
        with closing(self._connection()) as connection:
            yield connection

    def _connection(self) -> Any:
        """Return a new connection.

        Raises:
            TypeError: the function returns something else, such as a session.
        """
        connection = self._connect()
        driver_of(connection)
        return connection


class _DbApiTransaction(SavepointTransaction):
    def __init__(self, connection: Any) -> None:
        self.connection = connection
        try:
            driver_of(connection).begin(connection)
        except BaseException:
            self.abandon()
            raise

    def execute(self, statement: Any, parameters: Any = None) -> Any:
        cursor = self.connection.cursor()
        cursor.execute(statement, *(() if parameters is None else (parameters,)))
        return cursor

    def raw(self) -> Any:
        return self.connection

    def commit(self, write: Callable[[], None]) -> None:
        write()
        self.connection.commit()
        self._close()

    def abandon(self) -> None:
        with suppress(Exception):
            self.connection.rollback()
        self._close()

    def _close(self) -> None:
        with suppress(Exception):
            self.connection.close()


def _django() -> Any:
    """Return `django.db`, which a service has only if it uses Django."""
    return import_module("django.db")


def _refuse_unended(connection: Any) -> None:
    """Refuse a connection in a transaction that no `atomic` ends: there a new one would be a mere savepoint.

    A signal's exception in the first or last lines of an `atomic` of the service's own leaves it so, for all later
    blocks of the thread.
    """
    if connection.in_atomic_block and not connection.atomic_blocks:
        _close(connection)
        raise RolledBackError(
            "Django's connection was in a transaction that no `atomic` ends, as after an exception of a signal handler in its first or "
            "last lines. It could never commit, and is rolled back: run the block again"
        )


def _close(connection: Any) -> None:
    """Close a connection of any thread, whatever it knows of its transaction. Django opens a new one when it has to."""
    with suppress(Exception):
        connection.connection.rollback()
    connection.in_atomic_block = connection.closed_in_transaction = connection.needs_rollback = False
    connection.atomic_blocks, connection.savepoint_ids, connection.run_on_commit = [], [], []
    _close_of_any_thread(connection)
    if connection.connection is not None:  # SQLite in memory, which Django leaves open
        with suppress(Exception):
            connection.set_autocommit(connection.settings_dict["AUTOCOMMIT"])


def _close_of_any_thread(connection: Any) -> None:
    connection.inc_thread_sharing()
    try:
        with suppress(Exception):
            connection.close()
    finally:
        connection.dec_thread_sharing()


def _close_if_in(atomic: Any, connection: Any) -> None:
    """Close a connection if nobody is left to end this `atomic`: all that came later would never commit."""
    blocks = connection.atomic_blocks
    if blocks[-1:] == [atomic]:
        _close(connection)
    elif atomic in blocks:  # The service is in one inside, whose statements are to fail, and which is to roll back.
        with suppress(Exception):
            connection.connection.rollback()
        _close_of_any_thread(connection)
        connection.needs_rollback = True  # SQLite in memory, which Django leaves open
        if blocks[0] is atomic:  # The one inside is the outermost now, so that its end ends the transaction.
            del blocks[0], connection.savepoint_ids[0]


class DjangoDatabase:
    """One database of a Django project."""

    def __init__(self, alias: str) -> None:
        """Store the name in `DATABASES`."""
        self._alias = alias

    def begin(self, using: Any) -> DatabaseTransaction:
        """Enter `transaction.atomic(durable=True)`: Django refuses it inside another one, whose end would decide.

        Raises:
            SettingsError: Django is not in autocommit mode: `atomic` would only be a savepoint, and commit nothing.
            TypeError: `using` is not None.
        """
        if using is not None:
            raise TypeError("no Session or Connection can be passed with Django: leave it out")
        return _DjangoTransaction(self._alias)

    @contextmanager
    def idle_connection(self, _: Any = None) -> Iterator[Any]:
        """Lend a new connection: this thread's own one may be in a transaction."""
        wrapper = _django().connections[self._alias].copy()
        wrapper.ensure_connection()
        try:
            yield wrapper.connection
        finally:
            wrapper.close()


class _DjangoTransaction(SavepointTransaction):
    def __init__(self, alias: str) -> None:
        self.connection = _django().connections[alias]
        _refuse_unended(self.connection)
        if not self.connection.in_atomic_block and not self.connection.get_autocommit():
            raise SettingsError(
                "Django is not in autocommit mode, in which the end of a block would commit nothing: turn AUTOCOMMIT on, and leave it to "
                "`transaction.atomic()` to begin transactions"
            )
        self._is_outermost = not self.connection.in_atomic_block  # or else Django refuses it, or it is in that of a TestCase
        self._alias, self._atomic = alias, _django().transaction.atomic(using=alias, durable=True)
        weakref.finalize(self, _close_if_in, self._atomic, self.connection).atexit = False
        with self._closed_after_an_error():
            self._atomic.__enter__()
        self._is_open = True
        self._depth = len(self.connection.savepoint_ids)

    def execute(self, statement: Any, parameters: Any = None) -> Any:
        cursor = self.connection.cursor()
        cursor.execute(statement, parameters)
        return cursor

    def flush(self) -> None:
        self._verify_commits()

    def is_nested(self) -> bool:
        # None is for an inner block without a savepoint, whose error rolls back all of it.
        return any(self.connection.savepoint_ids[self._depth :])

    def raw(self) -> Any:
        return self.connection.connection

    def commit(self, write: Callable[[], None]) -> None:
        write()
        self._verify_commits()
        with self._closed_after_an_error():
            self._atomic.__exit__(None, None, None)
        self._is_open = False

    def _verify_commits(self) -> None:
        """Refuse a block whose end Django would turn into a rollback, or into that of another thread's transaction."""
        if not self._is_in_its_thread():
            raise RolledBackError("the block began in another thread, whose connection Django does not commit here: end it where it began")
        if self.connection.needs_rollback:
            raise RolledBackError(
                "Django rolls this block back, after an error of the database that the block has caught, after set_rollback(True), or "
                "because it has closed its connection. "
                "No message becomes readable. Catch such errors around an inner `transaction.atomic()`, or let them leave the block"
            )

    def abandon(self) -> None:
        if self._is_open and not self._is_in_its_thread():
            _close_if_in(self._atomic, self.connection)
        elif self._is_open and self._atomic in self.connection.atomic_blocks:
            error = RuntimeError("rolled back")
            with suppress(Exception), self._closed_after_an_error():
                if self.connection.atomic_blocks[-1] is not self._atomic:
                    raise error  # A signal's exception has left one inside open, and Django would end that one.
                self._atomic.__exit__(type(error), error, None)
        self._is_open = False

    def abandon_after(self, error: BaseException) -> None:
        """Roll back after an error of the block. A block that is freed may be around an `atomic` that goes on."""
        if isinstance(error, GeneratorExit) and self._atomic in self.connection.atomic_blocks[:-1]:
            _close_if_in(self._atomic, self.connection)
        else:
            self.abandon()

    def _is_in_its_thread(self) -> bool:
        return _django().connections[self._alias] is self.connection

    @contextmanager
    def _closed_after_an_error(self) -> Iterator[None]:
        """Close the connection after an error of `atomic`: a signal's may leave it in any state for later blocks."""
        try:
            yield
        except BaseException:
            if self._is_outermost:
                _close(self.connection)
            raise
