"""A listener written by hand, for data that `SqlTransactions` cannot hold: here an order service on SQLite.

One local transaction writes the order and the transaction's id. A check looks the id up. If it finds none, it inserts
the id as rolled back: a local transaction that is still running then cannot commit, because its id is taken.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from halfway import CheckRequest, HalfMessage, LocalTransactionState

SCHEMA = """
CREATE TABLE IF NOT EXISTS orders (
    transaction_id TEXT PRIMARY KEY,
    item TEXT NOT NULL,
    quantity INTEGER NOT NULL CHECK (quantity BETWEEN 1 AND 100)
);
CREATE TABLE IF NOT EXISTS transactions (id TEXT PRIMARY KEY, state TEXT NOT NULL);
"""


class Order(NamedTuple):
    """A customer's order."""

    item: str
    quantity: int


class Database:
    """The service's tables. Each use opens its own connection, so threads and processes may share the file."""

    def __init__(self, path: Path) -> None:
        """Open the database at `path`, or create it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        with self._connection() as database:
            database.executescript(SCHEMA)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run one transaction: commit it at the end, or roll it back if anything is raised. Other transactions wait."""
        with self._connection() as database:
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
                database.execute("COMMIT")
            except BaseException:
                database.execute("ROLLBACK")
                raise

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        database = sqlite3.connect(self._path, timeout=30, isolation_level=None)
        try:
            yield database
        finally:
            database.close()


class Orders:
    """Writes orders, and tells of each transaction whether its order was written."""

    def __init__(self, database: Database) -> None:
        """Write to `database`."""
        self._database = database

    def execute_local_transaction(self, message: HalfMessage, order: Order) -> LocalTransactionState:
        """Write the order; a constraint that refuses it rolls both back."""
        try:
            with self._database.transaction() as database:
                database.execute("INSERT INTO transactions VALUES (?, 'COMMIT')", (message.transaction_id,))
                database.execute("INSERT INTO orders VALUES (?, ?, ?)", (message.transaction_id, *order))
        except sqlite3.IntegrityError:
            return self._state_of(message.transaction_id)  # If the message is resent, its order may be there.
        return LocalTransactionState.COMMIT

    def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState:
        """Look the transaction up."""
        return self._state_of(message.transaction_id)

    def _state_of(self, transaction_id: str) -> LocalTransactionState:
        """Return how the transaction ended. One that has not ended cannot commit after this."""
        with self._database.transaction() as database:
            database.execute("INSERT INTO transactions VALUES (?, 'ROLLBACK') ON CONFLICT DO NOTHING", (transaction_id,))
            [(state,)] = database.execute("SELECT state FROM transactions WHERE id = ?", (transaction_id,))
        return LocalTransactionState(state)
