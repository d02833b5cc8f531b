"""A service's database in a test: its orders, its transactions, and what a producer would have sent to Kafka."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple, cast

import sqlalchemy
from confluent_kafka import KafkaError

from halfway.clients.group_records import GroupRecords
from halfway.clients.kafka.sender import Sender
from halfway.clients.sql.sql_transactions import SqlTransactions
from halfway.clients.transaction import LocalTransaction
from halfway.schemas.records import Record
from halfway.schemas.settings import KafkaSettings

KAFKA = KafkaSettings(bootstrap_servers="127.0.0.1:1")


class Sent(NamedTuple):
    """The report of librdkafka on a record."""

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return 7

    def timestamp(self) -> tuple[int, int]:
        return 2, 1_000


class FakeSender:
    """Takes records as Kafka would. A test may let halves fail, or do something before one is acknowledged."""

    def __init__(self) -> None:
        self.halves: list[str] = []
        self.ops: list[tuple[str, str]] = []
        self.failures: dict[int, int] = {}
        """Number of the half → the code of its error."""
        self.before_half: Callable[[], object] = lambda: None

    def send(self, topic: str, record: Record, on_delivery: Callable[[KafkaError | None, Any], None]) -> None:
        key = (record.key or b"").decode()
        if topic == KAFKA.op_topic:
            self.ops.append((key, dict(record.headers)["ACTION"].decode()))
            on_delivery(None, Sent())
            return
        self.before_half()
        code = self.failures.get(len(self.halves))
        self.halves.append(key)
        on_delivery(None if code is None else KafkaError(code), Sent())

    def explain(self, _: str, error: KafkaError) -> str:
        return str(error)

    def as_sender(self) -> Sender:
        return cast(Sender, self)

    def actions(self) -> list[str]:
        return [action for _, action in self.ops]


class SqlWorld:
    """One way to reach one database, with an empty table of orders.

    Args:
        kind: sqlite, postgresql or mariadb.
        given: what the service gives to `SqlTransactions`.
        connect: makes a DB-API connection for the test itself.
    """

    def __init__(self, kind: str, given: Any, connect: Callable[[], Any]) -> None:
        self.kind, self.given, self.connect = kind, given, connect
        self.outbox = SqlTransactions(given, lock_wait_ms=1000)
        self.sender = FakeSender()
        self.records = GroupRecords(KAFKA, "shop", send_timeout_ms=1000, max_body_bytes=1000)
        for statement in (
            "DROP TABLE IF EXISTS halfway_transactions",
            "DROP TABLE IF EXISTS orders",
            "CREATE TABLE orders (item VARCHAR(40))",
        ):
            self.run(statement)

    def run(self, statement: str) -> list[Any]:
        """Execute a statement on a connection of its own, and commit it."""
        with closing(self.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(statement)
            rows = list(cursor.fetchall()) if cursor.description else []
            connection.commit()
        return rows

    def orders(self) -> list[str]:
        return sorted(item for (item,) in self.run("SELECT item FROM orders"))

    def rows(self) -> dict[str, str]:
        """Return id → state of the transactions."""
        return dict(tuple(row) for row in self.run("SELECT id, state FROM halfway_transactions WHERE id NOT IN ('cleaned', 'database')"))

    def begin(self, using: Any = None) -> LocalTransaction:
        sender = self.sender.as_sender()
        return LocalTransaction(self.outbox, using, self.records, sender, partial(self.records.store_halves, sender))

    def order(self, transaction: LocalTransaction, item: str, messages: int = 1) -> None:
        """Write an order, and add its messages."""
        transaction.execute(_statement(transaction, f"INSERT INTO orders VALUES ('{item}')"))
        for _ in range(messages):
            transaction.send("orders", item.encode())


def _statement(transaction: LocalTransaction, text: str) -> Any:
    if type(transaction.connection).__module__.startswith("sqlalchemy"):
        return sqlalchemy.text(text)
    return text
