from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from examples.typed_orders import append_batch, last_bookmark, messages_after, stream
from halfway import Bookmark
from halfway.conf.loader import load_settings
from halfway.pipelines.storage.delta_tables import append_once, claim_tables
from halfway.schemas.tables import MESSAGES_SCHEMA, Table
from tests.support.message_tables import message_rows


@pytest.mark.slow
def test_batch_and_stream_go_on_from_one_bookmark(spark: SparkSession, tmp_path: Path) -> None:
    storage = load_settings(environ={}, overrides={"storage.warehouse": str(tmp_path)}).storage
    claim_tables(spark, storage, "query")
    messages, orders, checkpoint = (str(tmp_path / name) for name in ("messages", "orders", "checkpoint"))

    def commit(at: Bookmark) -> None:
        rows = message_rows(at, 2, body=b'{"item": "apples", "quantity": 3}')
        append_once(spark.createDataFrame(rows, MESSAGES_SCHEMA), storage, Table.MESSAGES, "query", at.batch_id)

    def written() -> list[tuple[int, str, int]]:
        rows = spark.read.format("delta").load(orders).orderBy("batch_id", "transaction_id").collect()
        return [(row["batch_id"], row["order"]["item"], row["order"]["quantity"]) for row in rows]

    for batch_id in range(2):
        commit(Bookmark(0, batch_id))
        for _ in range(2):  # a second run finds nothing new
            append_batch(spark, messages, orders)
    bookmark = last_bookmark(spark, orders)
    assert bookmark == Bookmark(0, 1)
    for batch_id in range(2, 4):
        commit(Bookmark(0, batch_id))
        stream(spark, messages, orders, checkpoint, bookmark)
    assert last_bookmark(spark, orders) == Bookmark(0, 3)
    assert written() == [(batch_id, "apples", 3) for batch_id in range(4) for _ in range(2)]
    spark.sql(f"ALTER TABLE delta.`{messages}` SET TBLPROPERTIES ('delta.appendOnly' = 'false')")
    spark.sql(f"UPDATE delta.`{messages}` SET body = NULL WHERE batch_id = 3")  # as an erasure does
    commit(Bookmark(0, 4))
    stream(spark, messages, orders, checkpoint, bookmark)
    assert [batch_id for batch_id, *_ in written()] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    spark.sql(f"DELETE FROM delta.`{orders}` WHERE batch_id > 1")
    append_batch(spark, messages, orders)
    assert [batch_id for batch_id, *_ in written()] == [0, 0, 1, 1, 2, 2, 4, 4]


def test_rows_without_an_epoch_are_those_of_epoch_0(spark: SparkSession) -> None:
    """Such as an earlier version has written."""
    rows = [(None, 0), (None, 1), (0, 2), (1, 0)]
    table = spark.createDataFrame(rows, "epoch INT, batch_id LONG")
    for bookmark, left in ((Bookmark(0, 0), 3), (Bookmark(0, 1), 2), (Bookmark(0, 2), 1), (Bookmark(1, 0), 0)):
        assert messages_after(table, bookmark).count() == left
