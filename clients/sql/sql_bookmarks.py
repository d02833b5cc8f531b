"""Keeps a reader's bookmark in the service's own database, and moves it in the transaction of the effect."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from halfway.clients.reading.committed import MessageBatch
from halfway.clients.sql.databases import database_of
from halfway.clients.sql.drivers import Driver, driver_of, errors_of, values_of, with_table
from halfway.clients.sql.savepoint_transaction import OVER
from halfway.clients.transaction import DatabaseTransaction
from halfway.schemas.bookmark import Bookmark
from halfway.schemas.errors import BookmarkMovedError
from halfway.schemas.records import type_of

_TABLE = "halfway_bookmarks"
_DDL = (f"CREATE TABLE IF NOT EXISTS {_TABLE} (name VARCHAR(255) NOT NULL PRIMARY KEY, epoch INTEGER NOT NULL, batch_id BIGINT NOT NULL)",)
_LOCK_WAIT_MS = 5_000
_READ_ON = "read on with a new reader.follow(after=bookmarks.load())"


class SqlBookmarks:
    """The bookmark of one reader, in the table `halfway_bookmarks` of the service's database (docs/reading.md).

    A transaction moves the bookmark from where this instance has it, or fails. So an effect that is written in the same
    transaction happens exactly once, also if the service is killed anywhere, or runs twice by mistake. The table is
    made on first use if it is missing; `ddl` returns the statements for a migration of your own.

    Args:
        database: a SQLAlchemy `Engine`; `django.db.connections["default"]`; or a function without arguments that
            returns a new DB-API connection of sqlite3, psycopg 3 or PyMySQL.
        name: tells readers apart that share the database; at most 255 characters.

    Raises:
        TypeError: `database` is none of these.
        ValueError: the name is empty or too long.

    Example:
        bookmarks = SqlBookmarks(engine, "shipping")
        for batch in reader.follow(after=bookmarks.load()):
            with bookmarks.advance(batch) as tx:
                for message in batch.messages:
                    tx.execute(insert(shipments).values(shipment_of(message)))
    """

    def __init__(self, database: Any, name: str) -> None:
        """Store the configuration. Does not connect."""
        if not 1 <= len(name) <= 255:
            raise ValueError("the name of a bookmark has 1 to 255 characters")
        self._database = database_of(database)
        self._name = name
        self._position: Bookmark | None = None
        self._is_loaded = False

    @staticmethod
    def ddl() -> tuple[str, ...]:
        """Return the statements that create the table in SQLite, PostgreSQL and MariaDB, for your migrations."""
        return _DDL

    def load(self, begin: Bookmark | None = None) -> Bookmark | None:
        """Return the bookmark to read on from; None to begin with the first message. Makes the table if it is missing.

        Args:
            begin: what to store and return if none is stored yet, such as `reader.end()`: what comes from now on.

        Raises:
            ValueError: the database takes the name for that of another reader.
            Exception: of the driver, if the database cannot be reached, or the table cannot be created.
        """
        with self._database.idle_connection() as connection:
            look = partial(self._stored, connection, begin)
            self._position = with_table(connection, _TABLE, _DDL, _LOCK_WAIT_MS, look)
        self._is_loaded = True
        return self._position

    @contextmanager
    def advance(self, batch: MessageBatch, using: Any = None) -> Iterator[DatabaseTransaction]:
        """Move the bookmark past a batch, and run a block in the same transaction. It commits at the end of the block.

        After an exception nothing is written. Read on with a new `read` or `follow` after `load()`: the reader that has
        yielded this batch goes on to the next one. Call it for each batch that holds messages, also if the block has
        nothing to do with them.

        Args:
            batch: the one whose effect the block writes.
            using: a SQLAlchemy `Session` or `Connection` to use its transaction; None for a new one.

        Yields:
            The transaction. `execute` runs a statement; `connection` is the connection or session.

        Raises:
            BookmarkMovedError: another instance has moved the bookmark since it was loaded, the batch is not the next
                one after it, or the block has ended its transaction itself and gone on.
            RolledBackError: the block has committed the session or connection itself, or Django rolls the block back.
            ValueError: the bookmark was not loaded.
            SettingsError: the connection commits each statement by itself, or Django is not in autocommit mode.
            TypeError: another block is to end the transaction, or `batch` is no batch.
            Exception: what the block or the driver raises. If the commit failed, `load` tells whether it counts.
        """
        if not isinstance(batch, MessageBatch):
            raise TypeError(f"advance takes a batch as MessageReader yields it, not {type_of(batch)}")
        transaction = self._database.begin(using)
        try:
            was = self._place_before(batch)
            self._is_loaded = False
            transaction.set_savepoint()
            with transaction.errors_as_the_services():
                self._move(transaction.raw(), was, batch.bookmark)
            yield transaction
            transaction.commit(lambda: self._verify_not_over(transaction))
        except BaseException as error:
            transaction.abandon_after(error)
            raise
        self._position, self._is_loaded = batch.bookmark, True

    def _place_before(self, batch: MessageBatch) -> Bookmark | None:
        """Return where the bookmark is, which the batch must follow. Another thread may change it after that."""
        position = self._position
        if not self._is_loaded:
            raise ValueError(f"call load() first, and {_READ_ON}")
        if not batch.follows(position):
            raise BookmarkMovedError(
                f"the batch up to {batch.bookmark} is not the next one after {position or 'the beginning'}, where the bookmark "
                f"{self._name!r} is: its messages would take effect twice, or others before it never. Call advance for each batch that "
                f"holds messages. After an error leave the loop, and {_READ_ON}"
            )
        return position

    def _move(self, connection: Any, was: Bookmark | None, bookmark: Bookmark) -> None:
        """Move the bookmark in the connection's transaction. Another instance waits from here to the commit."""
        driver = driver_of(connection)
        values: dict[str, object] = {"name": self._name, **bookmark._asdict()}
        if was is None:
            statement = _insert_by(driver)
        else:
            name, epoch, batch_id = (driver.parameter(column) for column in ("name", "epoch", "batch_id"))
            was_epoch, was_batch = driver.parameter("was_epoch"), driver.parameter("was_batch")
            statement = f"UPDATE {_TABLE} SET epoch = {epoch}, batch_id = {batch_id} "
            statement += f"WHERE name = {name} AND epoch = {was_epoch} AND batch_id = {was_batch}"
            values |= {"was_epoch": was.epoch, "was_batch": was.batch_id}
        with closing(connection.cursor()) as cursor:
            try:
                cursor.execute(statement, values)
            except errors_of(connection).IntegrityError as error:
                raise self._moved(was) from error
            if cursor.rowcount != 1:
                raise self._moved(was)

    def _verify_not_over(self, transaction: DatabaseTransaction) -> None:
        """Refuse to commit in another transaction than the one that has moved the bookmark."""
        try:
            transaction.release_savepoint()
        except errors_of(transaction.raw()).Error as error:
            raise BookmarkMovedError(
                f"the transaction that moves the bookmark {self._name!r} {OVER}. Let such an error leave the block and the loop, "
                f"and {_READ_ON}"
            ) from error

    def _moved(self, was: Bookmark | None) -> BookmarkMovedError:
        return BookmarkMovedError(
            f"another instance has moved the bookmark {self._name!r} on from {was or 'the beginning'}: nothing was written here. "
            f"Let one instance read with a name at a time, or leave the loop, and {_READ_ON}"
        )

    def _stored(self, connection: Any, begin: Bookmark | None) -> Bookmark | None:
        driver = driver_of(connection)
        with driver.short_transaction(connection, _LOCK_WAIT_MS, writes=False), closing(connection.cursor()) as cursor:
            cursor.execute(f"SELECT name, epoch, batch_id FROM {_TABLE} WHERE name = {driver.parameter('name')}", {"name": self._name})
            row = cursor.fetchone()
        if row is None and begin is not None:
            with driver.short_transaction(connection, _LOCK_WAIT_MS), closing(connection.cursor()) as cursor:
                cursor.execute(_insert_by(driver), {"name": self._name, **begin._asdict()})
        if row is None:
            return begin
        name, epoch, batch_id = values_of(row)
        if name != self._name:  # MariaDB compares without case, accents and spaces at the end.
            raise ValueError(f"the database takes the names {name!r} and {self._name!r} for the same: give this reader another one")
        return Bookmark(int(epoch), int(batch_id))


def _insert_by(driver: Driver) -> str:
    values = ", ".join(driver.parameter(column) for column in ("name", "epoch", "batch_id"))
    return f"INSERT INTO {_TABLE} (name, epoch, batch_id) VALUES ({values})"
