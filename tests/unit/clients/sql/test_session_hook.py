"""`session.commit()` sends the messages of its transaction: order and message, both or neither, without a block."""

import gc
import sqlite3
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import StaticPool

from halfway import Bookmark, RolledBackError, SendError, SqlBookmarks, SqlTransactions
from halfway.clients.sql.drivers import _WRITES
from halfway.clients.sql.sqlalchemy_transactions import SessionTransaction
from halfway.clients.transaction import LocalTransaction
from halfway.testing import InMemoryHalfway, InMemoryProducer, in_memory_halfway
from tests.support.message_tables import batch_at


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


class Routed(Session):
    """A session that chooses its bind, as services with replicas do."""

    to: Any = None

    def get_bind(self, *_: Any, **__: Any) -> Any:
        return self.to


def test_a_session_that_chooses_a_connection_as_its_bind_is_refused_as_one_that_is_bound_to_it(shop: Shop) -> None:
    with shop.engine.connect() as connection, connection.begin() as outer:
        with Routed() as session:
            session.to = connection
            with pytest.raises(TypeError, match="bind it to the engine"):
                shop.order(session, "apples")
        with Routed(join_transaction_mode="create_savepoint") as session:
            session.to = connection
            shop.order(session, "pears")
            session.commit()
        outer.rollback()
    assert shop.messages() == ["pears"]
    with Routed() as session:
        session.to = shop.engine
        shop.order(session, "plums")
        session.commit()
    assert shop.orders() == ["plums"]


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


@pytest.mark.parametrize("refused", ["", "first", "second"])
def test_each_of_two_producers_sends_its_own_messages_of_one_session(shop: Shop, monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    """They may be of two groups, or of two Kafka clusters: all messages, or none."""
    producers = {"first": shop.producer, "second": shop.halfway.producer(shop.outbox, "other")}
    with Session(shop.engine) as session:
        shop.order(session, "apples")
        for name, producer in producers.items():
            producer.on_commit(session).send("orders", name.encode())
        if refused:
            monkeypatch.setattr(producers[refused]._records, "store_halves", _refuse)
            with pytest.raises(SendError, match="Kafka is gone"):
                session.commit()
            session.rollback()
        else:
            session.commit()
    shop.halfway.advance("1h")
    assert [(message.producer_group, message.body) for message in shop.halfway.messages()] == (
        [] if refused else [("test", b"apples"), ("test", b"first"), ("other", b"second")]
    )
    assert shop.orders() == ([] if refused else ["apples"])
    assert shop.halfway.pending() == []


@pytest.mark.parametrize("has_second", [False, True])
def test_what_the_database_has_rolled_back_is_not_sent_though_another_producer_comes_after(shop: Shop, *, has_second: bool) -> None:
    """As MariaDB does at a deadlock, SQLite rolls the whole transaction back, and the session does not notice."""
    other = shop.halfway.producer(shop.outbox, "other")
    with sqlite3.connect(shop.file) as database:
        database.execute("CREATE TABLE stock (item TEXT PRIMARY KEY)")
        database.execute("INSERT INTO stock VALUES ('x')")
    with Session(shop.engine) as session:
        shop.order(session, "apples")
        with suppress(IntegrityError):
            session.execute(sqlalchemy.text("INSERT OR ROLLBACK INTO stock VALUES ('x')"))
        if has_second:
            with pytest.raises(RolledBackError, match="rolled this transaction back"):
                other.on_commit(session)
        session.execute(sqlalchemy.text("INSERT INTO stock VALUES ('y')"))
        with pytest.raises(RolledBackError, match="over before its block"):
            session.commit()
    shop.halfway.advance("1h")
    assert shop.messages() == shop.orders() == []


def test_a_block_whose_transaction_is_over_is_not_written_in_that_of_another_producer(shop: Shop) -> None:
    other = shop.halfway.producer(shop.outbox, "other")
    over = pytest.raises(RolledBackError, match="over before its block")
    with Session(shop.engine) as session, over, shop.producer.transaction(session) as tx:
        session.execute(sqlalchemy.text("INSERT INTO orders VALUES ('apples')"))
        tx.send("orders", b"apples")
        session.rollback()
        other.on_commit(session)  # sends nothing
    shop.halfway.advance("1h")
    assert shop.messages() == shop.orders() == []


@pytest.mark.parametrize("first", ["bookmark", "messages"])
def test_a_bookmark_and_messages_share_one_session(shop: Shop, first: str) -> None:
    bookmarks = SqlBookmarks(shop.engine, "shipping")
    bookmarks.load()
    with Session(shop.engine) as session:
        if first == "messages":
            shop.order(session, "apples")
        with bookmarks.advance(batch_at((0, 1)), session):
            if first == "bookmark":
                shop.order(session, "apples")
    assert shop.messages() == shop.orders() == ["apples"]
    assert bookmarks.load() == Bookmark(0, 1)


def test_a_session_of_the_engine_is_no_test_s_whatever_its_mode_of_joining(shop: Shop) -> None:
    """One `sessionmaker` for production and tests: a listener that comes later must not end the row's transaction."""
    with sqlite3.connect(shop.file) as database:
        database.execute("CREATE TABLE stock (item TEXT PRIMARY KEY)")
        database.execute("INSERT INTO stock VALUES ('x')")

    def audit(session: Session) -> None:
        with suppress(IntegrityError):
            session.execute(sqlalchemy.text("INSERT OR ROLLBACK INTO stock VALUES ('x')"))

    with Session(shop.engine, join_transaction_mode="create_savepoint") as session:
        shop.order(session, "apples")
        event.listen(session, "before_commit", audit)
        with pytest.raises(RolledBackError, match="over before its block"):
            session.commit()
    shop.halfway.advance("1h")
    assert shop.messages() == shop.orders() == []


def test_in_a_savepoint_of_the_connection_no_message_can_be_added(shop: Shop) -> None:
    with Session(shop.engine) as session:
        block = shop.producer.on_commit(session)
        with pytest.raises(TypeError, match="savepoint"), session.connection().begin_nested():
            block.send("orders", b"apples")
        session.commit()
    assert shop.messages() == []


def test_a_session_made_with_the_info_of_another_has_messages_of_its_own(shop: Shop) -> None:
    with Session(shop.engine) as session:
        shop.producer.on_commit(session)
        with Session(shop.engine, info=session.info) as other:
            shop.producer.on_commit(other).send("orders", b"apples")
            session.commit()
            assert shop.messages() == []
            other.commit()
    assert shop.messages() == ["apples"]


def test_a_check_is_answered_by_a_connection_that_leaves_texts_in_bytes(shop: Shop) -> None:
    """So does psycopg for a PostgreSQL database whose encoding is SQL_ASCII."""

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(shop.file)
        connection.text_factory = bytes
        return connection

    dying = shop.halfway.producer(SqlTransactions(connect), "bytes")
    with dying.transaction() as tx:
        tx.execute("INSERT INTO orders VALUES ('apples')")
        tx.send("orders", b"apples")
        shop.halfway.crash(dying)
    shop.halfway.producer(SqlTransactions(connect), "bytes")
    shop.halfway.advance("1h")
    assert shop.messages() == shop.orders() == ["apples"]


@pytest.mark.parametrize("with_other", ["", "/* other */ -- fruit\n", "WITH other (item) AS (VALUES ('figs')) "])
def test_a_session_that_goes_on_after_sqlite_has_rolled_it_back_takes_no_message(shop: Shop, with_other: str) -> None:
    with Session(shop.engine) as session:
        session.execute(sqlalchemy.text("CREATE UNIQUE INDEX one_of_each ON orders (item)"))
        shop.order(session, "apples")
        session.commit()
        session.execute(sqlalchemy.text("INSERT INTO orders VALUES ('pears')"))
        with pytest.raises(IntegrityError):
            session.execute(sqlalchemy.text(f"{with_other}INSERT OR ROLLBACK INTO orders VALUES ('apples')"))
        with pytest.raises(RolledBackError, match="rolled this transaction back"):
            shop.order(session, "plums")
        session.rollback()
        with pytest.raises(OperationalError):  # before there is a transaction, so that none is lost
            session.execute(sqlalchemy.text("SELECT * FROM missing"))
        shop.order(session, "plums")
        session.commit()
    assert shop.messages() == shop.orders() == ["apples", "plums"]


def test_the_first_message_of_a_process_needs_no_second_writer(shop: Shop) -> None:
    """SQLite has one, which is this session."""
    shop.producer = shop.halfway.producer(SqlTransactions(shop.engine))
    with Session(shop.engine) as session:
        session.execute(sqlalchemy.text("INSERT INTO orders VALUES ('apples')"))
        shop.order(session, "pears")
        session.commit()
    assert shop.orders() == ["apples", "pears"]
    assert shop.messages() == ["pears"]


def test_the_errors_of_the_table_are_sqlalchemys_too(shop: Shop) -> None:
    with sqlite3.connect(shop.file) as writer:
        writer.execute("DROP TABLE halfway_transactions")
        writer.execute("INSERT INTO orders VALUES ('apples')")
        outbox = SqlTransactions(shop.engine, lock_wait_ms=1)
        with pytest.raises(OperationalError, match="locked"):
            outbox.create_table()
        bookmarks = SqlBookmarks(sqlalchemy.create_engine(f"sqlite:///{shop.file}", connect_args={"timeout": 0.01}), "shipping")
        bookmarks._is_loaded = True
        with pytest.raises(OperationalError), bookmarks.advance(batch_at((0, 1))):
            pass
    with pytest.raises(OperationalError, match="unable to open"):
        SqlTransactions(sqlalchemy.create_engine(f"sqlite:///{shop.file}/none")).create_table()


def test_a_block_that_cannot_begin_rolls_the_session_back(shop: Shop) -> None:
    """Otherwise what the session holds would be written once more when the service tries again."""
    engine = sqlalchemy.create_engine(f"sqlite:///{shop.file}/none")
    producer = shop.halfway.producer(shop.outbox)
    with Session(engine) as session:
        assert session.begin().is_active
        with pytest.raises(OperationalError), producer.transaction(session):
            pass
        assert not session.in_transaction()


def test_sessions_of_a_test_have_their_own_blocks_on_its_connection(shop: Shop) -> None:
    """In production they have two connections."""
    with shop.engine.connect() as connection, connection.begin() as outer:
        of_test = partial(Session, connection, join_transaction_mode="create_savepoint")
        with of_test() as first, shop.producer.transaction(first) as tx:
            tx.send("orders", b"apples")
            with of_test() as second, shop.producer.transaction(second) as inner:
                inner.send("orders", b"pears")
        outer.rollback()
    assert shop.messages() == ["pears", "apples"]


def _refuse(*_: Any) -> None:
    raise SendError("Kafka is gone")


def test_a_half_that_fails_keeps_the_session_from_committing(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    with Session(shop.engine) as session:
        shop.order(session, "apples")
        with monkeypatch.context() as patch:
            patch.setattr(shop.producer._records, "store_halves", _refuse)
            with pytest.raises(SendError, match="Kafka is gone"):
                session.commit()
        with pytest.raises(sqlalchemy.exc.PendingRollbackError):
            session.commit()
        session.rollback()
        shop.order(session, "pears")
        session.commit()
    assert shop.messages() == shop.orders() == ["pears"]


@pytest.mark.parametrize("is_committed", [False, True])
def test_the_row_tells_what_a_failed_commit_has_done(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, is_committed: bool
) -> None:
    commit = shop.engine.dialect.do_commit

    def lose_the_answer(connection: Any) -> None:
        if is_committed:
            commit(connection)
        raise ConnectionError("lost")

    with Session(shop.engine) as session:
        shop.order(session, "apples")
        transaction = shop.producer.on_commit(session)
        with monkeypatch.context() as patch:
            patch.setattr(shop.engine.dialect, "do_commit", lose_the_answer)
            with pytest.raises(ConnectionError, match="lost"):
                session.commit()
    assert [str(result.state) for result in transaction.results] == ["COMMIT" if is_committed else "ROLLBACK"]
    assert shop.messages() == shop.orders() == (["apples"] if is_committed else [])
    assert shop.halfway.pending() == []
    assert ("event=committed_in_spite_of_an_error" in caplog.text) == is_committed


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


@pytest.mark.parametrize("end", ["commit", "rollback", "close"])
def test_a_transaction_that_has_ended_takes_no_message(shop: Shop, end: str) -> None:
    with Session(shop.engine) as session:
        ended = shop.producer.on_commit(session)
        getattr(session, end)()
        session.execute(sqlalchemy.text("INSERT INTO orders VALUES ('pears')"))
        with pytest.raises(RuntimeError, match=r"has ended.*on_commit"):
            ended.send("orders", b"pears")
        ended = shop.producer.on_commit(session)
        ended.send("orders", b"pears")
        session.commit()
    with shop.producer.transaction() as block:
        pass
    with pytest.raises(RuntimeError, match="has ended"):
        block.send("orders", b"plums")
    assert shop.messages() == shop.orders() == ["pears"]


@pytest.mark.parametrize("uses_before", [False, True])
@pytest.mark.parametrize("of", ["class", "maker", "session"])
def test_a_listener_of_the_service_may_add_messages_when_the_session_commits(shop: Shop, of: str, *, uses_before: bool) -> None:
    """Domain events, which a service collects and sends in one place, before or after this session was first used."""

    class ShopSession(Session):
        pass

    maker = sessionmaker(shop.engine, class_=ShopSession)
    with maker() as session:
        if uses_before:
            shop.order(session, "apples")

        def publish(committing: Session) -> None:
            shop.producer.on_commit(committing).send("orders", b"pears")

        session.execute(sqlalchemy.text("INSERT INTO orders VALUES ('pears')"))
        event.listen({"class": ShopSession, "maker": maker, "session": session}[of], "before_commit", publish)
        session.commit()
    assert shop.messages() == shop.orders() == (["apples", "pears"] if uses_before else ["pears"])


def test_a_block_takes_no_message_in_a_savepoint(shop: Shop) -> None:
    """Its rollback would leave the message without what it is about."""
    with Session(shop.engine) as session, shop.producer.transaction(session) as block:
        block.send("orders", b"apples")
        block.execute(sqlalchemy.text("INSERT INTO orders VALUES ('apples')"))
        with pytest.raises(TypeError, match="savepoint"), session.begin_nested():  # noqa: PT012
            block.execute(sqlalchemy.text("INSERT INTO orders VALUES ('pears')"))
            block.send("orders", b"pears")
    with (
        shop.engine.connect() as connection,
        shop.producer.transaction(connection) as block,
        pytest.raises(TypeError, match="savepoint"),
        connection.begin_nested(),
    ):
        block.send("orders", b"pears")
    with Session(shop.engine) as session:
        hooked = shop.producer.on_commit(session)
        with pytest.raises(TypeError, match="savepoint"), session.begin_nested():
            hooked.send("orders", b"pears")
        session.commit()
    assert shop.messages() == shop.orders() == ["apples"]


@pytest.mark.parametrize("is_rolled_back", [False, True])
def test_a_connection_whose_commit_was_refused_goes_back_to_its_pool_without_the_order(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, *, is_rolled_back: bool
) -> None:
    """SQLAlchemy holds it for ended, and would lend it in the middle of its transaction."""

    def fail(*_: Any) -> None:
        raise SendError("Kafka is gone")

    shop.engine.dispose()
    shop.engine = sqlalchemy.create_engine(f"sqlite:///{shop.file}", poolclass=sqlalchemy.QueuePool, pool_size=1, max_overflow=0)
    with Session(shop.engine) as session:
        shop.order(session, "apples")
        with monkeypatch.context() as patch:
            patch.setattr(shop.producer._records, "store_halves", fail)
            with pytest.raises(SendError):
                session.commit()
        if is_rolled_back:
            session.rollback()
    with shop.engine.begin() as connection:
        connection.execute(sqlalchemy.text("INSERT INTO orders VALUES ('pears')"))
    assert (shop.messages(), shop.orders()) == ([], ["pears"])


def test_a_session_that_commits_in_two_phases_is_refused(shop: Shop) -> None:
    with Session(shop.engine, twophase=True) as session, pytest.raises(TypeError, match="two phases"):
        shop.producer.on_commit(session)


@pytest.mark.parametrize("pool", [None, StaticPool])
def test_a_database_in_memory_is_refused(pool: Any) -> None:
    """A check would run in the service's own transaction."""
    with pytest.raises(TypeError, match="use a file"):
        SqlTransactions(sqlalchemy.create_engine("sqlite://", poolclass=pool))


@pytest.mark.parametrize("kind", [Session, sqlalchemy.Connection])
def test_a_block_that_a_signal_has_left_open_lets_nobody_commit(shop: Shop, kind: type[Session] | type[sqlalchemy.Connection]) -> None:
    """As Celery's SoftTimeLimitExceeded does in the first or last lines of a block, which then does not end."""
    with kind(shop.engine) as used:
        left = shop.producer.transaction(used)
        tx = left.__enter__()
        tx.execute(sqlalchemy.text("INSERT INTO orders VALUES ('apples')"))
        tx.send("orders", b"apples")
        used.execute(sqlalchemy.text("INSERT INTO orders VALUES ('failed')"))
        with pytest.raises(RolledBackError, match="a signal"):
            used.commit()
        used.rollback()
        used.execute(sqlalchemy.text("INSERT INTO orders VALUES ('pears')"))
        used.commit()
        # The block is freed, in the middle of the next transaction.
        used.execute(sqlalchemy.text("INSERT INTO orders VALUES ('plums')"))
        del left, tx
        gc.collect()
        used.commit()
    assert (shop.orders(), shop.messages(), shop.halfway.pending()) == (["pears", "plums"], [], [])


@pytest.mark.parametrize("kind", ["session", "connection", "session of a test"])
def test_a_block_that_goes_on_after_a_refused_commit_is_rolled_back(shop: Shop, kind: str) -> None:
    with shop.engine.connect() as connection, connection.begin() if kind == "session of a test" else nullcontext():
        of_test = Session(connection, join_transaction_mode="create_savepoint")
        used = {"session": Session(shop.engine), "connection": connection, "session of a test": of_test}[kind]

        def goes_on() -> None:
            with shop.producer.transaction(used) as tx:
                tx.execute(sqlalchemy.text("INSERT INTO orders VALUES ('apples')"))
                tx.send("orders", b"apples")
                with suppress(RolledBackError):
                    used.commit()

        with used, pytest.raises(RolledBackError, match="leave the commit to the block"):
            goes_on()
    assert (shop.orders(), shop.messages()) == ([], [])


def test_a_signal_before_the_commit_is_listened_to_leaves_no_block(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    listen = SessionTransaction.at_commit

    def interrupted(*_: Any) -> None:
        monkeypatch.setattr(SessionTransaction, "at_commit", listen)
        raise KeyboardInterrupt

    monkeypatch.setattr(SessionTransaction, "at_commit", interrupted)
    with Session(shop.engine) as session:
        with pytest.raises(KeyboardInterrupt):
            shop.order(session, "apples")
        shop.order(session, "pears")
        session.commit()
    assert (shop.orders(), shop.messages()) == (["apples", "pears"], ["pears"])


@pytest.mark.parametrize("statement", ["/* a */" * 50 + "CREATE TABLE t (i)", "/* a */ SELECT '/* b */ DELETE'", "-- a\nSELECT 'INSERT'"])
def test_comments_make_no_statement_a_write(statement: str) -> None:
    assert _WRITES.match(statement) is None
    assert _WRITES.match(statement.partition("C")[0].partition("S")[0] + "Delete FROM t")


def test_a_signal_between_two_steps_of_the_end_rolls_back(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The halves are stored, and the row is not written."""

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalTransaction, "conclude", interrupt)
    with Session(shop.engine) as session:
        session.execute(sqlalchemy.text("INSERT INTO orders VALUES ('apples')"))
        with pytest.raises(KeyboardInterrupt), shop.producer.transaction(session) as tx:
            tx.send("orders", b"apples")
        session.commit()
    assert (shop.orders(), shop.messages(), shop.halfway.pending()) == ([], [], [])


@pytest.mark.parametrize("ended", ["commit", "rollback"])
def test_messages_may_be_added_while_the_session_ends_its_former_transaction(shop: Shop, ended: str) -> None:
    """A listener of the class is called before the one that ends the block."""
    made = sessionmaker(shop.engine)
    audited: list[str] = []

    @event.listens_for(made, "after_transaction_end")
    def audit(session: Session, transaction: Any) -> None:
        if transaction.parent is None and not audited:
            audited.append(shop.order(session, "audit"))

    with made() as session:
        shop.order(session, "apples")
        getattr(session, ended)()
        session.commit()
    assert shop.messages() == shop.orders() == ["apples", "audit"][ended == "rollback" :]


@pytest.mark.parametrize("engine", ["its own", "another one"])
def test_an_error_listener_of_the_service_hides_no_rollback(shop: Shop, engine: str) -> None:
    """SQLAlchemy calls no further listener after one that raises."""
    used = sqlalchemy.create_engine(f"sqlite:///{shop.file}")

    @event.listens_for(used, "handle_error")
    def refuse(_: Any) -> None:
        raise ZeroDivisionError

    shop.producer = shop.halfway.producer(SqlTransactions(used if engine == "its own" else shop.engine))
    with Session(used) as session:
        session.execute(sqlalchemy.text("CREATE UNIQUE INDEX one_of_each ON orders (item)"))
        session.execute(sqlalchemy.text("INSERT INTO orders VALUES ('apples')"))
        with pytest.raises(ZeroDivisionError):
            session.execute(sqlalchemy.text("INSERT OR ROLLBACK INTO orders VALUES ('apples')"))
        with pytest.raises(RolledBackError, match="rolled this transaction back"):
            shop.order(session, "pears")
    used.dispose()
