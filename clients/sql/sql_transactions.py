"""Answers the checks of a service from a table in its own database, and writes that table with its business data."""

import logging
import secrets
import threading
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar, cast

from halfway.clients.messages import CheckRequest
from halfway.clients.sql.databases import database_of
from halfway.clients.sql.drivers import driver_of, errors_of, with_table
from halfway.clients.sql.session_hook import SessionHook
from halfway.clients.sql.transaction_table import DDL, TABLE, TransactionTable
from halfway.clients.transaction import DatabaseTransaction, LocalTransaction, TransactionSource, transaction_of, unscoped
from halfway.schemas.errors import SharedGroupError
from halfway.schemas.headers import LocalTransactionState
from halfway.schemas.records import type_of

log = logging.getLogger(__name__)

T = TypeVar("T")

WEEK_S = 7 * 24 * 3600
_CLEAN_UP_EVERY = 100


class SqlTransactions:
    """The transactions of a service in its own database. A `TransactionProducer` takes it in place of a listener.

    Each transaction that sends messages has one row in the table `halfway_transactions`, which commits with the
    business data. Checks are answered from that row, by any instance (docs/transactions.md). The table is made on first
    use if it is missing; `ddl` returns the statements for a migration of your own.

    Args:
        database: a SQLAlchemy `Engine`; `django.db.connections["default"]`; or a function without arguments that
            returns a new DB-API connection of sqlite3, psycopg 3 or PyMySQL.
        lock_wait_ms: how long a check waits for a transaction that is still running. After it the answer is UNKNOWN,
            and the job asks again. MariaDB counts in seconds.
        retention_s: after how long a row may be deleted. Longer than the job's `half_retention`, and than the longest
            time that the job stands still. Older transactions are never guessed: the answer is UNKNOWN.

    Raises:
        TypeError: `database` is none of these.
        ValueError: a number is too small.

    Example:
        producer = TransactionProducer(settings.kafka, "order-service", SqlTransactions(engine))
        with producer.transaction() as tx:
            tx.execute(insert(orders).values(item="apples"))
            tx.send("orders", body)
    """

    def __init__(self, database: Any, *, lock_wait_ms: int = 1000, retention_s: int = WEEK_S) -> None:
        """Store the configuration. Does not connect."""
        if lock_wait_ms < 1 or retention_s < 1:
            raise ValueError("lock_wait_ms and retention_s must be at least 1")
        self._database = database_of(database)
        self._lock_wait_ms, self._retention_s = lock_wait_ms, retention_s
        self._lock = threading.Lock()
        self._mark: str | None = None
        self._ended = 0

    @staticmethod
    def ddl() -> tuple[str, ...]:
        """Return the statements that create the table in SQLite, PostgreSQL and MariaDB, for your migrations."""
        return DDL

    def create_table(self) -> None:
        """Create the table if it is missing. Needs the right to create tables only then.

        Raises:
            Exception: of the driver, if the table is missing and cannot be created.
        """
        with self._database.idle_connection() as connection:
            self._mark = with_table(connection, TABLE, DDL, self._lock_wait_ms, partial(self._read_mark, connection))

    def begin(self, using: Any = None) -> DatabaseTransaction:
        """Begin a database transaction. `TransactionProducer.transaction` calls it.

        Args:
            using: a SQLAlchemy `Session` or `Connection` to use its transaction; None for a new one.
        """
        self._known_mark()
        return self._database.begin(using)

    def new_id(self) -> str:
        """Return the id of a new transaction: the database's mark, and 96 random bits."""
        return f"{self._known_mark()}{secrets.token_hex(12)}"

    def on_commit(self, session: Any, producer: Hashable, make: Callable[[TransactionSource], LocalTransaction]) -> LocalTransaction:
        """Return the block of a SQLAlchemy session's transaction. `TransactionProducer.on_commit` calls it.

        Raises:
            TypeError: it is no session, or it is in a savepoint.
        """
        session = unscoped(session)
        if not hasattr(session, "in_nested_transaction") or not hasattr(session, "info"):
            raise TypeError(f"{type_of(session)} is no Session of SQLAlchemy: use a block, `with producer.transaction() as tx`")
        self._known_mark()
        hook: SessionHook | None = session.info.get(producer)
        if hook is None or hook.session is not session:  # another session may have been made with the same `info`
            hook = session.info[producer] = SessionHook(session, self)
        return hook.block(make)

    def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState:
        """Answer a check from the table alone.

        A transaction without a row can never commit after this has returned ROLLBACK, because its place is taken.

        Returns:
            UNKNOWN also for a message whose row may have been deleted.

        Raises:
            SharedGroupError: the message is not of this database. Another service uses the same group, or another kind
                of client has sent it. The producer answers UNKNOWN.
            Exception: of the driver, if the place is locked for too long or the database cannot be reached. The
                producer answers UNKNOWN.
        """
        transaction_id = transaction_of(message.transaction_id)
        state = None
        if transaction_id is not None and message.born_at_ms is not None:
            state = self._find_out(transaction_id, message.born_at_ms)
        if state is None:
            raise SharedGroupError(
                f"transaction {message.transaction_id!r} is not of this service's database, so that it cannot be answered here: another "
                f"service has the producer group {message.producer_group!r} too, or the table {TABLE} was recreated. Give each "
                "service a group of its own"
            )
        return state

    def outcome_of(self, transaction_id: str, born_at_ms: int) -> LocalTransactionState:
        """Return how a transaction ended. If that is open, end it: take its place, so that it cannot commit.

        Args:
            transaction_id: the transaction's own id, 32 hexadecimal digits.
            born_at_ms: when it began, in ms since 1970 UTC.

        Returns:
            COMMIT, ROLLBACK, or UNKNOWN if its row may have been deleted, or the table was recreated.

        Raises:
            Exception: of the driver, if the place is locked for too long or the database cannot be reached.
        """
        return self._find_out(transaction_id, born_at_ms) or LocalTransactionState.UNKNOWN

    def _find_out(self, transaction_id: str, born_at_ms: int) -> LocalTransactionState | None:
        """Return how a transaction ended; None if it is not of this table."""
        self._known_mark()
        with self._database.idle_connection() as connection:
            return self._look(connection, partial(self._decide, transaction_id, born_at_ms))

    def clean_up(self, using: Any = None) -> None:
        """Delete up to about a thousand old rows, at the first call and each hundredth after. Failing does no harm.

        Args:
            using: what the block that has just ended was given.
        """
        with self._lock:
            self._ended += 1
            if self._ended % _CLEAN_UP_EVERY != 1:
                return
        try:
            with self._database.idle_connection(using) as connection:
                driver = driver_of(connection)
                with driver.short_transaction(connection, self._lock_wait_ms):
                    TransactionTable(driver, connection).clean_up(self._retention_s)
        except Exception as error:
            log.warning("event=clean_up_failed error=%s", type(error).__name__)

    def _read_mark(self, connection: Any) -> str:
        driver = driver_of(connection)
        with driver.short_transaction(connection, self._lock_wait_ms, writes=False):
            mark = TransactionTable(driver, connection).stored_mark()
        return mark or self._look(connection, TransactionTable.mark)

    def _look(self, connection: Any, look: Callable[[TransactionTable], T]) -> T:
        """Look into the table, and once more if a place was taken between looking and inserting."""
        driver = driver_of(connection)
        table = TransactionTable(driver, connection)
        try:
            with driver.short_transaction(connection, self._lock_wait_ms):
                return look(table)
        except errors_of(connection).IntegrityError:
            with driver.short_transaction(connection, self._lock_wait_ms):
                return look(table)

    @staticmethod
    def _decide(transaction_id: str, born_at_ms: int, table: TransactionTable) -> LocalTransactionState | None:
        state = table.state_of(transaction_id)
        if state is None and not transaction_id.startswith(table.mark()):  # Not the mark we know: the table may be a new one.
            return None
        if state is None and born_at_ms < table.cleaned_before_ms():
            log.warning("event=transaction_forgotten transaction_id=%r", transaction_id)
            state = LocalTransactionState.UNKNOWN
        if state is None:
            state = LocalTransactionState.ROLLBACK
            table.insert(transaction_id, state, born_at_ms)
        return state

    def _known_mark(self) -> str:
        """Return the database's mark. The first call makes sure that the table is there."""
        if self._mark is None:
            self.create_table()
        return cast(str, self._mark)
