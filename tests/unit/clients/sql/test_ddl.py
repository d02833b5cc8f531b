"""The table's statements, as the page shows them; and what `SqlTransactions` and the producer refuse to take."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy.orm import scoped_session, sessionmaker
from typer.testing import CliRunner

from halfway import CheckRequest, HalfMessage, KafkaSettings, LocalTransactionState, SqlTransactions, TransactionProducer
from halfway.clients.sql.drivers import driver_of
from halfway.pipelines.cli.app import app
from tests.support.paths import ROOT

KAFKA = KafkaSettings(bootstrap_servers="127.0.0.1:1")


class Listener:
    def execute_local_transaction(self, _: HalfMessage, __: object) -> LocalTransactionState:
        return LocalTransactionState.COMMIT

    def check_local_transaction(self, _: CheckRequest) -> LocalTransactionState:
        return LocalTransactionState.COMMIT


def test_the_page_shows_the_statements_that_create_the_table() -> None:
    [shown, _] = re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / "transactions.md").read_text(), re.DOTALL)
    assert [" ".join(statement.split()) for statement in shown.split(";")[:-1]] == list(SqlTransactions.ddl())


def test_the_command_prints_statements_that_create_the_table() -> None:
    printed = CliRunner().invoke(app, ["transactions", "ddl"])
    assert printed.output.splitlines() == [f"{statement};" for statement in SqlTransactions.ddl()]
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(printed.output * 2)
        assert database.execute("SELECT count(*) FROM halfway_transactions").fetchone() == (0,)


@pytest.mark.parametrize("given", [None, "postgresql://shop", 7, sqlite3.connect(":memory:")])
def test_what_is_no_database_is_refused(given: Any) -> None:
    """A connection of sqlite3 can be called, and would be another thread's."""
    with pytest.raises(TypeError, match="is no database: give a SQLAlchemy engine"):
        SqlTransactions(given)


class ShopConnection(sqlite3.Connection):
    """Knows its file."""

    def __init__(self) -> None:
        super().__init__(":memory:")


def test_a_class_of_connections_is_a_function_that_makes_them() -> None:
    SqlTransactions(ShopConnection).create_table()


def test_a_function_that_returns_no_connection_is_refused(tmp_path: Path) -> None:
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    for function in (sessionmaker(engine), scoped_session(sessionmaker(engine)), engine.connect):
        for use in (SqlTransactions(function).create_table, SqlTransactions(function).begin):
            with pytest.raises(TypeError, match="is no connection of sqlite3, aiosqlite, psycopg 3 or PyMySQL"):
                use()


def test_a_connection_of_another_driver_is_refused() -> None:
    with pytest.raises(TypeError, match=r"builtins\.object is no connection of sqlite3, aiosqlite, psycopg 3 or PyMySQL"):
        driver_of(object())


def test_each_way_to_send_needs_its_own_kind_of_listener() -> None:
    with pytest.raises(TypeError, match=r"send in a block, `with producer\.transaction\(\) as tx`"):
        TransactionProducer(KAFKA, "shop", SqlTransactions(object)).send_in_transaction("orders", b"")
    with pytest.raises(TypeError, match=r"give it SqlTransactions"), TransactionProducer(KAFKA, "shop", Listener()).transaction():
        pass
