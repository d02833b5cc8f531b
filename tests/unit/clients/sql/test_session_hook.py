"""`session.commit()` sends the messages of its transaction: order and message, both or neither, without a block."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy.orm import Session

from halfway import RolledBackError, SendError, SqlTransactions
from halfway.testing import InMemoryHalfway, InMemoryProducer, in_memory_halfway


class Shop:
    """A service whose sessions are committed elsewhere."""

    def __init__(self, halfway: InMemoryHalfway, file: Path) -> None:
        self.halfway, self.file = halfway, file
        self.engine = sqlalchemy.create_engine(f"sqlite:///{file}")
        self.outbox = SqlTransactions(self.engine)
        self.outbox.create_table()
        self.producer: InMemoryProducer = halfway.producer(self.outbox)
        with sqlite3.connect(file) as database:
            database.execute("CREATE TABLE orders (item TEXT)")

    def order(self, session: Session, item: str) -> str:
        session.execute(sqlalchemy.text("INSERT INTO orders VALUES (:item)"), {"item": item})
        return self.producer.on_commit(session).send("orders", item.encode())

    def orders(self) -> list[str]:
        with sqlite3.connect(self.file) as database:
            return [item for (item,) in database.execute("SELECT item FROM orders ORDER BY rowid")]

    def messages(self) -> list[str]:
        return [message.body.decode() for message in self.halfway.messages()]


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with in_memory_halfway() as halfway:
        made = Shop(halfway, tmp_path / "shop.db")
        yield made
        made.engine.dispose()


def test_each_commit_sends_the_messages_of_its_transaction(shop: Shop) -> None:
    with Session(shop.engine) as session:
        first, second = shop.order(session, "apples"), shop.order(session, "pears")
        assert first.split(".")[0] == second.split(".")[0], "one transaction"
        assert shop.messages() == []
        session.commit()
        assert shop.messages() == ["apples", "pears"]
        shop.order(session, "plums")
        session.commit()
        session.commit()
    assert shop.messages() == shop.orders() == ["apples", "pears", "plums"]


@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only"])
def test_a_session_in_the_transaction_of_another_is_refused(shop: Shop, mode: Any) -> None:
    """Its commit would commit nothing, or not alone, and the messages would be sent."""
    with shop.engine.connect() as connection, connection.begin() as outer:
        with Session(connection, join_transaction_mode=mode) as session:
            with pytest.raises(TypeError, match="bind it to the engine"):
                shop.order(session, "apples")
            with pytest.raises(TypeError, match="bind it to the engine"), shop.producer.transaction(session):
                pass
        outer.rollback()
    assert shop.messages() == shop.orders() == []


def test_a_test_may_roll_back_what_its_sessions_commit(shop: Shop) -> None:
    with shop.engine.connect() as connection, connection.begin() as outer:
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            shop.order(session, "apples")
            session.commit()
        assert shop.messages() == ["apples"]
        outer.rollback()


def test_a_rollback_forgets_them(shop: Shop) -> None:
    with Session(shop.engine) as session:
        shop.order(session, "apples")
        session.rollback()
        shop.order(session, "pears")
        session.commit()
        shop.order(session, "plums")
    assert shop.messages() == shop.orders() == ["pears"]
    assert shop.halfway.pending() == []


def test_a_savepoint_neither_sends_nor_takes_messages(shop: Shop) -> None:
    with Session(shop.engine) as session:
        shop.order(session, "apples")
        with session.begin_nested():
            with pytest.raises(TypeError, match="savepoint"):
                shop.producer.on_commit(session)
            session.execute(sqlalchemy.text("INSERT INTO orders VALUES ('pears')"))
        assert shop.messages() == []
        session.commit()
    assert (shop.orders(), shop.messages()) == (["apples", "pears"], ["apples"])


def test_a_half_that_fails_keeps_the_session_from_committing(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise SendError("Kafka is gone")

    with Session(shop.engine) as session:
        shop.order(session, "apples")
        with monkeypatch.context() as patch:
            patch.setattr(shop.producer._records, "store_halves", fail)
            with pytest.raises(SendError, match="Kafka is gone"):
                session.commit()
        with pytest.raises(RolledBackError, match="roll the session back"):
            session.commit()
        session.rollback()
        shop.order(session, "pears")
        session.commit()
    assert shop.messages() == shop.orders() == ["pears"]


@pytest.mark.parametrize("is_committed", [False, True])
def test_the_row_tells_what_a_failed_commit_has_done(shop: Shop, monkeypatch: pytest.MonkeyPatch, *, is_committed: bool) -> None:
    commit = shop.engine.dialect.do_commit

    def lose_the_answer(connection: Any) -> None:
        if is_committed:
            commit(connection)
        raise ConnectionError("lost")

    with Session(shop.engine) as session:
        shop.order(session, "apples")
        with monkeypatch.context() as patch:
            patch.setattr(shop.engine.dialect, "do_commit", lose_the_answer)
            with pytest.raises(ConnectionError, match="lost"):
                session.commit()
    assert shop.messages() == shop.orders() == (["apples"] if is_committed else [])
    assert shop.halfway.pending() == []


def test_only_a_session_is_taken(shop: Shop) -> None:
    with pytest.raises(TypeError, match="is no Session"):
        shop.producer.on_commit(shop.engine)


def test_a_commit_needs_no_second_connection(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """Old rows are deleted when the session has given its connection back: the pool may have no other one."""
    pool = {"poolclass": sqlalchemy.QueuePool, "pool_size": 1, "max_overflow": 0, "pool_timeout": 0.1}
    shop.engine.dispose()
    shop.engine = sqlalchemy.create_engine(f"sqlite:///{shop.file}", **pool)
    outbox = SqlTransactions(shop.engine)
    outbox.create_table()
    shop.producer = shop.halfway.producer(outbox)
    with Session(shop.engine) as session:
        shop.order(session, "apples")
        session.commit()
        shop.order(session, "pears")
        session.commit()
    assert shop.messages() == shop.orders() == ["apples", "pears"]
    assert caplog.messages == []
