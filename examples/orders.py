"""An order service on SQLite: the order in its database and the message about it, both or neither, wherever it crashes.

python -m examples.orders place apples --quantity 3
python -m examples.orders place pears --crash after-commit     # dies with the order written and nothing said of it
python -m examples.orders serve                                # is asked, looks it up, and the message arrives
"""

import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from halfway import CheckRequest, HalfMessage, LocalTransactionState, TransactionProducer
from halfway.pipelines.cli.options import HalfwayGroup
from halfway.pipelines.local.command_settings import command_settings
from halfway.pipelines.runtime.paths import home

GROUP = "order-service"
CRASHED = 9
SCHEMA = """
CREATE TABLE IF NOT EXISTS orders (
    transaction_id TEXT PRIMARY KEY,
    item TEXT NOT NULL,
    quantity INTEGER NOT NULL CHECK (quantity BETWEEN 1 AND 100)
);
CREATE TABLE IF NOT EXISTS transactions (id TEXT PRIMARY KEY, state TEXT NOT NULL);
"""


class Crash(StrEnum):
    """Where to die, to see that it does no harm."""

    BEFORE_COMMIT = "before-commit"
    AFTER_COMMIT = "after-commit"


class Order(NamedTuple):
    """What a customer wants."""

    item: str
    quantity: int


class Database:
    """The service's own tables; every use is one transaction in a connection of its own, so that threads and processes may share it."""

    def __init__(self, path: Path) -> None:
        """Open, or make, the database at `path`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        with self._connection() as database:
            database.executescript(SCHEMA)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run one transaction: committed at the end, rolled back if anything is raised. Others wait until it is over."""
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
    """The listener: writes orders, and knows of each whether it was written.

    The transaction's id is written with the order, in one local transaction, and is what a check looks up. Where it is not there, the
    check writes it as rolled back: a local transaction that is still on its way cannot commit any more, since its id is taken.
    """

    def __init__(self, database: Database, crash: Crash | None = None) -> None:
        """Work on `database`, and die where `crash` says."""
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
    """Shows what it answers, and counts the transactions that it was asked about."""

    def __init__(self, database: Database) -> None:
        """Begin with none."""
        super().__init__(database)
        self.asked: set[str] = set()
        self.changed = threading.Condition()

    def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState:
        """Look the transaction up; the same one may be asked about again."""
        state = super().check_local_transaction(message)
        typer.echo(f"asked about {message.transaction_id}: {state}")
        with self.changed:
            self.asked.add(message.transaction_id)
            self.changed.notify_all()
        return state


app = typer.Typer(cls=HalfwayGroup, no_args_is_help=True, add_completion=False, help="An order service on SQLite.")
DatabaseOption = Annotated[
    Path, typer.Option("--database", default_factory=lambda: home() / "orders.db", help="The service's own database.", show_default=False)
]


def producer(orders: Orders) -> TransactionProducer:
    """Return the producer, with the settings that the commands have: conf/local.yaml, the environment, the local broker."""
    return TransactionProducer(command_settings(None, None).kafka, GROUP, orders)


@app.command()
def place(
    item: str,
    database: DatabaseOption,
    quantity: Annotated[int, typer.Option(help="More than 100 is refused by the table.")] = 1,
    crash: Annotated[Crash | None, typer.Option(help="Die in the local transaction, or right after it.")] = None,
) -> None:
    """Place an order."""
    order = Order(item, quantity)
    with producer(Orders(Database(database), crash)) as sender:
        result = sender.send_in_transaction("orders", json.dumps(order._asdict()).encode(), tags="placed", arg=order)
    typer.echo(f"{result.transaction_id}: {result.state}")


@app.command()
def serve(
    database: DatabaseOption,
    until: Annotated[int | None, typer.Option(min=1, help="End when so many transactions were asked about.")] = None,
) -> None:
    """Answer checks, until Ctrl-C."""
    orders = CountedOrders(Database(database))
    with producer(orders), orders.changed:
        orders.changed.wait_for(lambda: len(orders.asked) == until)


@app.command("list")
def list_orders(database: DatabaseOption) -> None:
    """List the orders that were placed."""
    with Database(database).transaction() as rows:
        for transaction_id, item, quantity in rows.execute("SELECT transaction_id, item, quantity FROM orders ORDER BY rowid"):
            typer.echo(f"{transaction_id} {quantity} {item}")


if __name__ == "__main__":
    app()
