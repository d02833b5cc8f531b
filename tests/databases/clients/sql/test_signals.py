"""What no line of a service's own says: signals at each line of what begins and ends a block, and other threads."""

import asyncio
import gc
import sqlite3
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import sqlalchemy
import sqlalchemy.event
import sqlalchemy.orm
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from halfway import AsyncSqlTransactions, LocalTransactionState, RolledBackError, SqlTransactions
from halfway.clients.sql.databases import DjangoDatabase, _refuse_unended
from halfway.testing import in_memory_halfway


class Interrupted(BaseException):
    """What the handler raises."""


def interrupt(call: Callable[[], object], line: int, where: set[tuple[str, str]]) -> bool:
    """Call, and raise Interrupted at the nth line that runs in these functions. Return False if there are fewer."""
    left = [line]

    def in_function(_: FrameType, event: str, __: Any) -> Any:
        if event in ("line", "return"):
            left[0] -= 1
            if left[0] == -1:
                sys.settrace(None)
                raise Interrupted
        return in_function

    def in_call(frame: FrameType, _: str, __: Any) -> Any:
        code = frame.f_code
        return in_function if (Path(code.co_filename).name, code.co_name) in where else None

    sys.settrace(in_call)
    try:
        with suppress(Interrupted):
            call()
    finally:
        sys.settrace(None)
    return left[0] < 0


BEGIN_AND_END = {
    ("transaction.py", "__enter__"),
    ("transaction.py", "__exit__"),
    ("transaction.py", "__init__"),
    ("databases.py", "__init__"),
    ("databases.py", "begin"),
    ("databases.py", "commit"),
    ("databases.py", "abandon"),
    *(("base.py", name) for name in ("set_autocommit", "_start_transaction_under_autocommit", "commit", "_set_autocommit")),
}


@pytest.fixture
def used(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Django's connection to SQLite, and a table of orders."""
    import django.db

    request.getfixturevalue("django_databases")

    connection = django.db.connections["default"]
    with connection.cursor() as cursor:
        for name in ("orders", "halfway_transactions"):
            cursor.execute(f"DROP TABLE IF EXISTS {name}")
        cursor.execute("CREATE TABLE orders (item text)")
    connection.close()
    yield connection
    connection.close()


@pytest.mark.parametrize("is_nested", [False, True])
def test_after_an_exception_where_a_block_begins_or_ends_djangos_next_one_succeeds(
    used: Any, django_databases: Path, *, is_nested: bool
) -> None:
    from django.db.transaction import atomic

    with in_memory_halfway() as halfway:
        producer = halfway.producer(SqlTransactions(used, lock_wait_ms=50))

        def order(item: str) -> None:
            with producer.transaction() as tx:
                if is_nested:
                    with atomic():
                        tx.execute("INSERT INTO orders VALUES (%s)", [item])
                else:
                    tx.execute("INSERT INTO orders VALUES (%s)", [item])
                tx.send("orders", item.encode())

        line = 0
        while interrupt(lambda number=line: order(f"interrupted {number}"), line, BEGIN_AND_END):
            try:
                order(f"after {line}")
            except RolledBackError:
                order(f"after {line}")
            line += 1
        halfway.advance("1h")
        sent = sorted(message.body.decode() for message in halfway.messages())
    with sqlite3.connect(django_databases) as connection:
        assert sent == sorted(item for [item] in connection.execute("SELECT item FROM orders"))
    assert line > 50
    assert {f"after {number}" for number in range(line)} <= set(sent)


def test_after_an_exception_in_the_clean_up_the_services_connection_begins_transactions(tmp_path: Path) -> None:
    """In autocommit mode, what the service rolls back would stay."""
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'shop.db'}", pool_size=1)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE orders (item text)")
    SqlTransactions(engine).create_table()
    where = {("drivers.py", name) for name in ("short_transaction", "_begin_no_transactions")} | {("transaction_table.py", "clean_up")}
    line, is_interrupted = 0, True
    while is_interrupted:
        with engine.connect() as connection:
            is_interrupted = interrupt(lambda used=connection: SqlTransactions(engine).clean_up(used), line, where)
            connection.exec_driver_sql("INSERT INTO orders VALUES ('apples')")
            connection.rollback()
        with engine.connect() as connection:
            connection.exec_driver_sql("INSERT INTO orders VALUES ('pears')")
            connection.rollback()
            assert connection.exec_driver_sql("SELECT * FROM orders").all() == []
        line += 1
    assert line > 10
    engine.dispose()


def test_where_the_database_is_away_after_an_exception_in_atomic_a_later_block_succeeds(used: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from django.db.transaction import atomic

    outbox = SqlTransactions(used)
    outbox.create_table()
    left_open = atomic(durable=True)
    left_open.__enter__()
    used.atomic_blocks.pop()
    with monkeypatch.context() as patch:
        patch.setattr(used, "get_new_connection", lambda _: (_ for _ in ()).throw(sqlite3.OperationalError("away")))
        with pytest.raises(RolledBackError, match="run the block again"):
            outbox.begin()
        with pytest.raises(Exception, match="away"):
            outbox.begin()
    outbox.begin().abandon()
    assert outbox.outcome_of(outbox.new_id(), 2**42) is LocalTransactionState.ROLLBACK


def test_a_block_of_django_that_ends_in_another_thread_commits_neither(used: Any, django_databases: Path) -> None:
    """There Django would commit that thread's own transaction, which is empty."""
    with in_memory_halfway() as halfway:
        producer = halfway.producer(SqlTransactions(used))

        def session() -> Iterator[Any]:
            with producer.transaction() as tx:
                yield tx

        steps = session()
        tx = next(steps)
        tx.execute("INSERT INTO orders VALUES ('apples')")
        tx.send("orders", b"apples")
        with ThreadPoolExecutor() as pool, pytest.raises(RolledBackError, match="began in another thread"):
            pool.submit(next, steps).result()
        halfway.advance("1h")
        assert (halfway.messages(), halfway.pending()) == ([], [])
        with producer.transaction() as tx:
            tx.execute("INSERT INTO orders VALUES ('pears')")
            tx.send("orders", b"pears")
    with sqlite3.connect(django_databases) as connection:
        assert connection.execute("SELECT item FROM orders").fetchall() == [("pears",)]


def test_a_block_that_is_freed_in_another_thread_ends_no_transaction_of_that_one(used: Any, django_databases: Path) -> None:
    from django.db.transaction import atomic

    left_open = []
    with in_memory_halfway() as halfway:
        producer = halfway.producer(SqlTransactions(used))

        def session() -> Iterator[Any]:
            with producer.transaction() as tx:
                yield tx

        def begin() -> None:
            left_open.append(session())
            next(left_open[0])

        with ThreadPoolExecutor() as pool:
            pool.submit(begin).result()
            with pytest.raises(ValueError, match="the service's"), atomic():  # noqa: PT012  # the order is to be rolled back
                left_open.clear()
                with used.cursor() as cursor:
                    cursor.execute("INSERT INTO orders VALUES ('apples')")
                raise ValueError("the service's")
    with sqlite3.connect(django_databases) as connection:
        assert connection.execute("SELECT item FROM orders").fetchall() == []


def test_after_a_transaction_that_nobody_ends_sqlite_in_memory_goes_on(used: Any) -> None:
    """Django does not close it."""
    memory = used.copy()
    memory.settings_dict = {**used.settings_dict, "NAME": ":memory:"}
    with memory.cursor() as cursor:
        cursor.execute("CREATE TABLE orders (item text)")
    memory.set_autocommit(False)
    memory.in_atomic_block = True
    ran: list[str] = []
    memory.run_on_commit = [(set(), lambda: ran.append("what was rolled back"), False)]
    with memory.cursor() as cursor:
        cursor.execute("INSERT INTO orders VALUES ('apples')")
    with pytest.raises(RolledBackError, match="run the block again"):
        _refuse_unended(memory)
    assert memory.get_autocommit()
    assert memory.run_on_commit == ran == []
    with memory.cursor() as cursor:
        assert cursor.execute("SELECT * FROM orders").fetchall() == []


def test_a_clean_up_that_waits_in_vain_leaves_the_services_connection_as_it_is(tmp_path: Path) -> None:
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    SqlTransactions(engine).create_table()
    with engine.connect() as connection, sqlite3.connect(tmp_path / "shop.db", isolation_level=None) as other:
        connection.exec_driver_sql("CREATE TEMP TABLE basket (item text)")
        connection.commit()
        other.execute("BEGIN IMMEDIATE")
        SqlTransactions(engine, lock_wait_ms=50).clean_up(connection)
        other.execute("ROLLBACK")
        assert connection.exec_driver_sql("SELECT * FROM basket").all() == []
    engine.dispose()


@pytest.mark.parametrize("ends", ["in another thread", "freed"])
def test_a_block_that_is_lost_around_a_transaction_of_the_service_commits_no_half_of_it(
    used: Any, django_databases: Path, ends: str
) -> None:
    """What comes after the loss would be in autocommit mode."""
    from django.db import ProgrammingError
    from django.db.transaction import atomic

    with in_memory_halfway() as halfway:
        producer = halfway.producer(SqlTransactions(used))

        def session() -> Iterator[Any]:
            with producer.transaction() as tx:
                tx.send("orders", b"apples")
                yield tx

        steps = [session()]
        next(steps[0])
        with pytest.raises(ProgrammingError, match="closed database"), atomic():  # noqa: PT012  # the loss is inside
            used.cursor().execute("INSERT INTO orders VALUES ('part 1')")
            if ends == "freed":
                steps.clear()
            else:
                with ThreadPoolExecutor() as pool, suppress(RolledBackError):
                    pool.submit(next, steps.pop()).result()
            used.cursor().execute("INSERT INTO orders VALUES ('part 2')")
        with used.cursor() as cursor:
            cursor.execute("INSERT INTO orders VALUES ('plums')")
        with producer.transaction() as tx:
            tx.execute("INSERT INTO orders VALUES ('pears')")
            tx.send("orders", b"pears")
        halfway.advance("1h")
        assert [message.body for message in halfway.messages()] == [b"pears"]
    with sqlite3.connect(django_databases) as connection:
        assert connection.execute("SELECT item FROM orders").fetchall() == [("plums",), ("pears",)]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_block_that_is_lost_in_sqlite_in_memory_commits_no_half_of_what_is_inside(used: Any, depth: int) -> None:
    """Django does not close it: the atomic inside is rolled back, and the thread goes on."""
    from django.db import Error, connections
    from django.db.transaction import TransactionManagementError, atomic

    memory = used.copy()
    memory.settings_dict = {**used.settings_dict, "NAME": ":memory:"}
    former, connections["default"] = connections["default"], memory
    try:
        with memory.cursor() as cursor:
            cursor.execute("CREATE TABLE orders (item text)")
            block = DjangoDatabase("default").begin(None)
            block.execute("INSERT INTO orders VALUES ('apples')")
            with suppress(Error, TransactionManagementError), atomic(), ExitStack() as inner:
                cursor.execute("INSERT INTO orders VALUES ('part 1')")
                for _ in range(depth - 1):
                    inner.enter_context(atomic())
                del block
                with pytest.raises((Error, TransactionManagementError)):
                    cursor.execute("INSERT INTO orders VALUES ('part 2')")
                inner.close()
                cursor.execute("INSERT INTO orders VALUES ('part 3')")
            assert not memory.in_atomic_block
            assert cursor.execute("SELECT item FROM orders").fetchall() == []
    finally:
        connections["default"] = former


@pytest.mark.parametrize("is_first", [True, False])
def test_an_order_whose_commit_a_listener_has_stopped_is_not_committed_by_the_next_session(tmp_path: Path, *, is_first: bool) -> None:
    """SQLAlchemy then gives the connection back with the transaction open, and ours may have been called."""

    def refuse(_: object) -> None:
        raise ValueError("the service's")

    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'shop.db'}", pool_size=2, connect_args={"timeout": 0.05})
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE orders (item text)")
    outbox = SqlTransactions(engine)
    outbox.create_table()
    with engine.connect(), engine.connect():  # as a service has that has run for a while
        pass
    with in_memory_halfway() as halfway:
        producer = halfway.producer(outbox)
        with sqlalchemy.orm.Session(engine) as session:
            if is_first:
                sqlalchemy.event.listen(session.connection(), "commit", refuse)
            session.execute(sqlalchemy.text("INSERT INTO orders VALUES ('apples')"))
            producer.on_commit(session).send("orders", b"apples")
            if not is_first:
                sqlalchemy.event.listen(session.connection(), "commit", refuse)
            with pytest.raises(ValueError, match="the service's"):
                session.commit()
        with sqlalchemy.orm.Session(engine) as session:
            session.execute(sqlalchemy.text("INSERT INTO orders VALUES ('pears')"))
            session.commit()
            assert session.execute(sqlalchemy.text("SELECT item FROM orders")).all() == [("pears",)]
        halfway.advance("1h")
        assert halfway.messages() == []
    engine.dispose()


def test_an_order_whose_commit_the_database_has_refused_is_not_committed_by_the_next_session(tmp_path: Path) -> None:
    """SQLite keeps a transaction open whose COMMIT it refuses, as while another process reads."""
    file = tmp_path / "shop.db"
    engine = sqlalchemy.create_engine(f"sqlite:///{file}", pool_size=2, connect_args={"timeout": 0.05})
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE orders (item text)")
        connection.exec_driver_sql("INSERT INTO orders VALUES ('plums'), ('cherries')")
    outbox = SqlTransactions(engine)
    outbox.create_table()
    with in_memory_halfway() as halfway, closing(sqlite3.connect(file)) as other:
        producer = halfway.producer(outbox)
        with engine.connect(), engine.connect():  # as a service has that has run for a while
            pass
        with sqlalchemy.orm.Session(engine) as session:
            session.execute(sqlalchemy.text("INSERT INTO orders VALUES ('apples')"))
            producer.on_commit(session).send("orders", b"apples")
            reading = other.execute("SELECT item FROM orders")
            reading.fetchone()
            with pytest.raises(sqlalchemy.exc.OperationalError, match="locked"):
                session.commit()
        reading.close()
        other.execute("INSERT INTO orders VALUES ('quinces')")
        other.commit()
        with sqlalchemy.orm.Session(engine) as session:
            session.execute(sqlalchemy.text("INSERT INTO orders VALUES ('pears')"))
            session.commit()
        halfway.advance("1h")
        assert halfway.messages() == []
        found = [item for [item] in other.execute("SELECT item FROM orders")]
    assert found == ["plums", "cherries", "quinces", "pears"]
    engine.dispose()


def test_an_exception_while_a_connection_returns_to_its_pool_costs_the_pool_nothing(tmp_path: Path) -> None:
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'shop.db'}", pool_size=1, max_overflow=0, pool_timeout=0.1)
    outbox = SqlTransactions(engine)
    outbox.create_table()
    with in_memory_halfway() as halfway:
        producer = halfway.producer(outbox)

        def order() -> None:
            with sqlalchemy.orm.Session(engine) as session:
                producer.on_commit(session).send("orders", b"apples")

        line = 0
        while interrupt(order, line, {("sqlalchemy_transactions.py", "roll_back_left_open")}):
            gc.collect()
            engine.connect().close()
            line += 1
    assert line > 0
    engine.dispose()


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_cancellation_while_a_session_is_rolled_back_costs_the_pool_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    from sqlalchemy.dialects.sqlite.aiosqlite import AsyncAdapt_aiosqlite_connection as Raw

    calls, roll_back = [0], Raw.rollback

    def cancelled(raw: Raw) -> None:
        calls[0] += 1
        task = asyncio.current_task()
        assert task is not None
        if calls[0] == call:
            task.cancel()
        roll_back(raw)

    async def run() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}", pool_size=1, max_overflow=0, pool_timeout=0.1)
        outbox = AsyncSqlTransactions(engine)
        await outbox.create_table()
        with in_memory_halfway() as halfway:
            producer = halfway.async_producer(outbox)

            async def order() -> None:
                async with AsyncSession(engine) as session, session.begin():
                    (await producer.on_commit(session)).send("orders", b"apples")
                    raise ValueError("the service's")

            monkeypatch.setattr(Raw, "rollback", cancelled)
            with suppress(asyncio.CancelledError, ValueError):
                await asyncio.create_task(order())
            monkeypatch.setattr(Raw, "rollback", roll_back)
            gc.collect()
            async with engine.connect() as connection:
                assert (await connection.exec_driver_sql("SELECT 1")).scalar() == 1
        await engine.dispose()

    asyncio.run(run())
    assert calls[0] == min(call, 2), "SQLAlchemy's own, of the session and of the pool"
