"""Reads committed messages from a table in Spark's catalog, which alone knows where its files are."""

import time
from collections.abc import Callable, Iterator

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from halfway.clients.reading.committed import MessageBatch
from halfway.clients.reading.message_rows import MESSAGE_SCHEMA, Wanted, in_order
from halfway.pipelines.storage.delta_tables import read_table, table_id_of, table_name, verify_exists
from halfway.schemas.bookmark import BEGINNING, Bookmark
from halfway.schemas.errors import TableError
from halfway.schemas.settings import StorageSettings
from halfway.schemas.tables import Table

_LOOK_S = 1.0
_LOOK_AT_ID_S = 30.0


def catalog_messages(
    spark: SparkSession,
    storage: StorageSettings,
    position: Bookmark | None,
    wanted: Wanted,
    *,
    goes_on: Callable[[], bool],
    warn_of_ahead: Callable[[Bookmark, Bookmark | None], None],
) -> Iterator[MessageBatch]:
    """Yield what `messages` holds after a bookmark, as `MessageReader` does.

    Args:
        spark: the session.
        storage: where the tables are.
        position: the bookmark; None to read from the beginning.
        wanted: which messages, and how many at a time.
        goes_on: asked when everything was read. While it is true, new messages are waited for.
        warn_of_ahead: gets a bookmark that the table has not come to yet, and that of its last message.

    Raises:
        TableError: there is no table yet, or it was recreated since the first look.
        OwnershipError: the table is gone, or elsewhere.
    """
    verify_exists(spark, storage, Table.MESSAGES)
    table_id, looked_s = table_id_of(spark, storage, Table.MESSAGES), time.monotonic()
    unmoved = position
    while True:
        if time.monotonic() - looked_s >= _LOOK_AT_ID_S:
            if table_id_of(spark, storage, Table.MESSAGES) != table_id:
                name = table_name(storage, Table.MESSAGES)
                raise TableError(
                    f"the table {name} was recreated since it was first read: bookmarks are of the former one. Begin again without one"
                )
            looked_s = time.monotonic()
        rows = read_table(spark, storage, Table.MESSAGES).withColumn("epoch", F.coalesce("epoch", F.lit(0)))
        for first, last in _spans(rows if position is None else rows.where(_is_after(position)), wanted.max_rows):
            is_within = _is_after(Bookmark(first.epoch, first.batch_id - 1)) & ~_is_after(last)
            found = rows.where(is_within & _is_wanted(wanted)).select(*MESSAGE_SCHEMA.names).toArrow().cast(MESSAGE_SCHEMA)
            yield MessageBatch(last, in_order(wanted.of(found)))
            position = last
        if unmoved is not None and position is unmoved and (end := _end_of(rows) or BEGINNING) < unmoved:
            warn_of_ahead(unmoved, None if end == BEGINNING else end)
        unmoved = None
        if not goes_on():
            return
        time.sleep(_LOOK_S)


def _end_of(rows: DataFrame) -> Bookmark | None:
    [[last]] = rows.agg(F.max(F.struct("epoch", "batch_id"))).collect()
    return None if last is None else Bookmark(*last)


def _is_wanted(wanted: Wanted) -> Column:
    """Return the condition on what is wanted, so that the rest does not pass through the driver."""
    is_topic = F.lit(True) if wanted.topic is None else F.col("topic") == F.lit(wanted.topic)
    return is_topic & (F.col("tags").isin(sorted(wanted.tags)) if wanted.tags else F.lit(True))


def _is_after(bookmark: Bookmark) -> Column:
    epoch, batch_id = F.col("epoch"), F.col("batch_id")
    return (epoch > bookmark.epoch) | ((epoch == bookmark.epoch) & (batch_id > bookmark.batch_id))


def _spans(rows: DataFrame, max_rows: int) -> Iterator[tuple[Bookmark, Bookmark]]:
    """Yield the first and the last bookmark of as many whole batches as fit."""
    first = last = None
    size = 0
    for epoch, batch_id, count in rows.groupBy("epoch", "batch_id").count().orderBy("epoch", "batch_id").collect():
        if first is not None and last is not None and size + count > max_rows:
            yield first, last
            first, size = None, 0
        last = Bookmark(epoch, batch_id)
        first, size = first or last, size + count
    if first is not None and last is not None:
        yield first, last
