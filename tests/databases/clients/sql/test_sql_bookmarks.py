"""The bookmark moves with the effect, on real databases, in each way that a service may reach them."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from halfway import Bookmark, BookmarkMovedError, SqlBookmarks
from halfway.clients.sql.savepoint_transaction import SavepointTransaction
from halfway.testing import in_memory_halfway
from tests.support.message_tables import batch_at
from tests.support.sql_world import SqlWorld


@pytest.fixture(autouse=True)
def _without_table(shop: SqlWorld) -> None:
    shop.run("DROP TABLE IF EXISTS halfway_bookmarks")


def bookmarks(shop: SqlWorld, name: str = "shipping") -> SqlBookmarks:
    return SqlBookmarks(shop.given, name)


def order(transaction: Any, item: str) -> None:
    """Write an order in the way of the database."""
    cursor = transaction.raw().cursor()
    cursor.execute(f"INSERT INTO orders (item) VALUES ('{item}')")
    cursor.close()


def test_effect_and_bookmark_commit_together(shop: SqlWorld) -> None:
    mine = bookmarks(shop)
    assert mine.load() is None
    for place in (Bookmark(0, 7), Bookmark(0, 8), Bookmark(1, 0)):
        with mine.advance(batch_at(place)) as tx:
            order(tx, str(place))
        assert bookmarks(shop).load() == place
    assert bookmarks(shop, "another reader").load() is None
    assert shop.orders() == ["0.7", "0.8", "1.0"]


def test_where_to_begin_is_stored_once(shop: SqlWorld) -> None:
    assert bookmarks(shop).load(Bookmark(0, 3)) == Bookmark(0, 3)
    assert bookmarks(shop).load() == bookmarks(shop).load(Bookmark(0, 9)) == Bookmark(0, 3)
    mine = bookmarks(shop)
    mine.load()
    with mine.advance(batch_at((0, 4), Bookmark(0, 3))):
        pass
    assert bookmarks(shop).load(Bookmark(0, 9)) == Bookmark(0, 4)


def test_readers_that_start_together_make_the_table_once(shop: SqlWorld) -> None:
    for _ in range(5):
        shop.run("DROP TABLE IF EXISTS halfway_bookmarks")
        together = threading.Barrier(4)

        def load(name: str, together: threading.Barrier = together) -> Bookmark | None:
            mine = bookmarks(shop, name)
            together.wait(30)
            return mine.load()

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(load, "abcd")) == [None] * 4


def test_a_block_that_fails_moves_nothing_and_asks_for_the_bookmark_again(shop: SqlWorld) -> None:
    mine = bookmarks(shop)
    mine.load()
    for last in (None, Bookmark(0, 1)):
        with suppress(ZeroDivisionError), mine.advance(batch_at((0, 5))) as tx:
            order(tx, "lost")
            order(tx, str(1 // 0))
        with pytest.raises(ValueError, match="call load"), mine.advance(batch_at((0, 6))):
            pass
        assert mine.load() == last
        if last is None:
            with mine.advance(batch_at((0, 1))):
                pass
    assert shop.orders() == []


def test_of_two_instances_one_goes_on(shop: SqlWorld) -> None:
    first, second = bookmarks(shop), bookmarks(shop)
    for place in (Bookmark(0, 1), Bookmark(0, 2)):
        first.load()
        second.load()
        with first.advance(batch_at(place)) as tx:
            order(tx, f"first {place}")
        with (
            pytest.raises(BookmarkMovedError, match=r"'shipping' on from .*: nothing was written here"),
            second.advance(batch_at(place)) as tx,
        ):
            order(tx, f"second {place}")
    assert shop.orders() == ["first 0.1", "first 0.2"]


def test_an_instance_waits_for_the_other_ones_transaction(shop: SqlWorld) -> None:
    first, second = bookmarks(shop), bookmarks(shop)
    first.load()
    with first.advance(batch_at((0, 1))):
        pass
    first.load()
    second.load()
    ended: list[BaseException | None] = []

    def late() -> None:
        try:
            with second.advance(batch_at((0, 2))) as tx:
                order(tx, "second")
            ended.append(None)
        except Exception as error:
            ended.append(error)

    other = threading.Thread(target=late)
    with first.advance(batch_at((0, 3))) as tx:
        order(tx, "first")
        other.start()
        other.join(0.5)
        assert other.is_alive()
    other.join(30)
    assert isinstance(ended[0], BookmarkMovedError)
    assert shop.orders() == ["first"]


@pytest.mark.parametrize("shop", ["postgresql-dbapi", "postgresql-sqlalchemy", "mariadb-dbapi"], indirect=True)
@pytest.mark.parametrize("last", [None, Bookmark(0, 1)])
def test_a_thread_that_was_given_up_and_commits_late_doubles_no_effect(
    shop: SqlWorld, monkeypatch: pytest.MonkeyPatch, last: Bookmark | None
) -> None:
    """A cancelled `asyncio.to_thread` goes on, beside the next try with the same object."""
    mine = bookmarks(shop)
    assert mine.load(last) == last
    late = mine.advance(batch_at((0, 2), last))
    order(late.__enter__(), "late")
    assert mine.load() == last, "the late thread has not committed yet"
    set_savepoint = SavepointTransaction.set_savepoint

    def while_it_commits(transaction: SavepointTransaction) -> None:
        late.__exit__(None, None, None)
        set_savepoint(transaction)

    monkeypatch.setattr(SavepointTransaction, "set_savepoint", while_it_commits)
    with pytest.raises(BookmarkMovedError, match="nothing was written here"), mine.advance(batch_at((0, 3), last)) as tx:
        order(tx, "late, and what came after it")
    assert shop.orders() == ["late"]


def advance_and_roll_back(mine: SqlBookmarks, session: Session | None) -> None:
    with mine.advance(batch_at((0, 5)), session) as tx:
        order(tx, "lost")
        tx.connection.rollback()
        order(tx, "doubled")


def test_a_block_that_has_rolled_its_transaction_back_writes_nothing(shop: SqlWorld) -> None:
    """As after a deadlock, or a duplicate key. What it has written since would commit without the bookmark."""
    with Session(shop.given) if isinstance(shop.given, Engine) else nullcontext() as session:
        mine = bookmarks(shop)
        for last in (None, Bookmark(0, 1)):
            assert mine.load() == last
            with pytest.raises(Exception, match=r"was over before its block|'atomic' block is active"):
                advance_and_roll_back(mine, session)
            with pytest.raises(ValueError, match="call load"), mine.advance(batch_at((0, 6))):
                pass
            mine.load()
            if last is None:
                with mine.advance(batch_at((0, 1)), session):
                    pass
    if shop.kind != "sqlite":  # It never rolls back by itself; after a rollback by hand sqlite3 commits each statement.
        assert shop.orders() == []


def test_a_block_that_has_committed_by_itself_is_refused(shop: SqlWorld) -> None:
    """What it has written since would commit in another transaction than the bookmark."""
    mine = bookmarks(shop)
    mine.load()

    def commit_halfway() -> None:
        with mine.advance(batch_at((0, 5))) as tx:
            order(tx, "with the bookmark")
            tx.raw().commit()
            order(tx, "without it")

    with pytest.raises(BookmarkMovedError, match="was over before its block"):
        commit_halfway()
    assert mine.load() == Bookmark(0, 5)
    if shop.kind != "sqlite":
        assert shop.orders() == ["with the bookmark"]


@pytest.mark.parametrize("kind", ["session", "connection", "connection of a session", "connection of a block"])
def test_a_block_in_the_block_of_the_same_transaction_is_refused_before_it_commits(shop: SqlWorld, kind: str) -> None:
    """Its end would commit the outer one's effect without the outer one's bookmark or messages."""
    if not isinstance(shop.given, Engine):
        pytest.skip("sessions and connections are SQLAlchemy's")
    shop.outbox.create_table()
    mine = bookmarks(shop)
    with shop.given.connect() if kind == "connection" else Session(shop.given) as given, in_memory_halfway() as halfway:
        using: Any = None if kind == "connection of a block" else given
        producer = halfway.producer(shop.outbox)

        def publish(using: Any, item: str, then: Callable[[Any], None] = lambda _: None) -> None:
            with producer.transaction(using) as tx:
                order(tx._transaction, item)
                tx.send("orders", item.encode())
                then(tx.connection)

        def read_on(using: Any, item: str, then: Callable[[Any], None] = lambda _: None) -> None:
            with mine.advance(batch_at((0, 1)), using) as tx:
                order(tx, item)
                then(tx.connection)

        def inner(outer: Any) -> Any:
            return outer.connection() if kind == "connection of a session" else outer

        mine.load()
        with pytest.raises(TypeError, match=r"has a block already.*on_commit"):
            read_on(using, "apples", then=lambda outer: publish(inner(outer), "apples"))
        mine.load()
        with pytest.raises(TypeError, match="has a block already"):
            publish(using, "pears", then=lambda outer: read_on(inner(outer), "pears"))
        mine.load()
        publish(using, "plums")
        read_on(using, "quinces")  # one after the other is right
        assert [message.body for message in halfway.messages()] == [b"plums"]
    assert (shop.orders(), bookmarks(shop).load()) == (["plums", "quinces"], Bookmark(0, 1))


def test_wrong_use_is_refused(shop: SqlWorld) -> None:
    mine = bookmarks(shop)
    with pytest.raises(ValueError, match="call load"), mine.advance(batch_at((0, 1))):
        pass
    mine.load()
    with mine.advance(batch_at((0, 1))):
        pass
    with pytest.raises(BookmarkMovedError, match=r"up to 0\.1 is not the next one after 0\.1"), mine.advance(batch_at((0, 1))):
        pass
    with pytest.raises(ValueError, match="1 to 255"):
        bookmarks(shop, "")


@pytest.mark.parametrize("name", ["Shipping", "shipping ", "shípping"])
def test_a_name_that_the_database_takes_for_another_is_refused(name: str, shop: SqlWorld) -> None:
    """It would go on from the other reader's bookmark."""
    one, other = bookmarks(shop), bookmarks(shop, name)
    one.load()
    with one.advance(batch_at((0, 7))):
        pass
    if shop.kind == "mariadb":
        with pytest.raises(ValueError, match="for the same"):
            other.load()
    else:
        assert other.load() is None
