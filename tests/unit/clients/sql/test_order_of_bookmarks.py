"""Each message takes effect once, or the service is told: whatever it does after an error, and wherever it begins."""

import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy.orm import Session

from halfway import Bookmark, BookmarkMovedError, MessageReader, SqlBookmarks
from halfway.clients.reading.committed import MessageBatch
from halfway.schemas.bookmark import BEGINNING
from tests.support.message_tables import append, batch_at, row


class Shop:
    """A table of messages, and the database of a service that reads it."""

    def __init__(self, folder: Path) -> None:
        self.table, self.file = folder / "messages", folder / "shop.db"
        with self.connect() as connection:
            connection.execute("CREATE TABLE effects (id TEXT)")

    def connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.file, isolation_level="IMMEDIATE")

    def append(self, *numbers: int, **changes: Any) -> None:
        """Write a message in a batch of its own for each number."""
        for number in numbers:
            append(self.table, [row((0, number), number, **changes)])

    def reader(self, max_rows: int = 1, topic: str | None = None) -> MessageReader:
        return MessageReader(str(self.table), max_rows=max_rows, topic=topic)

    def bookmarks(self) -> SqlBookmarks:
        return SqlBookmarks(self.connect, "shipping")

    def effects(self) -> list[str]:
        with self.connect() as connection:
            return [id_ for (id_,) in connection.execute("SELECT id FROM effects ORDER BY rowid")]


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def write_effects(bookmarks: SqlBookmarks, batch: MessageBatch, then: Callable[[], object] = lambda: None) -> None:
    with bookmarks.advance(batch) as tx:
        for message in batch.messages:
            tx.execute("INSERT INTO effects VALUES (?)", (message.transaction_id,))
        then()


def fail() -> None:
    raise sqlite3.OperationalError("disk I/O error")


def test_after_a_block_that_failed_its_batch_is_not_passed_over(shop: Shop) -> None:
    shop.append(0, 1, 2, 3)
    bookmarks = shop.bookmarks()
    batches = shop.reader().read(after=bookmarks.load())
    write_effects(bookmarks, next(batches))
    with pytest.raises(sqlite3.OperationalError):
        write_effects(bookmarks, next(batches), then=fail)
    bookmarks.load()
    with pytest.raises(BookmarkMovedError, match=r"0\.2 is not the next one after 0\.0.*leave the loop.*after=bookmarks\.load\(\)"):
        write_effects(bookmarks, next(batches))
    for batch in shop.reader().read(after=bookmarks.load()):
        write_effects(bookmarks, batch)
    assert shop.effects() == ["t0", "t1", "t2", "t3"]


def test_of_two_instances_none_repeats_a_part_of_the_other_ones_batch(shop: Shop) -> None:
    shop.append(0, 1, 2, 3, 4)
    mine, others = shop.bookmarks(), shop.bookmarks()
    my_batches, other_batches = shop.reader(2).read(after=mine.load()), shop.reader(3).read(after=others.load())
    write_effects(others, next(other_batches))
    with pytest.raises(BookmarkMovedError, match="another instance"):
        write_effects(mine, next(my_batches))
    mine.load()
    with pytest.raises(BookmarkMovedError, match=r"0\.3 is not the next one after 0\.2"):
        write_effects(mine, next(my_batches))
    write_effects(others, next(other_batches))
    assert shop.effects() == ["t0", "t1", "t2", "t3", "t4"]


def test_a_reader_that_began_elsewhere_than_at_the_bookmark_is_refused(shop: Shop) -> None:
    shop.append(0, 1, 2)
    first = shop.bookmarks()
    for batch in shop.reader(3).read(after=first.load()):
        write_effects(first, batch)
    shop.append(3)
    for after, told in ((None, "after 0.2"), (Bookmark(0, 1), "after 0.2")):
        again = shop.bookmarks()
        again.load()
        with pytest.raises(BookmarkMovedError, match=told):
            write_effects(again, next(shop.reader(9).read(after=after)))
    assert shop.effects() == ["t0", "t1", "t2"]


def test_a_new_bookmark_begins_at_the_end_and_stays_there_whatever_fails(shop: Shop) -> None:
    shop.append(0)
    bookmarks, reader = shop.bookmarks(), shop.reader()
    for _ in range(2):
        began = bookmarks.load(reader.end())
        assert began == Bookmark(0, 0)
        shop.append(1, 2)
        with pytest.raises(sqlite3.OperationalError):
            write_effects(bookmarks, next(reader.read(after=began)), then=fail)
    for batch in reader.read(after=shop.bookmarks().load()):
        with pytest.raises(ValueError, match="call load"):  # the former instance must look again
            write_effects(bookmarks, batch)
        break
    bookmarks.load(reader.end())
    for batch in shop.reader(9).read(after=bookmarks.load()):
        write_effects(bookmarks, batch)
    assert shop.effects() == ["t1", "t1", "t2", "t2"]  # Each was appended twice.


def test_a_new_bookmark_at_the_end_of_an_empty_table_stays_there_too(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """Else what is committed before its first effect would be before the end that the next start finds."""
    append(shop.table, [])
    for _ in range(2):
        began = shop.bookmarks().load(shop.reader().end())
        assert list(shop.reader().read(after=began)) == []
    assert caplog.text == ""
    shop.append(0)
    bookmarks = shop.bookmarks()
    for batch in shop.reader().read(after=bookmarks.load(shop.reader().end())):
        write_effects(bookmarks, batch)
    assert shop.effects() == ["t0"]
    shop.connect().execute("DELETE FROM halfway_bookmarks").connection.commit()
    again = shop.bookmarks()
    assert again.load() is None
    for batch in shop.reader().read(after=BEGINNING):  # the same as no bookmark
        write_effects(again, batch)
    assert shop.effects() == ["t0", "t0"]


def test_without_a_bookmark_nothing_is_passed_over(shop: Shop) -> None:
    shop.append(0, 1, 2)
    bookmarks = shop.bookmarks()
    batches = shop.reader().read(after=bookmarks.load())
    first = next(batches)
    with pytest.raises(sqlite3.OperationalError):
        write_effects(bookmarks, first, then=fail)
    for later in (next(batches), next(shop.reader().read(after=first.bookmark))):
        bookmarks.load()
        with pytest.raises(BookmarkMovedError, match=r"0\.1 is not the next one after the beginning"):
            write_effects(bookmarks, later)
    assert shop.effects() == []


def test_what_a_session_has_written_before_it_is_refused_is_rolled_back(shop: Shop) -> None:
    engine = sqlalchemy.create_engine(f"sqlite:///{shop.file}")
    shop.append(0)
    [batch] = shop.reader().read()
    bookmarks = SqlBookmarks(engine, "shipping")
    bookmarks.load()
    with Session(engine) as session:
        for _ in range(2):
            session.execute(sqlalchemy.text("INSERT INTO effects VALUES ('t0')"))
            with suppress(BookmarkMovedError), bookmarks.advance(batch, session):
                pass
        assert not session.in_transaction()
    assert shop.effects() == ["t0"]


@pytest.mark.parametrize("leaves_out", [True, False])
def test_a_batch_without_messages_may_be_left_out(shop: Shop, leaves_out: bool) -> None:
    shop.append(0)
    bookmarks = shop.bookmarks()
    for numbers in ((1,), (3,)):
        for batch in shop.reader(topic="orders").read(after=bookmarks.load()):
            if len(batch) or not leaves_out:
                write_effects(bookmarks, batch)
        shop.append(*numbers, topic="invoices")
        shop.append(numbers[0] + 1)
    for batch in shop.reader(topic="orders").read(after=bookmarks.load()):
        write_effects(bookmarks, batch)
    assert shop.effects() == ["t0", "t2", "t4"]


def test_a_follower_passes_over_batches_without_messages(shop: Shop) -> None:
    """They are not yielded in each case: what comes after them must follow the bookmark nevertheless."""
    bookmarks, reader = shop.bookmarks(), shop.reader(topic="orders")
    shop.append(0)
    for number, batch in enumerate(reader.follow(after=bookmarks.load(), poll_s=0.01), 1):
        write_effects(bookmarks, batch)
        if number == 4:
            reader.stop()
        shop.append(10 * number, topic="invoices")
        shop.append(10 * number + 1)
    assert shop.effects() == ["t0", "t11", "t21", "t31"]


def test_what_is_no_batch_is_refused(shop: Shop) -> None:
    bookmarks = shop.bookmarks()
    bookmarks.load()
    wrong: Any = batch_at((0, 1)).bookmark
    with pytest.raises(TypeError, match="advance takes a batch as MessageReader yields it, not a Bookmark"), bookmarks.advance(wrong):
        pass
