"""The table `halfway_transactions`: what is written, looked up, and cleaned up (docs/transactions.md)."""

import logging
import secrets
import time
from typing import Any

from halfway.clients.sql.drivers import Driver, values_of
from halfway.schemas.headers import LocalTransactionState

log = logging.getLogger(__name__)

TABLE = "halfway_transactions"
DDL = (
    f"CREATE TABLE IF NOT EXISTS {TABLE} (id VARCHAR(32) NOT NULL PRIMARY KEY, state VARCHAR(8) NOT NULL, born_at_ms BIGINT NOT NULL)",
    f"CREATE INDEX IF NOT EXISTS {TABLE}_born_at_ms ON {TABLE} (born_at_ms)",
)
"""Creates the table in SQLite, PostgreSQL and MariaDB. Repeating it changes nothing."""

_CLEANED = "cleaned"
"""The id of the row whose `born_at_ms` says how far the table is cleaned up. No transaction has it."""
_DATABASE = "database"
"""The id of the row whose `born_at_ms` tells this database from those of other services. No clean-up deletes it."""
_NEVER_MS = 1 << 62
_LONGEST_CLEAN_UP = 1000
_MOST_APART_MS = 3_600_000


class TransactionTable:
    """The table as one DB-API connection sees it, inside the transaction that the connection is in."""

    def __init__(self, driver: Driver, connection: Any) -> None:
        """Use the connection. Begins and ends no transaction."""
        self._connection = connection
        row_id, state, born = (driver.parameter(name) for name in ("id", "state", "born_at_ms"))
        self._select_now = f"SELECT {driver.now_ms}"
        self._select = f"SELECT state FROM {TABLE} WHERE id = {row_id}"
        self._select_born = f"SELECT born_at_ms FROM {TABLE} WHERE id = {row_id}"
        later = f"CASE WHEN {born} > {driver.now_ms} THEN {born} ELSE {driver.now_ms} END"
        self._insert = f"INSERT INTO {TABLE} (id, state, born_at_ms) VALUES ({row_id}, {state}, {later})"
        self._insert_note = f"INSERT INTO {TABLE} (id, state, born_at_ms) VALUES ({row_id}, {state}, {born})"
        self._update = f"UPDATE {TABLE} SET born_at_ms = {born} WHERE id = {row_id} AND born_at_ms < {born}"
        older = f"FROM {TABLE} WHERE born_at_ms < {born} AND id <> {row_id}"
        self._nth_older = f"SELECT born_at_ms {older} ORDER BY born_at_ms LIMIT 1 OFFSET {_LONGEST_CLEAN_UP}"
        self._delete_older = f"DELETE {older}"

    def insert(self, transaction_id: str, state: LocalTransactionState, born_at_ms: int) -> None:
        """Take the id's place. If a running transaction has taken it, wait for that transaction.

        The row is born now by the database's clock, or later if `born_at_ms` is: it is kept for its time although the
        clock of an instance is days off.

        Raises:
            IntegrityError: of the driver; a transaction that is committed has taken the place.
        """
        self._run(self._insert, id=transaction_id, state=str(state), born_at_ms=born_at_ms)

    def state_of(self, transaction_id: str) -> LocalTransactionState | None:
        """Return how a transaction ended; None if its place is free."""
        row = self._first(self._select, id=transaction_id)
        return LocalTransactionState(row[0]) if row else None

    def cleaned_before_ms(self) -> int:
        """Return until when rows may be missing because they were cleaned up: those that are born before."""
        row = self._first(self._select_born, id=_CLEANED)
        return int(row[0]) if row else 0

    def mark(self) -> str:
        """Return the 8 hexadecimal digits with which the ids of this database's transactions begin. Set them once.

        Raises:
            IntegrityError: of the driver; another instance has set it since we looked.
        """
        mark = self.stored_mark()
        if mark is None:
            number = secrets.randbits(32)
            self._note(_DATABASE, _NEVER_MS + number)
            mark = f"{number:08x}"
        return mark

    def stored_mark(self) -> str | None:
        """Return what `mark` returns; None if it is not set."""
        row = self._first(self._select_born, id=_DATABASE)
        return None if row is None else f"{int(row[0]) - _NEVER_MS:08x}"

    def clean_up(self, retention_s: int) -> None:
        """Delete the oldest rows of more than this age, about a thousand, and note how far the table is cleaned.

        Both are one transaction. The note comes first, so that two instances clean up one after the other. The clock is
        the database's: that of one instance might be days ahead, and end the rows of all. So might the database's own:
        where the two are an hour apart, nothing is deleted.
        """
        [now_ms] = self._first(self._select_now) or [0]
        ahead_ms = int(now_ms) - time.time_ns() // 1_000_000
        if abs(ahead_ms) > _MOST_APART_MS:
            log.warning("event=clean_up_put_off database_clock_ahead_s=%d", ahead_ms // 1000)
            return
        born_before_ms = int(now_ms) - retention_s * 1000
        nth = self._first(self._nth_older, born_at_ms=born_before_ms, id=_CLEANED)
        before_ms = int(nth[0]) + 1 if nth else born_before_ms
        if self.state_of(_CLEANED) is None:
            self._note(_CLEANED, before_ms)
        # Another instance may have come further since; this waits for it, and must not go back.
        self._run(self._update, id=_CLEANED, born_at_ms=before_ms)
        self._run(self._delete_older, id=_CLEANED, born_at_ms=before_ms)

    def _note(self, row_id: str, number: int) -> None:
        self._run(self._insert_note, id=row_id, state=str(LocalTransactionState.UNKNOWN), born_at_ms=number)

    def _first(self, statement: str, **values: object) -> list[Any] | None:
        cursor = self._run(statement, **values)
        try:
            row = cursor.fetchone()
        finally:
            cursor.close()
        return None if row is None else values_of(row)

    def _run(self, statement: str, **values: object) -> Any:
        cursor = self._connection.cursor()
        cursor.execute(statement, values)
        return cursor
