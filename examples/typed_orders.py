"""Reads committed messages with Spark: in a batch, as a stream, and with one and the same bookmark.

Both append the orders of a topic to a Delta table, exactly once. That table holds the bookmark too: each row has the
epoch and batch_id of its message.
"""

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from halfway import Bookmark

ORDER = "item STRING, quantity INT"


def messages_after(messages: DataFrame, bookmark: Bookmark | None) -> DataFrame:
    """Return the messages after a bookmark. Delta skips the files before it by their statistics."""
    if bookmark is None:
        return messages
    epoch, batch_id = F.col("epoch"), F.col("batch_id")
    same = epoch == bookmark.epoch if bookmark.epoch else (epoch == 0) | epoch.isNull()  # A table of an earlier version.
    return messages.where((epoch > bookmark.epoch) | (same & (batch_id > bookmark.batch_id)))


def typed(messages: DataFrame) -> DataFrame:
    """Return the orders in the messages of the topic `orders`. Bodies are JSON, and NULL where a message was erased."""
    epoch, order = F.coalesce("epoch", F.lit(0)), F.from_json(F.col("body").cast("string"), ORDER)
    found = messages.where((F.col("topic") == "orders") & F.col("body").isNotNull())
    return found.select("transaction_id", epoch.alias("epoch"), "batch_id", "committed_at", order.alias("order"))


def last_bookmark(spark: SparkSession, orders: str) -> Bookmark | None:
    """Return the bookmark up to which a table of orders is written; None if it does not exist yet."""
    if not DeltaTable.isDeltaTable(spark, orders):
        return None
    [last] = spark.read.format("delta").load(orders).agg(F.max(F.struct("epoch", "batch_id"))).collect()
    return None if last[0] is None else Bookmark(*last[0])


def append_batch(spark: SparkSession, messages: str, orders: str) -> None:
    """Append what came since the last run. Orders and bookmark are the same rows, so they commit together.

    Run one at a time: Delta takes what two runs append.
    """
    found = spark.read.format("delta").load(messages)
    typed(messages_after(found, last_bookmark(spark, orders))).write.format("delta").mode("append").save(orders)


def stream(spark: SparkSession, messages: str, orders: str, checkpoint: str, after: Bookmark | None) -> None:
    """Append as a stream what comes after a bookmark. It ends when it has read everything; a later run goes on.

    From its first run on, the checkpoint knows what was read. Give the same bookmark with the same checkpoint: a stream
    that was killed may be in the middle of a large batch, of which the table has some rows. `last_bookmark` is right
    only if the last run has ended by itself.
    """
    # An erasure changes rows, which would end the stream.
    table = spark.readStream.format("delta").option("skipChangeCommits", "true").load(messages)
    found = messages_after(table, after)
    written = typed(found).writeStream.format("delta").option("checkpointLocation", checkpoint)
    written.trigger(availableNow=True).start(orders).awaitTermination()
