"""An order service on SQLite. It writes an order and publishes a message, both or neither, wherever it crashes.

python -m examples.orders place apples --quantity 3
python -m examples.orders place pears --crash after-commit     # dies after the order is written, before the op is sent
python -m examples.orders serve                                # answers the check, and the message is committed
"""

import json
import os
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from halfway import CheckRequest, HalfMessage, HalfwayError, LocalTransactionState, TransactionProducer
from halfway.pipelines.local.command_settings import command_settings

GROUP = "order-service"
CRASHED = 9
DATABASE = Path(os.environ.get("HALFWAY_HOME") or ".halfway", "orders.db")
SCHEMA = """
CREATE TABLE IF NOT EXISTS orders (
    transaction_id TEXT PRIMARY KEY,
    item TEXT NOT NULL,
    quantity INTEGER NOT NULL CHECK (quantity BETWEEN 1 AND 100)
);
CREATE TABLE IF NOT EXISTS transactions (id TEXT PRIMARY KEY, state TEXT NOT NULL);
"""


class Crash(StrEnum):
    """The places where the service can be told to die."""

    BEFORE_COMMIT = "before-commit"
    AFTER_COMMIT = "after-commit"


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
    """The listener: writes orders, and tells of each transaction whether its order was written.

    One local transaction writes the order and the transaction's id. A check looks the id up. If it finds none, it
    inserts the id as rolled back: a local transaction that is still running then cannot commit, as its id is taken.
    """

    def __init__(self, database: Database, crash: Crash | None = None) -> None:
        """Write to `database`, and die at `crash`."""
        self._database, self._crash = database, crash

    def execute_local_transaction(self, message: HalfMessage, order: Order) -> LocalTransactionState:
        """Write the order; a constraint that refuses it rolls both back."""
        try:
            with self._database.transaction() as database:
                database.execute("INSERT INTO transactions VALUES (?, 'COMMIT')", (message.transaction_id,))
                database.execute("INSERT INTO orders VALUES (?, ?, ?)", (message.transaction_id, *order))
                self._die_if(Crash.BEFORE_COMMIT)
        except sqlite3.IntegrityError:
            return LocalTransactionState.ROLLBACK
        self._die_if(Crash.AFTER_COMMIT)
        return LocalTransactionState.COMMIT

    def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState:
        """Look the transaction up."""
        with self._database.transaction() as database:
            database.execute("INSERT INTO transactions VALUES (?, 'ROLLBACK') ON CONFLICT DO NOTHING", (message.transaction_id,))
            [(state,)] = database.execute("SELECT state FROM transactions WHERE id = ?", (message.transaction_id,))
        return LocalTransactionState(state)

    def _die_if(self, place: Crash) -> None:
        if self._crash is place:
            os._exit(CRASHED)


class CountedOrders(Orders):
    """Prints each answer to a check, and counts the transactions that were checked."""

    def __init__(self, database: Database) -> None:
        """Start at zero."""
        super().__init__(database)
        self.asked: set[str] = set()
        self.changed = threading.Condition()

    def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState:
        """Look the transaction up. The same one may be checked several times."""
        state = super().check_local_transaction(message)
        typer.echo(f"asked about {message.transaction_id}: {state}")
        with self.changed:
            self.asked.add(message.transaction_id)
            self.changed.notify_all()
        return state


app = typer.Typer(no_args_is_help=True, add_completion=False, help="An order service on SQLite.")
DatabaseOption = Annotated[Path, typer.Option(help="The service's own database.")]


def producer_for(orders: Orders) -> TransactionProducer:
    """Return the service's producer.

    This example uses the settings of Halfway's own commands, which find the local development broker. In a service of
    your own, call `halfway.load_settings(path)` instead.
    """
    return TransactionProducer(command_settings(None, None).kafka, GROUP, orders)


@app.command()
def place(
    item: str,
    quantity: Annotated[int, typer.Option(help="The table refuses more than 100.")] = 1,
    crash: Annotated[Crash | None, typer.Option(help="Die in the local transaction, or right after it.")] = None,
    database: DatabaseOption = DATABASE,
) -> None:
    """Place an order."""
    order = Order(item, quantity)
    with producer_for(Orders(Database(database), crash)) as producer:
        result = producer.send_in_transaction("orders", json.dumps(order._asdict()).encode(), tags="placed", arg=order)
    typer.echo(f"{result.transaction_id}: {result.state}")


@app.command()
def serve(
    until: Annotated[int | None, typer.Option(min=1, help="End after this many transactions were checked.")] = None,
    database: DatabaseOption = DATABASE,
) -> None:
    """Answer checks until Ctrl-C."""
    orders = CountedOrders(Database(database))
    with producer_for(orders), orders.changed:
        orders.changed.wait_for(lambda: len(orders.asked) == until)


@app.command("list")
def list_orders(database: DatabaseOption = DATABASE) -> None:
    """List the orders that were placed."""
    with Database(database).transaction() as rows:
        for transaction_id, item, quantity in rows.execute("SELECT transaction_id, item, quantity FROM orders ORDER BY rowid"):
            typer.echo(f"{transaction_id} {quantity} {item}")


if __name__ == "__main__":
    try:
        app()
    except HalfwayError as error:
        sys.exit(f"error: {error}")
