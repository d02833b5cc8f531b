"""sqlite3 with `autocommit` of Python 3.12, where `commit()` does nothing if it is True."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from halfway import Bookmark, SettingsError, SqlBookmarks, SqlTransactions
from halfway.testing import in_memory_halfway
from tests.support.message_tables import batch_at

LEGACY = -1


class Pep249Connection(sqlite3.Connection):
    """What Python 3.12 documents of `autocommit`, for the older versions too."""

    mode: Any = LEGACY

    @property
    def autocommit(self) -> Any:
        return self.mode

    @autocommit.setter
    def autocommit(self, mode: Any) -> None:
        if mode is True and self.in_transaction:
            super().commit()
        self.mode = mode
        if mode is not LEGACY:
            super().__setattr__("isolation_level", None)
        if mode is False and not self.in_transaction:
            super().execute("BEGIN")

    def commit(self) -> None:
        if self.mode is not True:
            super().commit()
        if self.mode is False:
            super().execute("BEGIN")

    def rollback(self) -> None:
        if self.mode is not True:
            super().rollback()
        if self.mode is False:
            super().execute("BEGIN")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "shop.db"
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE orders (item TEXT)")
    return file


def connect(file: Path, mode: Any) -> Any:
    connection = sqlite3.connect(file, factory=Pep249Connection)
    connection.autocommit = mode  # type: ignore[attr-defined]
    return connection


def orders(file: Path) -> list[str]:
    with sqlite3.connect(file) as database:
        return [item for (item,) in database.execute("SELECT item FROM orders")]


@pytest.mark.parametrize("mode", [LEGACY, False, True])
def test_a_block_commits_in_every_mode(file: Path, mode: Any) -> None:
    with in_memory_halfway() as halfway:
        producer = halfway.producer(SqlTransactions(lambda: connect(file, mode)))
        with producer.transaction() as tx:
            tx.execute("INSERT INTO orders VALUES ('apples')")
            tx.send("orders", b"apples")
        assert ([message.body for message in halfway.messages()], orders(file)) == ([b"apples"], ["apples"])


@pytest.mark.parametrize("mode", [LEGACY, False, True])
def test_a_bookmark_moves_in_every_mode(file: Path, mode: Any) -> None:
    bookmarks = SqlBookmarks(lambda: connect(file, mode), "shipping")
    assert bookmarks.load() is None
    with bookmarks.advance(batch_at((0, 1))) as tx:
        tx.execute("INSERT INTO orders VALUES ('apples')")
    assert (bookmarks.load(), orders(file)) == (Bookmark(0, 1), ["apples"])


def test_an_engine_whose_connections_commit_each_statement_is_refused(file: Path) -> None:
    engine = sqlalchemy.create_engine("sqlite://", creator=lambda: connect(file, True), poolclass=sqlalchemy.NullPool)
    with (
        in_memory_halfway() as halfway,
        pytest.raises(SettingsError, match="autocommit"),
        halfway.producer(SqlTransactions(engine)).transaction() as tx,
    ):
        tx.send("orders", b"apples")


class WithoutShortcuts(sqlite3.Connection):
    """What SQLAlchemy 2.0 adapts for asyncio has the methods of PEP 249 alone."""

    def execute(self, *_: Any) -> sqlite3.Cursor:
        raise AssertionError("execute is no method of a DB-API connection")


def test_a_connection_needs_no_more_methods_than_those_of_pep_249(file: Path) -> None:
    with in_memory_halfway() as halfway:
        producer = halfway.producer(SqlTransactions(lambda: sqlite3.connect(file, factory=WithoutShortcuts)))
        with producer.transaction() as tx:
            tx.execute("INSERT INTO orders VALUES ('apples')")
            tx.send("orders", b"apples")
            halfway.crash(producer)
        halfway.producer(SqlTransactions(lambda: sqlite3.connect(file, factory=WithoutShortcuts)))
        halfway.advance("40s")
        assert [message.body for message in halfway.messages()] == [b"apples"]
