"""What differs between SQLite, PostgreSQL and MariaDB: transactions of our own, lock waits and parameters.

Everything here works on a DB-API connection (PEP 249). SQLAlchemy and Django have one below them. For asyncio,
SQLAlchemy adapts the connections of aiosqlite and psycopg.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")
_SAVEPOINT = "halfway"
_ROLLED_BACK = {1020, 1206, 1213}
"""The errors of MariaDB after which InnoDB has rolled back the whole transaction, not the statement alone: the record
has changed (`innodb_snapshot_isolation`), the table of locks is full, a deadlock."""
_MAY_ROLL_BACK = {7, 9, 10, 13, 19}
"""The errors of SQLite after which it may have rolled back the transaction: no memory, interrupted, input and output, a
full disk, a constraint with `OR ROLLBACK` (sqlite.org/lang_transaction.html)."""
_WRITES = re.compile(r"(?:\s|--[^\n]*\n|/\*(?:[^*]|\*(?!/))*+\*/)*+(?:INSERT|UPDATE|DELETE|REPLACE|WITH)\b", re.IGNORECASE)
"""What writes. sqlite3 begins a transaction before it; not before WITH, after whose error none may have been lost."""
_LEGACY = -1
"""`sqlite3.LEGACY_TRANSACTION_CONTROL` of Python 3.12 and newer. With `autocommit=True`, `commit()` does nothing."""


def values_of(row: Any) -> list[Any]:
    """Return the values of a row, which some connections make a mapping, and whose texts some leave in bytes."""
    values = row.values() if isinstance(row, Mapping) else row
    return [value.decode() if isinstance(value, bytes) else value for value in values]


def below(connection: Any) -> Any:
    """Return the driver's own connection, where SQLAlchemy adapts one of asyncio to the DB-API."""
    return getattr(connection, "driver_connection", connection)


def errors_of(connection: Any) -> Any:
    """Return what has the exceptions of PEP 249 as its attributes: the connection, or the module of an adapted one."""
    return getattr(connection, "dbapi", connection)


def _execute(connection: Any, statement: str) -> None:
    """Execute a statement by a cursor, as PEP 249 has it: what SQLAlchemy 2.0 adapts for asyncio has no `execute`."""
    with closing(connection.cursor()) as cursor:
        cursor.execute(statement)


class Driver(ABC):
    """One kind of database, behind the DB-API."""

    now_ms: str
    """What selects the database's time when the statement runs, in ms since 1970 UTC."""

    @abstractmethod
    def parameter(self, name: str) -> str:
        """Return how a statement names a parameter."""

    @abstractmethod
    def begin(self, connection: Any) -> None:
        """Begin a transaction, with the isolation level that the connection has."""

    @abstractmethod
    def commits_each_statement(self, connection: Any) -> bool:
        """Return True if the connection is in autocommit mode and outside of a transaction."""

    @abstractmethod
    def has_rolled_back(self, error: BaseException, connection: Any, statement: str) -> bool:
        """Return True if the database has rolled back the transaction, so that the next statement begins another one.

        Args:
            error: of the driver, which a statement has just raised.
            connection: the statement's.
            statement: as the service has written it.
        """

    def set_savepoint(self, connection: Any) -> None:
        """Set a savepoint. Whatever ends the transaction takes it away."""
        _execute(connection, f"SAVEPOINT {_SAVEPOINT}")

    def release_savepoint(self, connection: Any) -> None:
        """Take the savepoint away; what came after it stays.

        Raises:
            Exception: of the driver, if another transaction has begun since.
        """
        _execute(connection, f"RELEASE SAVEPOINT {_SAVEPOINT}")

    @abstractmethod
    def short_transaction(self, connection: Any, lock_wait_ms: int, *, writes: bool = True) -> Any:
        """Return a context manager: a transaction of our own that reads what is committed when a statement begins.

        It commits at the end. After an error it is rolled back. The connection is left as it was.

        Args:
            connection: a DB-API connection without a transaction.
            lock_wait_ms: after which time of waiting for another transaction a statement fails.
            writes: False to read only. In SQLite this waits for no writer, which may be the caller's own session.
        """


class SqliteDriver(Driver):
    """SQLite with `sqlite3`. It has one writer at a time, and a short transaction is the writer from its beginning."""

    now_ms = "CAST(strftime('%s', 'now') AS INTEGER) * 1000"

    def parameter(self, name: str) -> str:
        """Return `:name`."""
        return f":{name}"

    def begin(self, connection: Any) -> None:
        """Begin as the writer: a reader that becomes a writer later fails if another one has written meanwhile."""
        _begin_no_transactions(connection)
        _execute(connection, "BEGIN IMMEDIATE")
        connection.isolation_level = "IMMEDIATE"  # After a rollback in the block, no statement may commit by itself.

    def commits_each_statement(self, connection: Any) -> bool:
        """Return True if there is no transaction, and a statement would not begin one."""
        if getattr(connection, "autocommit", _LEGACY) is True:
            return True  # Its commit() does nothing, also in a transaction.
        return connection.isolation_level is None and not below(connection).in_transaction

    def has_rolled_back(self, error: BaseException, connection: Any, statement: str) -> bool:
        """Return True if no transaction is left, after an error of a statement for which sqlite3 begins one."""
        if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _MAY_ROLL_BACK:  # without what extends the code
            return False
        return _WRITES.match(statement) is not None and not below(connection).in_transaction

    def set_savepoint(self, connection: Any) -> None:
        """Begin first, where sqlite3 waits for a first write: an outermost savepoint would be the transaction."""
        if not below(connection).in_transaction:
            _execute(connection, "BEGIN")
        super().set_savepoint(connection)

    @contextmanager
    def short_transaction(self, connection: Any, lock_wait_ms: int, *, writes: bool = True) -> Iterator[None]:
        """Be the writer for a moment, or a reader."""
        connection.rollback()  # A pool may lend a connection whose commit has failed. Setting the level would commit.
        level, mode = connection.isolation_level, getattr(connection, "autocommit", None)
        with closing(connection.cursor()) as cursor:
            cursor.execute("PRAGMA busy_timeout")
            [wait_ms] = values_of(cursor.fetchone())
        _begin_no_transactions(connection)
        try:
            _execute(connection, f"PRAGMA busy_timeout = {lock_wait_ms}")
            _execute(connection, "BEGIN IMMEDIATE" if writes else "BEGIN")
            try:
                yield
                _execute(connection, "COMMIT")
            except BaseException:
                with suppress(errors_of(connection).Error):
                    _execute(connection, "ROLLBACK")
                raise
        finally:
            _execute(connection, f"PRAGMA busy_timeout = {wait_ms}")
            connection.isolation_level = level
            if mode is not None:
                connection.autocommit = mode


def _begin_no_transactions(connection: Any) -> None:
    """Let the connection begin transactions only where it is told to, and commit where `commit` is called."""
    if getattr(connection, "autocommit", _LEGACY) != _LEGACY:
        connection.autocommit = True  # This ends the transaction that is always open when it is False.
        connection.autocommit = _LEGACY
    connection.isolation_level = None


class PostgresDriver(Driver):
    """PostgreSQL with psycopg 3."""

    now_ms = "CAST(EXTRACT(EPOCH FROM CLOCK_TIMESTAMP()) * 1000 AS BIGINT)"

    def parameter(self, name: str) -> str:
        """Return `%(name)s`."""
        return f"%({name})s"

    def begin(self, connection: Any) -> None:
        """Leave autocommit mode. The first statement begins the transaction."""
        connection.autocommit = False

    def commits_each_statement(self, connection: Any) -> bool:
        """Return True in autocommit mode without a transaction that was begun by a statement."""
        idle = 0  # PQTRANS_IDLE
        return bool(connection.autocommit) and connection.info.transaction_status == idle

    def has_rolled_back(self, error: BaseException, connection: Any, statement: str) -> bool:  # noqa: ARG002  # for the others
        """Return False: after an error, PostgreSQL refuses all that comes before a rollback."""
        return False

    @contextmanager
    def short_transaction(self, connection: Any, lock_wait_ms: int, *, writes: bool = True) -> Iterator[None]:  # noqa: ARG002
        """Run one transaction in READ COMMITTED, whatever the default is."""
        mode = connection.autocommit
        connection.rollback()
        connection.autocommit = False
        try:
            _execute(connection, "SET TRANSACTION ISOLATION LEVEL READ COMMITTED READ WRITE")
            _execute(connection, f"SET LOCAL lock_timeout = {lock_wait_ms}")
            yield
            connection.commit()
        except BaseException:
            with suppress(errors_of(connection).Error):
                connection.rollback()
            raise
        finally:
            with suppress(errors_of(connection).Error):
                connection.autocommit = mode


class MariaDbDriver(Driver):
    """MariaDB with PyMySQL. The tables must be InnoDB's, which is the default."""

    now_ms = "UNIX_TIMESTAMP() * 1000"

    def parameter(self, name: str) -> str:
        """Return `%(name)s`."""
        return f"%({name})s"

    def begin(self, connection: Any) -> None:
        """Leave autocommit mode, and begin. After a rollback in the block, no statement may commit by itself."""
        connection.autocommit(False)
        connection.begin()

    def commits_each_statement(self, connection: Any) -> bool:
        """Return True in autocommit mode without a transaction that was begun by a statement."""
        in_transaction = 1  # SERVER_STATUS_IN_TRANS
        return bool(connection.get_autocommit()) and not connection.server_status & in_transaction

    def has_rolled_back(self, error: BaseException, connection: Any, statement: str) -> bool:  # noqa: ARG002  # for SQLite
        """Return True after a deadlock, and after the other errors that InnoDB treats as one."""
        return bool(error.args) and error.args[0] in _ROLLED_BACK

    @contextmanager
    def short_transaction(self, connection: Any, lock_wait_ms: int, *, writes: bool = True) -> Iterator[None]:  # noqa: ARG002
        """Run one transaction in READ COMMITTED, whatever the default is."""
        connection.rollback()
        with connection.cursor() as cursor:
            # For a row, and for a table that another one changes or has locked, by default a day.
            cursor.execute("SELECT CAST(@@innodb_lock_wait_timeout AS CHAR) AS row_s, CAST(@@lock_wait_timeout AS CHAR) AS table_s")
            row_s, table_s = map(int, values_of(cursor.fetchone()))
            connection.rollback()
            limit_s = -(-lock_wait_ms // 1000)
            cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {limit_s}, lock_wait_timeout = {max(1, limit_s)}")
            try:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
                connection.begin()
                yield
                connection.commit()
            except BaseException:
                with suppress(Exception):  # A lost connection raises what is no DB-API error.
                    connection.rollback()
                raise
            finally:
                with suppress(Exception):
                    cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {row_s}, lock_wait_timeout = {table_s}")


_DRIVERS: dict[str, Driver] = {
    "sqlite3": SqliteDriver(),
    "aiosqlite": SqliteDriver(),
    "psycopg": PostgresDriver(),
    "pymysql": MariaDbDriver(),
}


def driver_of(connection: Any) -> Driver:
    """Return the driver of a DB-API connection.

    Raises:
        TypeError: the connection is none of `sqlite3`, aiosqlite, psycopg 3 and PyMySQL.
    """
    for kind in type(below(connection)).__mro__:
        found = _DRIVERS.get(kind.__module__.split(".", 1)[0])
        if found is not None:
            return found
    kind = type(below(connection))
    raise TypeError(
        f"{kind.__module__}.{kind.__qualname__} is no connection of sqlite3, aiosqlite, psycopg 3 or PyMySQL: use one of these drivers"
    )


def with_table(connection: Any, table: str, ddl: Iterable[str], lock_wait_ms: int, use: Callable[[], T]) -> T:
    """Return what `use` returns, after the table was created if it cannot be read.

    Args:
        connection: a DB-API connection without a transaction.
        table: the name of the table.
        ddl: the statements that create it. The right to create tables is needed only if it is missing.
        lock_wait_ms: as for `Driver.short_transaction`.
        use: runs its own transactions on the connection.

    Raises:
        Exception: of the driver, if the table is missing and cannot be created.
    """
    tries = 3  # Instances that start together may be in each other's way.
    while True:
        tries -= 1
        try:
            if not _can_read(connection, table, lock_wait_ms):
                _execute_shortly(connection, ddl, lock_wait_ms)
            return use()
        except errors_of(connection).Error:
            if not tries:
                raise


def _can_read(connection: Any, table: str, lock_wait_ms: int) -> bool:
    try:
        _execute_shortly(connection, [f"SELECT 1 FROM {table} WHERE 1 = 0"], lock_wait_ms, writes=False)
    except errors_of(connection).Error:
        return False
    return True


def _execute_shortly(connection: Any, statements: Iterable[str], lock_wait_ms: int, *, writes: bool = True) -> None:
    short = driver_of(connection).short_transaction(connection, lock_wait_ms, writes=writes)
    with short, closing(connection.cursor()) as cursor:
        for statement in statements:
            cursor.execute(statement)
