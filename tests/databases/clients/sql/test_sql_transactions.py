"""Order and message, both or neither, on real databases: what is written when, and how a check is answered."""

import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
import sqlalchemy.orm
from confluent_kafka import KafkaError

from halfway import CheckRequest, LocalTransactionState, OutcomeUnknownError, RolledBackError, SendError, SettingsError, SqlTransactions
from halfway.clients.sql.drivers import driver_of
from halfway.clients.transaction import LocalTransaction
from halfway.schemas.errors import SharedGroupError
from halfway.schemas.headers import check_id
from halfway.testing import in_memory_halfway
from tests.support.database_servers import MariaDbServer, PostgresServer
from tests.support.paths import ROOT
from tests.support.sql_world import SqlWorld
from tests.support.waiting import until

COMMIT, ROLLBACK, UNKNOWN = LocalTransactionState.COMMIT, LocalTransactionState.ROLLBACK, LocalTransactionState.UNKNOWN
LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")


def ask(shop: SqlWorld, transaction: LocalTransaction) -> LocalTransactionState:
    """Ask another instance of the service."""
    return SqlTransactions(shop.given, lock_wait_ms=1000).check_local_transaction(check_of(f"{transaction.transaction_id}.0"))


def check_of(name: str, born_at_ms: int | None = 2**42) -> CheckRequest:
    return CheckRequest(
        transaction_id=name,
        topic="orders",
        body=b"",
        producer_group="shop",
        born_at_ms=born_at_ms,
        check_times=1,
        check_id=check_id(name, 0, 0, 1),
    )


def is_lock_error(found: object) -> bool:
    """Return True for what a driver raises that has waited in vain for a lock."""
    return isinstance(found, Exception) and re.search("is locked|lock timeout|Lock wait timeout", str(found)) is not None


def in_another_thread(call: Callable[[], object]) -> Callable[..., object]:
    """Start a call, and return a function that waits for what it returns or raises; it returns None if in vain."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result(limit_s: float = 30) -> object:
        thread.join(limit_s)
        return found[0] if found else None

    return result


def test_order_and_row_commit_together_between_halves_and_ops(shop: SqlWorld) -> None:
    transaction = shop.begin()
    shop.order(transaction, "apples", messages=2)
    assert shop.sender.halves == []
    shop.sender.before_half = lambda: shop.sender.ops.append(("before", "HALF"))
    transaction.finish()
    messages = [f"{transaction.transaction_id}.{number}" for number in range(2)]
    assert shop.sender.halves == messages
    assert shop.sender.ops == [("before", "HALF")] * 2 + [(name, "COMMIT") for name in messages]
    assert (shop.orders(), shop.rows()) == (["apples"], {transaction.transaction_id: "COMMIT"})
    assert ask(shop, transaction) is COMMIT


def test_a_block_that_fails_sends_and_writes_nothing(shop: SqlWorld) -> None:
    transaction = shop.begin()
    shop.order(transaction, "apples")
    transaction.abandon("ValueError")
    assert (shop.sender.halves, shop.sender.ops, shop.orders(), shop.rows()) == ([], [], [], {})


def test_a_transaction_without_messages_has_no_row(shop: SqlWorld) -> None:
    transaction = shop.begin()
    shop.order(transaction, "apples", messages=0)
    transaction.finish()
    assert (shop.orders(), shop.rows(), shop.sender.ops) == (["apples"], {}, [])


def test_a_half_that_is_not_stored_rolls_everything_back(shop: SqlWorld) -> None:
    shop.sender.failures = {1: KafkaError.MSG_SIZE_TOO_LARGE}
    transaction = shop.begin()
    shop.order(transaction, "apples", messages=3)
    with pytest.raises(SendError, match=r"\.1' failed .*was rolled back$"):
        transaction.finish()
    assert shop.sender.ops == [(f"{transaction.transaction_id}.{number}", "ROLLBACK") for number in (0, 2)]
    assert (shop.orders(), shop.rows()) == ([], {})


def test_a_statement_that_the_database_refuses_ends_the_block(shop: SqlWorld) -> None:
    transaction = shop.begin()
    transaction.send("orders", b"")
    with pytest.raises(Exception, match="nowhere") as caught:
        transaction.execute(
            sqlalchemy.text("INSERT INTO nowhere VALUES (1)") if "sqlalchemy" in str(type(shop.given)) else "INSERT INTO nowhere VALUES (1)"
        )
    transaction.abandon(type(caught.value).__name__)
    assert (shop.sender.halves, shop.rows()) == ([], {})


def test_a_transaction_whose_place_a_check_took_cannot_commit(shop: SqlWorld) -> None:
    """The service stood still before its transaction wrote: ROLLBACK was said, and stays true."""
    shop.outbox.create_table()
    transaction = shop.begin()
    answer: list[LocalTransactionState] = []
    if shop.kind == "sqlite":  # A block is SQLite's one writer, so that a check comes before or after it.
        transaction._transaction.abandon()
        answer.append(ask(shop, transaction))
        transaction._transaction = shop.outbox.begin()
        transaction._transaction.set_savepoint()
    else:
        shop.sender.before_half = lambda: answer.append(ask(shop, transaction))
    shop.order(transaction, "apples")
    with pytest.raises(RolledBackError, match="a check asked"):
        transaction.finish()
    assert answer == [ROLLBACK]
    assert (shop.sender.actions(), shop.orders(), shop.rows()) == (["ROLLBACK"], [], {transaction.transaction_id: "ROLLBACK"})
    assert ask(shop, transaction) is ROLLBACK


@pytest.mark.parametrize("outcome", [COMMIT, ROLLBACK, UNKNOWN])
def test_a_check_waits_for_a_transaction_that_has_its_place(shop: SqlWorld, outcome: LocalTransactionState) -> None:
    transaction = shop.begin()
    shop.order(transaction, "apples")
    transaction._transaction.write_row(transaction.transaction_id, 2**42)
    asked_s = time.monotonic()
    answer = in_another_thread(
        lambda: SqlTransactions(shop.given, lock_wait_ms=500 if outcome is UNKNOWN else 20_000).outcome_of(
            transaction.transaction_id, 2**42
        )
    )
    if outcome is UNKNOWN:
        assert is_lock_error(answer()), "the producer answers UNKNOWN"
        assert time.monotonic() - asked_s >= 0.4
    else:
        assert answer(0.3) is None
    if outcome is ROLLBACK:
        transaction._transaction.abandon()
    else:
        transaction._transaction.commit(lambda: None)
    assert answer() is outcome or outcome is UNKNOWN
    assert ask(shop, transaction) is (ROLLBACK if outcome is ROLLBACK else COMMIT)
    assert shop.orders() == ([] if outcome is ROLLBACK else ["apples"])


class TestALostAnswer:
    @pytest.fixture
    def transaction(self, shop: SqlWorld) -> Iterator[LocalTransaction]:
        transaction = shop.begin()
        shop.order(transaction, "apples")
        yield transaction
        transaction._transaction.abandon()

    def test_to_a_commit_that_happened_is_found(
        self, shop: SqlWorld, transaction: LocalTransaction, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commit = transaction._transaction.commit

        def lose_the_answer(write: Callable[[], None]) -> None:
            commit(write)
            raise ConnectionError("lost")

        monkeypatch.setattr(transaction._transaction, "commit", lose_the_answer)
        transaction.finish()
        assert (shop.sender.actions(), shop.orders()) == (["COMMIT"], ["apples"])

    def test_to_a_commit_that_did_not_happen_is_rolled_back(
        self, shop: SqlWorld, transaction: LocalTransaction, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def lose_the_request(write: Callable[[], None]) -> None:
            write()
            raise ConnectionError("lost")

        monkeypatch.setattr(transaction._transaction, "commit", lose_the_request)
        with pytest.raises(ConnectionError, match="lost"):
            transaction.finish()
        assert (shop.sender.actions(), shop.orders()) == (["ROLLBACK"], [])
        assert shop.rows() == {transaction.transaction_id: "ROLLBACK"}

    def test_is_not_guessed_where_the_look_up_fails_too(
        self, shop: SqlWorld, transaction: LocalTransaction, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def lose(write: Callable[[], None], *_: object) -> None:
            write()
            raise ConnectionError("lost")

        monkeypatch.setattr(transaction._transaction, "commit", lose)
        monkeypatch.setattr(shop.outbox, "outcome_of", lambda *_: lose(lambda: None))
        with pytest.raises(OutcomeUnknownError, match="Look at your data"):
            transaction.finish()
        assert shop.sender.ops == []


def test_rows_are_deleted_after_their_retention_and_never_guessed_then(shop: SqlWorld) -> None:
    shop.outbox.create_table()
    shop.run("INSERT INTO halfway_transactions VALUES " + ", ".join(f"('{number:032x}', 'COMMIT', {number})" for number in range(1200)))
    keeping = SqlTransactions(shop.given, retention_s=3600)
    keeping.clean_up()
    assert len(shop.rows()) == 199, "about a thousand at a time, the oldest first"
    for _ in range(99):
        keeping.clean_up()
    assert len(shop.rows()) == 199, "and only now and then"
    assert keeping.outcome_of(f"{1000:032x}", 1000) is UNKNOWN
    assert keeping.outcome_of(f"{1100:032x}", 1100) is COMMIT
    keeping.clean_up()
    assert shop.rows() == {}
    assert SqlTransactions(shop.given).new_id()[:8] == keeping.new_id()[:8], "the mark stays"
    assert keeping.outcome_of(f"{1100:032x}", 1100) is UNKNOWN
    assert keeping.outcome_of(keeping.new_id(), 2**42) is ROLLBACK


def test_a_clock_that_is_ahead_deletes_no_rows(shop: SqlWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """One instance's clock would end the rows of all, and for a month no check without a row would be answered."""
    transaction = shop.begin()
    shop.order(transaction, "apples")
    transaction.finish()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda now=time.time_ns: now() + 30 * 86_400 * 10**9)
        SqlTransactions(shop.given).clean_up()
    assert ask(shop, transaction) is COMMIT
    assert shop.outbox.outcome_of(shop.outbox.new_id(), time.time_ns() // 1_000_000) is ROLLBACK


@pytest.mark.parametrize("days", [-8, 8])
def test_nothing_is_deleted_where_one_of_the_clocks_must_be_wrong(
    shop: SqlWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, days: int
) -> None:
    """After a failover to a server whose clock is days ahead, rows would be deleted that are minutes old."""
    shop.outbox.create_table()
    shop.run("INSERT INTO halfway_transactions VALUES ('old', 'COMMIT', 1)")
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda now=time.time_ns: now() + days * 86_400 * 10**9)
        SqlTransactions(shop.given).clean_up()
    assert "old" in shop.rows()
    assert "event=clean_up_put_off database_clock_ahead_s=" in caplog.text
    SqlTransactions(shop.given).clean_up()
    assert "old" not in shop.rows()


def test_the_row_of_an_instance_whose_clock_is_behind_is_kept(shop: SqlWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next clean-up of any instance would end it, and a message whose COMMIT was lost would be discarded."""
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda now=time.time_ns: now() - 30 * 86_400 * 10**9)
        transaction = shop.begin()
    shop.order(transaction, "apples")
    transaction.finish()
    SqlTransactions(shop.given).clean_up()
    assert ask(shop, transaction) is COMMIT


def test_a_row_is_kept_from_its_insert_however_long_its_transaction_was_open_before(shop: SqlWorld) -> None:
    """Else a nightly import of ten hours, whose COMMIT was lost, would have ten hours less to be asked about."""
    transaction = shop.begin()
    shop.order(transaction, "apples")
    began_at_ms = time.time_ns() // 1_000_000
    time.sleep(2)
    transaction.finish()
    [(born_at_ms,)] = shop.run("SELECT born_at_ms FROM halfway_transactions WHERE state = 'COMMIT'")
    assert born_at_ms >= began_at_ms + 1000


@pytest.mark.parametrize("name", ["order-17", "A" * 32 + ".0", "a" * 31 + ".0", "a" * 32])
def test_a_message_of_another_client_is_refused(shop: SqlWorld, name: str) -> None:
    with pytest.raises(SharedGroupError, match="producer group 'shop'"):
        shop.outbox.check_local_transaction(check_of(name))


def test_the_place_of_another_databases_transaction_is_never_taken(shop: SqlWorld) -> None:
    transaction = shop.begin()
    shop.order(transaction, "apples")
    transaction.finish()
    shop.run("DROP TABLE halfway_transactions")  # as if it were the database of another service
    with pytest.raises(SharedGroupError, match="Give each service a group of its own"):
        ask(shop, transaction)
    assert shop.rows() == {}


def test_all_instances_of_a_service_have_one_mark(shop: SqlWorld) -> None:
    instances = [SqlTransactions(shop.given, lock_wait_ms=10_000) for _ in range(8)]
    found = [in_another_thread(instance.new_id) for instance in instances]
    ids = [str(wait()) for wait in found]
    assert {len(name) for name in ids} == {32}, ids
    assert len({name[:8] for name in ids}) == 1, ids
    assert len(set(ids)) == 8


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("sqlite", ["PRAGMA busy_timeout"]),
        ("postgresql", ["SHOW lock_timeout", "SHOW transaction_isolation"]),
        ("mariadb", ["SELECT @@innodb_lock_wait_timeout, @@transaction_isolation, @@autocommit"]),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_connection_is_left_as_it_was(kind: str, shown: list[str], fails: bool, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if kind == "sqlite":
        connect: Callable[[], Any] = lambda: sqlite3.connect(tmp_path / "shop.db")  # noqa: E731
    else:
        connect = request.getfixturevalue("postgres" if kind == "postgresql" else "mariadb").connect

    def settings(connection: Any) -> list[Any]:
        found: list[Any] = []
        for statement in shown:
            cursor = connection.cursor()
            cursor.execute(statement)
            found += cursor.fetchall()
        return [*found, getattr(connection, "isolation_level", None)]

    with closing(connect()) as connection:
        before = settings(connection)
        connection.rollback()
        with suppress(ValueError), driver_of(connection).short_transaction(connection, 2345):
            assert settings(connection) != before
            if fails:
                raise ValueError
        assert settings(connection) == before


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_in_every_isolation_level_the_place_is_taken_once(kind: str, level: str, postgres: PostgresServer, mariadb: MariaDbServer) -> None:
    server = postgres if kind == "postgresql" else mariadb
    engine = sqlalchemy.create_engine(server.url, isolation_level=level)
    shop = SqlWorld(kind, engine, server.connect)
    shop.run("CREATE TABLE IF NOT EXISTS stock (item VARCHAR(40))")
    first, second = shop.begin(), shop.begin()
    for transaction in (first, second):
        transaction.execute(sqlalchemy.text("SELECT count(*) FROM stock")).fetchall()  # begins the snapshot
    shop.order(first, "apples")
    shop.sender.before_half = lambda: ask(shop, first)
    with pytest.raises(RolledBackError):
        first.finish()
    shop.sender.before_half = lambda: None
    shop.order(second, "pears")
    second.finish()
    assert (shop.orders(), shop.sender.actions()) == (["pears"], ["ROLLBACK", "COMMIT"])
    assert (ask(shop, first), ask(shop, second)) == (ROLLBACK, COMMIT)
    engine.dispose()


def test_a_check_reads_nothing_uncommitted_whatever_the_default_is(mariadb: MariaDbServer) -> None:
    engine = sqlalchemy.create_engine(mariadb.url, isolation_level="READ UNCOMMITTED")
    shop = SqlWorld("mariadb", engine, mariadb.connect)
    transaction = shop.begin()
    transaction._transaction.write_row(transaction.transaction_id, 2**42)
    with pytest.raises(Exception, match="Lock wait timeout"):
        ask(shop, transaction)
    transaction._transaction.abandon()
    assert ask(shop, transaction) is ROLLBACK
    engine.dispose()


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_a_connection_that_is_killed_before_its_commit_is_rolled_back(kind: str, postgres: PostgresServer, mariadb: MariaDbServer) -> None:
    server = postgres if kind == "postgresql" else mariadb
    shop = SqlWorld(kind, server.connect, server.connect)
    transaction = shop.begin()
    shop.order(transaction, "apples")
    [number] = transaction.execute("SELECT pg_backend_pid()" if kind == "postgresql" else "SELECT connection_id()").fetchone()
    transaction._transaction.write_row(transaction.transaction_id, transaction._born_at_ms)
    transaction._transaction.write_row = lambda *_: shop.run(  # type: ignore[method-assign]
        f"SELECT pg_terminate_backend({number})" if kind == "postgresql" else f"KILL {number}"
    )
    with pytest.raises(Exception, match=r"terminat|Lost connection|closed|gone away|Broken"):
        transaction.finish()
    assert (shop.sender.actions(), shop.orders()) == (["ROLLBACK"], [])


@pytest.mark.parametrize("moment", ["savepoint", "row"])
def test_an_error_of_the_database_is_one_of_sqlalchemy_where_the_service_uses_it(postgres: PostgresServer, moment: str) -> None:
    """What runs a block again, as after a serialization failure or a lost connection, has one class to catch."""
    engine = sqlalchemy.create_engine(postgres.url)
    shop = SqlWorld("postgresql", engine, postgres.connect)
    shop.outbox.create_table()
    with sqlalchemy.orm.Session(engine) as session, postgres.connect() as other:
        if moment == "savepoint":
            number = session.scalar(sqlalchemy.text("SELECT pg_backend_pid()"))
            other.execute(f"SELECT pg_terminate_backend({number})")
            with pytest.raises(sqlalchemy.exc.OperationalError):
                shop.begin(session)
        else:
            transaction = shop.begin(session)
            shop.order(transaction, "apples")
            session.execute(sqlalchemy.text("SET LOCAL lock_timeout = '100ms'"))
            other.execute("LOCK TABLE halfway_transactions IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(sqlalchemy.exc.OperationalError, match="lock timeout"):
                transaction.finish()
            assert shop.sender.actions() == ["ROLLBACK"]
        other.rollback()
    assert shop.orders() == []
    engine.dispose()


@pytest.mark.parametrize("kind", ["postgresql", "mariadb", "sqlite"])
def test_a_connection_in_autocommit_mode_is_refused(kind: str, request: pytest.FixtureRequest, tmp_path: Any) -> None:
    if kind == "sqlite":
        engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/shop.db", isolation_level="AUTOCOMMIT")
    else:
        server = request.getfixturevalue("postgres" if kind == "postgresql" else "mariadb")
        engine = sqlalchemy.create_engine(server.url, isolation_level="AUTOCOMMIT")
    shop = SqlWorld(kind, engine, engine.raw_connection)
    with pytest.raises(SettingsError, match="autocommit"):
        shop.begin()
    engine.dispose()


@pytest.mark.parametrize("end", ["rollback", "commit"])
def test_a_block_that_has_ended_its_transaction_and_goes_on_sends_nothing(shop: SqlWorld, end: str) -> None:
    transaction = shop.begin()
    shop.order(transaction, "apples")
    try:
        getattr(transaction.connection, end)()
    except RolledBackError:
        assert isinstance(shop.given, sqlalchemy.Engine), "only SQLAlchemy tells of a commit before it is done"
        end = "rollback"
    except Exception:  # Django refuses both in a block, which then is as before.
        transaction.finish()
        assert (shop.sender.actions(), shop.orders()) == (["COMMIT"], ["apples"])
        return
    with suppress(sqlalchemy.exc.InvalidRequestError):
        shop.order(transaction, "pears", messages=0)
    with pytest.raises((RolledBackError, sqlalchemy.exc.InvalidRequestError)):
        transaction.finish()
    assert shop.sender.actions() in ([], ["ROLLBACK"])
    assert shop.orders() == (["apples"] if end == "commit" else [])


def test_a_session_that_was_rolled_back_in_its_block_sends_nothing(shop: SqlWorld) -> None:
    if not isinstance(shop.given, sqlalchemy.Engine):
        pytest.skip("sessions are SQLAlchemy's")
    with sqlalchemy.orm.Session(shop.given) as session:
        transaction = shop.begin(session)
        shop.order(transaction, "apples")
        session.rollback()
        shop.order(transaction, "pears", messages=0)
        with pytest.raises(RolledBackError, match="over before its block"):
            transaction.finish()
    assert (shop.sender.actions(), shop.orders()) == (["ROLLBACK"], [])


def test_two_producers_send_the_messages_of_one_session(shop: SqlWorld) -> None:
    """In MariaDB a second savepoint of a name replaces the first."""
    if not isinstance(shop.given, sqlalchemy.Engine):
        pytest.skip("sessions are SQLAlchemy's")
    shop.outbox.create_table()
    with in_memory_halfway() as halfway, sqlalchemy.orm.Session(shop.given) as session:
        one, other = halfway.producer(shop.outbox), halfway.producer(shop.outbox, "other")
        for item in ("apples", "pears"):
            session.execute(sqlalchemy.text("INSERT INTO orders VALUES (:item)"), {"item": item})
            one.on_commit(session).send("orders", item.encode())
            other.on_commit(session).send("orders", item.encode())
            session.commit()
        assert [message.body for message in halfway.messages()] == [b"apples", b"apples", b"pears", b"pears"]
        assert shop.orders() == ["apples", "pears"]


@pytest.mark.parametrize("server", ["postgres", "mariadb"])
def test_a_check_waits_for_a_table_that_is_locked_no_longer_than_for_a_row(server: str, request: pytest.FixtureRequest) -> None:
    """As by a migration. By default MariaDB waits for a day, and with it all checks of the instance."""
    running: PostgresServer | MariaDbServer = request.getfixturevalue(server)
    outbox = SqlTransactions(running.connect)
    outbox.create_table()
    message = check_of(f"{outbox.new_id()}.0")
    with closing(running.connect()) as connection, closing(connection.cursor()) as cursor:
        lock = (
            "LOCK TABLE halfway_transactions IN ACCESS EXCLUSIVE MODE" if server == "postgres" else "LOCK TABLES halfway_transactions WRITE"
        )
        cursor.execute(lock)
        asked_s = time.monotonic()
        assert is_lock_error(in_another_thread(lambda: outbox.check_local_transaction(message))())
        assert time.monotonic() - asked_s < 10
        if server == "mariadb":
            cursor.execute("UNLOCK TABLES")
        connection.rollback()
    assert outbox.check_local_transaction(message) is ROLLBACK


@pytest.mark.parametrize("server", ["postgres", "mariadb"])
def test_a_check_is_answered_soon_after_the_database_has_ended_all_connections_of_the_pool(
    server: str, request: pytest.FixtureRequest
) -> None:
    """Each check that an ended connection costs is one of those after which the message is discarded."""
    running: PostgresServer | MariaDbServer = request.getfixturevalue(server)
    engine = sqlalchemy.create_engine(running.url, pool_size=16)
    with in_memory_halfway() as halfway:
        SqlTransactions(engine).create_table()
        dying = halfway.producer(SqlTransactions(running.connect))
        with dying.transaction() as tx:
            tx.execute("SELECT 1")
            tx.send("orders", b"apples")
            halfway.crash(dying)
        halfway.producer(SqlTransactions(engine))
        for connection in [engine.connect() for _ in range(16)]:
            connection.execute(sqlalchemy.text("SELECT 1"))
            connection.close()
        with closing(running.connect()) as connection, closing(connection.cursor()) as cursor:
            if server == "postgres":
                cursor.execute("SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'")
                end = "SELECT pg_terminate_backend({})"
            else:
                cursor.execute("SELECT id FROM information_schema.processlist WHERE id <> connection_id() AND user <> 'system user'")
                end = "KILL {}"
            for (other,) in cursor.fetchall():
                with suppress(Exception):
                    cursor.execute(end.format(other))
        halfway.advance("2m")
        assert [message.body for message in halfway.messages()] == [b"apples"]
    engine.dispose()


@pytest.mark.parametrize("is_hook", [False, True])
def test_a_listener_that_hides_an_error_of_postgresql_sends_nothing(postgres: PostgresServer, *, is_hook: bool) -> None:
    """PostgreSQL answers the commit of a transaction that has failed by a rollback, without an error."""
    engine = sqlalchemy.create_engine(postgres.url)
    shop = SqlWorld("postgresql", engine, postgres.connect)

    def audit(session: sqlalchemy.orm.Session) -> None:
        with suppress(sqlalchemy.exc.ProgrammingError):
            session.execute(sqlalchemy.text("INSERT INTO missing VALUES (1)"))

    with in_memory_halfway() as halfway, sqlalchemy.orm.Session(engine) as session:
        producer = halfway.producer(shop.outbox)
        if is_hook:
            producer.on_commit(session).send("orders", b"apples")
            session.execute(sqlalchemy.text("INSERT INTO orders VALUES ('apples')"))
            sqlalchemy.event.listen(session, "before_commit", audit)
            with pytest.raises(RolledBackError, match="over before its block"):
                session.commit()
        else:
            sqlalchemy.event.listen(session, "before_commit", audit)
            with pytest.raises(RolledBackError, match="over before its block"), producer.transaction(session) as tx:  # noqa: PT012
                tx.execute(sqlalchemy.text("INSERT INTO orders VALUES ('apples')"))
                tx.send("orders", b"apples")
        assert (halfway.messages(), halfway.pending(), shop.orders()) == ([], [], [])
    engine.dispose()


def test_a_table_that_was_made_anew_is_not_asked_about_what_came_before(shop: SqlWorld) -> None:
    """A crashed service has committed, and its row is gone: ROLLBACK would be wrong."""
    shop.outbox.create_table()
    transaction = shop.begin()
    shop.order(transaction, "apples")
    transaction.prepare()
    transaction._transaction.commit(transaction.write_row)
    shop.run("DROP TABLE halfway_transactions")
    for statement in SqlTransactions.ddl():
        shop.run(statement)
    with pytest.raises(SharedGroupError, match="recreated"):
        shop.outbox.check_local_transaction(check_of(f"{transaction.transaction_id}.0"))


def test_a_copy_of_a_database_is_not_asked_about_what_its_original_has_committed_since(shop: SqlWorld) -> None:
    """Once its mark is deleted, as the page on transactions says. What it has a row of, it knows."""
    page = (ROOT / "docs" / "transactions.md").read_text()
    [statement] = re.findall(r"^DELETE FROM halfway_transactions WHERE .*$", page, re.MULTILINE)
    before = shop.begin()
    shop.order(before, "apples")
    before.finish()
    since = shop.outbox.new_id()
    shop.run(statement)
    copy = SqlTransactions(shop.given)
    assert copy.check_local_transaction(check_of(f"{before.transaction_id}.0")) is COMMIT
    with pytest.raises(SharedGroupError, match="Give each service a group of its own"):
        copy.check_local_transaction(check_of(f"{since}.0"))
    assert copy.check_local_transaction(check_of(f"{copy.new_id()}.0")) is ROLLBACK


@pytest.mark.parametrize("alias", ["default", "postgresql"])
def test_a_block_takes_no_message_in_a_savepoint_of_django(alias: str, postgres: PostgresServer, django_databases: Path) -> None:
    import django.db

    used = django.db.connections[alias]
    connect = postgres.connect if alias == "postgresql" else lambda: sqlite3.connect(django_databases, timeout=5)
    shop = SqlWorld("postgresql" if alias == "postgresql" else "sqlite", used, connect)
    transaction = shop.begin()
    shop.order(transaction, "apples")
    with pytest.raises(TypeError, match="savepoint"), django.db.transaction.atomic(using=alias):
        shop.order(transaction, "pears")
    with django.db.transaction.atomic(using=alias, savepoint=False):
        shop.order(transaction, "plums")
    transaction.finish()
    assert (shop.sender.actions(), shop.orders()) == (["COMMIT", "COMMIT"], ["apples", "plums"])
    used.close()


def fail_by_deadlock(mariadb: MariaDbServer, execute: Callable[[str], object]) -> None:
    """Let InnoDB choose a transaction as the victim of a deadlock, and catch the error."""
    with closing(mariadb.connect()) as other, closing(other.cursor()) as cursor:
        cursor.execute("CREATE OR REPLACE TABLE stock (item VARCHAR(9) PRIMARY KEY, n INT)")
        cursor.execute("INSERT INTO stock VALUES ('a', 0), ('b', 0)")
        other.commit()
        execute("UPDATE stock SET n = 1 WHERE item = 'a'")
        # The transaction that has written more is kept.
        cursor.execute("INSERT INTO stock VALUES ('c', 0), ('d', 0), ('e', 0), ('f', 0), ('g', 0)")
        cursor.execute("UPDATE stock SET n = 2 WHERE item = 'b'")
        waiting = in_another_thread(lambda: cursor.execute("UPDATE stock SET n = 2 WHERE item = 'a'"))
        with closing(mariadb.connect()) as third, closing(third.cursor()) as looking:
            until(lambda: looking.execute("SELECT 1 FROM information_schema.innodb_lock_waits") > 0, "the other one waits")
        with pytest.raises(Exception, match="Deadlock"):
            execute("UPDATE stock SET n = 1 WHERE item = 'b'")
        waiting()
        other.rollback()


def test_a_block_that_goes_on_after_a_deadlock_of_mariadb_sends_nothing(mariadb: MariaDbServer) -> None:
    """InnoDB rolls the whole transaction back, not the statement alone."""
    shop = SqlWorld("mariadb", mariadb.connect, mariadb.connect)
    transaction = shop.begin()
    shop.order(transaction, "apples")
    fail_by_deadlock(mariadb, transaction.execute)
    shop.order(transaction, "pears", messages=0)
    with pytest.raises(RolledBackError, match="deadlock"):
        transaction.finish()
    assert (shop.sender.actions(), shop.orders()) == (["ROLLBACK"], [])


def fail_by_changed_record(mariadb: MariaDbServer, execute: Callable[[str], object]) -> None:
    """Let InnoDB refuse to change what another transaction has changed since this one read it, and catch the error."""
    with closing(mariadb.connect()) as other, closing(other.cursor()) as cursor:
        cursor.execute("CREATE OR REPLACE TABLE stock (item VARCHAR(9) PRIMARY KEY, n INT)")
        cursor.execute("INSERT INTO stock VALUES ('a', 0)")
        other.commit()
        execute("SET SESSION innodb_snapshot_isolation = ON")  # the default since 11.6.2
        execute("SELECT * FROM stock")
        cursor.execute("UPDATE stock SET n = 2")
        other.commit()
        with pytest.raises(Exception, match="Record has changed"):
            execute("UPDATE stock SET n = 1")


@pytest.mark.parametrize("fail", [fail_by_deadlock, fail_by_changed_record])
def test_a_session_that_goes_on_after_mariadb_has_rolled_it_back_takes_no_message(
    mariadb: MariaDbServer, fail: Callable[[MariaDbServer, Callable[[str], object]], None]
) -> None:
    """Its first message comes after the error, so that no mark of Halfway's was lost in it."""
    engine = sqlalchemy.create_engine(mariadb.url, pool_size=1)
    shop = SqlWorld("mariadb", engine, mariadb.connect)
    with in_memory_halfway() as halfway, sqlalchemy.orm.Session(engine) as session:
        producer = halfway.producer(shop.outbox)

        def execute(statement: str) -> None:
            session.execute(sqlalchemy.text(statement))

        execute("INSERT INTO orders VALUES ('apples')")
        fail(mariadb, execute)
        execute("INSERT INTO orders VALUES ('pears')")
        with pytest.raises(RolledBackError, match="rolled this transaction back"):
            producer.on_commit(session)
        with pytest.raises(RolledBackError, match="rolled this transaction back"), producer.transaction(session):
            pass
        session.rollback()
        execute("INSERT INTO orders VALUES ('plums')")
        producer.on_commit(session).send("orders", b"plums")
        session.commit()
        assert ([message.body for message in halfway.messages()], shop.orders()) == ([b"plums"], ["plums"])
    engine.dispose()


@pytest.mark.parametrize("server", ["postgres", "mariadb"])
def test_after_a_rollback_in_its_block_no_statement_commits_by_itself(server: str, request: pytest.FixtureRequest) -> None:
    """Also where the service's function returns connections in autocommit mode."""
    running: PostgresServer | MariaDbServer = request.getfixturevalue(server)
    shop = SqlWorld("mariadb" if server == "mariadb" else "postgresql", lambda: running.connect(autocommit=True), running.connect)
    transaction = shop.begin()
    shop.order(transaction, "apples")
    transaction.connection.rollback()
    shop.order(transaction, "pears")
    with pytest.raises(RolledBackError):
        transaction.finish()
    assert (shop.sender.actions(), shop.orders()) == (["ROLLBACK", "ROLLBACK"], [])


@pytest.mark.parametrize("end", ["rollback", "commit"])
@pytest.mark.parametrize("fails", [True, False])
def test_a_block_that_fails_leaves_nothing_for_the_next_commit_of_its_connection(shop: SqlWorld, end: str, *, fails: bool) -> None:
    """The block has ended the transaction, so that what it wrote since is in one that it did not begin with."""
    if not isinstance(shop.given, sqlalchemy.Engine):
        pytest.skip("connections are SQLAlchemy's")
    with shop.given.connect() as connection:
        transaction = shop.begin(connection)
        shop.order(transaction, "apples")
        if end == "commit":
            with pytest.raises(RolledBackError, match="leave the commit to the block"):
                connection.commit()
        connection.rollback()
        shop.order(transaction, "pears", messages=0)
        if fails:
            transaction.abandon("ValueError")
        else:
            with pytest.raises(RolledBackError):
                transaction.finish()
        connection.execute(sqlalchemy.text("INSERT INTO orders VALUES ('plums')"))
        connection.commit()
    assert shop.orders() == ["plums"]


def test_the_clean_up_after_a_block_needs_no_second_connection_of_the_pool(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    engine = sqlalchemy.create_engine(f"sqlite:///{path}", pool_size=1, max_overflow=0, pool_timeout=60)
    shop = SqlWorld("sqlite", engine, lambda: sqlite3.connect(path, timeout=5))
    shop.outbox.create_table()
    shop.run(f"INSERT INTO halfway_transactions VALUES ('{1:032x}', 'COMMIT', 1)")
    with engine.connect() as connection:
        transaction = shop.begin(connection)
        shop.order(transaction, "apples")
        transaction.finish()
        started = time.monotonic()
        SqlTransactions(engine).clean_up(connection)
        assert time.monotonic() - started < 30
    assert list(shop.rows()) == [transaction.transaction_id], "the old one is deleted"
    engine.dispose()


@pytest.mark.parametrize("given", ["shop.db", object(), 7])
def test_what_is_no_session_and_no_connection_is_refused(tmp_path: Path, given: object) -> None:
    outbox = SqlTransactions(sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'shop.db'}"))
    with pytest.raises(TypeError, match="is no Session or Connection of SQLAlchemy"):
        outbox.begin(given)


def test_a_scoped_session_is_the_session_of_its_thread(shop: SqlWorld) -> None:
    """As Flask-SQLAlchemy's `db.session`."""
    if not isinstance(shop.given, sqlalchemy.Engine):
        pytest.skip("sessions are SQLAlchemy's")
    shop.outbox.create_table()
    session = sqlalchemy.orm.scoped_session(sqlalchemy.orm.sessionmaker(shop.given))
    with in_memory_halfway() as halfway:
        producer = halfway.producer(shop.outbox)
        session.execute(sqlalchemy.text("INSERT INTO orders VALUES ('apples')"))
        producer.on_commit(session).send("orders", b"apples")
        session.commit()
        with producer.transaction(session) as tx:
            tx.execute(sqlalchemy.text("INSERT INTO orders VALUES ('pears')"))
            tx.send("orders", b"pears")
        session.remove()
        assert ([message.body for message in halfway.messages()], shop.orders()) == ([b"apples", b"pears"], ["apples", "pears"])


def test_a_session_and_a_connection_of_the_service_are_used(postgres: PostgresServer) -> None:
    engine = sqlalchemy.create_engine(postgres.url)
    shop = SqlWorld("postgresql", engine, postgres.connect)
    with sqlalchemy.orm.Session(engine) as session, engine.connect() as connection:
        session.execute(sqlalchemy.text("INSERT INTO orders VALUES ('before')"))
        for using, item in ((session, "pears"), (connection, "plums")):
            transaction = shop.begin(using)
            assert transaction.connection is using
            shop.order(transaction, item)
            transaction.finish()
            lost = shop.begin(using)
            shop.order(lost, f"no {item}")
            lost.abandon("ValueError")
    assert shop.orders() == ["before", "pears", "plums"]
    assert shop.sender.actions() == ["COMMIT", "COMMIT"]
    engine.dispose()


@pytest.mark.parametrize("how", ["a caught error", "set_rollback"])
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_block_that_django_rolls_back_sends_nothing(kind: str, how: str, postgres: PostgresServer, django_databases: Path) -> None:
    """Django notes that the block is to be rolled back, and `atomic` does so at its end, without an error."""
    import django.db

    alias = "default" if kind == "sqlite" else kind
    used = django.db.connections[alias]
    shop = SqlWorld(kind, used, postgres.connect if kind == "postgresql" else lambda: sqlite3.connect(django_databases, timeout=5))
    transaction = shop.begin()
    shop.order(transaction, "apples")
    if how == "set_rollback":
        django.db.transaction.set_rollback(True, using=alias)
    else:  # as `Order.objects.create` does
        with suppress(django.db.IntegrityError), django.db.transaction.atomic(using=alias, savepoint=False):
            raise django.db.IntegrityError
    with pytest.raises(RolledBackError, match="Django rolls this block back"):
        transaction.finish()
    assert (shop.sender.halves, shop.sender.actions(), shop.orders()) == ([], [], [])
    used.close()


def test_a_block_that_django_is_told_to_roll_back_while_it_sends_is_rolled_back(django_databases: Path) -> None:
    import django.db

    used = django.db.connections["default"]
    shop = SqlWorld("sqlite", used, lambda: sqlite3.connect(django_databases, timeout=5))
    transaction = shop.begin()
    shop.order(transaction, "apples")
    shop.sender.before_half = partial(django.db.transaction.set_rollback, True)
    with pytest.raises(RolledBackError, match="Django rolls this block back"):
        transaction.finish()
    assert (shop.sender.actions(), shop.orders()) == (["ROLLBACK"], [])
    used.close()


@pytest.mark.usefixtures("django_databases")
def test_a_block_is_refused_where_django_would_not_commit_at_its_end(postgres: PostgresServer) -> None:
    """Without autocommit mode `atomic` is a savepoint, also if `durable`."""
    import django.db

    used = django.db.connections["postgresql"]
    shop = SqlWorld("postgresql", used, postgres.connect)
    used.set_autocommit(False)
    with pytest.raises(SettingsError, match="not in autocommit mode"):
        shop.begin()
    used.close()


def test_a_block_is_refused_in_a_transaction_of_django_that_nobody_ends(django_databases: Path) -> None:
    """A signal's exception in the first lines of `atomic` leaves it: there a durable block is a mere savepoint."""
    import django.db

    used = django.db.connections["default"]
    shop = SqlWorld("sqlite", used, lambda: sqlite3.connect(django_databases, timeout=5))
    shop.outbox.create_table()
    left_open = django.db.transaction.atomic(durable=True)
    left_open.__enter__()
    used.atomic_blocks.pop()
    with pytest.raises(RolledBackError, match="run the block again"):
        shop.begin()
    transaction = shop.begin()
    shop.order(transaction, "apples")
    transaction.finish()
    used.close()
    assert (shop.sender.actions(), shop.orders()) == (["COMMIT"], ["apples"])


@pytest.mark.usefixtures("django_databases")
def test_django_refuses_a_block_inside_another_transaction(postgres: PostgresServer) -> None:
    import django.db

    used = django.db.connections["postgresql"]
    shop = SqlWorld("postgresql", used, postgres.connect)
    with pytest.raises(RuntimeError, match="durable"), django.db.transaction.atomic(using="postgresql"):
        shop.begin()
    used.close()
