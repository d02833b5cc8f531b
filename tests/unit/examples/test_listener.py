"""The listener's local transactions: one outcome for each, whether the order or the check is first."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from examples.listener import Database, Order, Orders
from halfway import CheckRequest, HalfMessage, LocalTransactionState

COMMIT, ROLLBACK = LocalTransactionState.COMMIT, LocalTransactionState.ROLLBACK


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "orders.db")


def half(name: str) -> HalfMessage:
    return HalfMessage(transaction_id=name, topic="orders", body=b"", producer_group="g")


def check(name: str) -> CheckRequest:
    return CheckRequest(transaction_id=name, topic="orders", body=b"", producer_group="g", check_times=1, check_id=f"{name}:0.0:1")


def placed(database: Database) -> list[tuple[str, str, int]]:
    with database.transaction() as rows:
        return rows.execute("SELECT * FROM orders ORDER BY 1").fetchall()


def test_an_order_is_written_and_its_check_commits(database: Database) -> None:
    orders = Orders(database)
    assert orders.execute_local_transaction(half("a"), Order("pears", 2)) is COMMIT
    assert placed(database) == [("a", "pears", 2)]
    assert orders.check_local_transaction(check("a")) is orders.check_local_transaction(check("a")) is COMMIT


def test_an_order_that_the_table_refuses_leaves_nothing(database: Database) -> None:
    orders = Orders(database)
    assert orders.execute_local_transaction(half("a"), Order("pears", 101)) is ROLLBACK
    assert placed(database) == []
    assert orders.check_local_transaction(check("a")) is ROLLBACK


def test_a_check_that_is_first_prevents_the_order(database: Database) -> None:
    orders = Orders(database)
    assert orders.check_local_transaction(check("a")) is ROLLBACK
    assert orders.execute_local_transaction(half("a"), Order("pears", 2)) is ROLLBACK
    assert placed(database) == []


def test_a_message_that_is_resent_commits_with_the_order_that_is_there(database: Database) -> None:
    """Its COMMIT was lost, and the message discarded: a ROLLBACK would leave the order without its message for good."""
    orders = Orders(database)
    assert orders.execute_local_transaction(half("a"), Order("pears", 2)) is COMMIT
    assert orders.execute_local_transaction(half("a"), Order("pears", 2)) is COMMIT
    assert placed(database) == [("a", "pears", 2)]


def test_order_and_check_at_the_same_time_agree(database: Database) -> None:
    orders, rounds = Orders(database), 40
    start = threading.Barrier(2)

    def place(name: str) -> LocalTransactionState:
        start.wait(30)
        return orders.execute_local_transaction(half(name), Order("pears", 1))

    def ask(name: str) -> LocalTransactionState:
        start.wait(30)
        return orders.check_local_transaction(check(name))

    with ThreadPoolExecutor(2) as pool:
        for number in range(rounds):
            both = pool.submit(place, f"t{number}"), pool.submit(ask, f"t{number}")
            said, asked = (future.result(30) for future in both)
            assert said is asked
            assert (f"t{number}" in [row[0] for row in placed(database)]) is (said is COMMIT)
