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
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from halfway import CheckRequest, HalfwayError, LocalTransactionState, SqlTransactions, TransactionProducer
from halfway.pipelines.local.command_settings import command_settings

GROUP = "orders-example"
CRASHED = 9
DATABASE = Path(os.environ.get("HALFWAY_HOME") or ".halfway", "orders.db")
SCHEMA = "CREATE TABLE IF NOT EXISTS orders (item TEXT NOT NULL, quantity INTEGER NOT NULL CHECK (quantity BETWEEN 1 AND 100))"


class Crash(StrEnum):
    """The places where the service can be told to die."""

    BEFORE_COMMIT = "before-commit"
    AFTER_COMMIT = "after-commit"


def place_order(producer: TransactionProducer, item: str, quantity: int) -> str:
    """Write an order and publish it, both or neither. Return the id of its transaction."""
    with producer.transaction() as tx:
        tx.execute("INSERT INTO orders VALUES (?, ?)", (item, quantity))
        tx.send("orders", json.dumps({"item": item, "quantity": quantity}).encode(), tags="placed")
    return tx.transaction_id


class MortalConnection(sqlite3.Connection):
    """A connection whose process dies when it commits an order."""

    crash: Crash | None = None

    def commit(self) -> None:
        """Commit, and die before or after it."""
        if self.crash is Crash.BEFORE_COMMIT:
            os._exit(CRASHED)
        super().commit()
        if self.crash is Crash.AFTER_COMMIT:
            os._exit(CRASHED)


class CountedTransactions(SqlTransactions):
    """Prints each answer to a check, and counts the messages that were checked."""

    def __init__(self, path: Path, crash: Crash | None = None) -> None:
        """Use the database at `path`, and die at `crash`."""
        MortalConnection.crash = crash
        super().__init__(lambda: sqlite3.connect(path, timeout=30, factory=MortalConnection))
        self.asked: set[str] = set()
        self.changed = threading.Condition()

    def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState:
        """Look the transaction up. The same one may be checked several times."""
        state = super().check_local_transaction(message)
        typer.echo(f"asked about {message.transaction_id}, {message.body.decode()}: {state}")
        with self.changed:
            self.asked.add(message.transaction_id)
            self.changed.notify_all()
        return state


app = typer.Typer(no_args_is_help=True, add_completion=False, help="An order service on SQLite.")
DatabaseOption = Annotated[Path, typer.Option(help="The service's own database.")]


def open_database(path: Path) -> sqlite3.Connection:
    """Open the service's database, or create it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(path, timeout=30)
    database.execute(SCHEMA)
    return database


def producer_for(transactions: SqlTransactions) -> TransactionProducer:
    """Return the service's producer.

    This example uses the settings of Halfway's own commands, which find the local development broker. In a service of
    your own, call `halfway.load_settings(path)` instead.
    """
    return TransactionProducer(command_settings(None, None).kafka, GROUP, transactions)


@app.command()
def place(
    item: str,
    quantity: Annotated[int, typer.Option(help="The table refuses more than 100.")] = 1,
    crash: Annotated[Crash | None, typer.Option(help="Die before the order is committed, or right after it.")] = None,
    database: DatabaseOption = DATABASE,
) -> None:
    """Place an order."""
    open_database(database).close()
    with producer_for(CountedTransactions(database, crash)) as producer:
        try:
            typer.echo(f"{place_order(producer, item, quantity)}: {LocalTransactionState.COMMIT}")
        except sqlite3.IntegrityError as error:
            typer.echo(f"refused: {error}")


@app.command()
def serve(
    until: Annotated[int | None, typer.Option(min=1, help="End after this many messages were checked.")] = None,
    database: DatabaseOption = DATABASE,
) -> None:
    """Answer checks until Ctrl-C."""
    open_database(database).close()
    transactions = CountedTransactions(database)
    with producer_for(transactions), transactions.changed:
        transactions.changed.wait_for(lambda: len(transactions.asked) == until)


@app.command("list")
def list_orders(database: DatabaseOption = DATABASE) -> None:
    """List the orders that were placed."""
    with closing(open_database(database)) as rows:
        for number, item, quantity in rows.execute("SELECT rowid, item, quantity FROM orders ORDER BY rowid"):
            typer.echo(f"{number} {quantity} {item}")


if __name__ == "__main__":
    try:
        app()
    except HalfwayError as error:
        sys.exit(f"error: {error}")
