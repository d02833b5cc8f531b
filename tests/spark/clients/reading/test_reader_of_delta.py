"""`MessageReader` on tables that Spark writes and compacts, as the job does: what it yields never depends on that."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from halfway import Bookmark, MessageReader
from halfway.conf.loader import load_settings
from halfway.pipelines.storage.compaction import compact_tables
from halfway.pipelines.storage.delta_tables import append_id, append_once, claim_tables, table_name
from halfway.schemas.settings import StorageSettings
from halfway.schemas.tables import MESSAGES_SCHEMA, Table
from tests.support.message_tables import message_rows


def append(spark: SparkSession, storage: StorageSettings, query: str, at: Bookmark, rows: int = 3) -> list[tuple[Bookmark, int]]:
    """Append a batch as the job does, and return what a reader is to see of it."""
    found = spark.createDataFrame(message_rows(at, rows), MESSAGES_SCHEMA)
    append_once(found, storage, Table.MESSAGES, append_id(query, Table.MESSAGES), at.batch_id)
    return [(at, number) for number in range(rows)]


def read(storage: StorageSettings, after: Bookmark | None = None) -> list[tuple[Bookmark, int]]:
    batches = MessageReader(storage, max_rows=4).read(after)
    return [(message.bookmark, message.op_offset or 0) for batch in batches for message in batch.messages]


@pytest.fixture
def storage(spark: SparkSession, tmp_path: Path) -> StorageSettings:
    made = load_settings(environ={}, overrides={"storage.warehouse": str(tmp_path)}).storage
    claim_tables(spark, made, "first")
    return made


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_bookmark_holds_under_compaction_vacuum_log_expiry_replay_and_adoption(spark: SparkSession, storage: StorageSettings) -> None:
    """What a reader meets that was away for a month: files and commits are gone, another checkpoint writes."""
    name = table_name(storage, Table.MESSAGES)
    kept = ", ".join(f"'delta.{what}RetentionDuration' = 'interval 0 seconds'" for what in ("log", "deletedFile"))
    spark.sql(f"ALTER TABLE {name} SET TBLPROPERTIES ('delta.checkpointInterval' = '5', {kept})")
    spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    seen = [each for batch_id in range(4) for each in append(spark, storage, "first", Bookmark(0, batch_id))]
    assert read(storage) == seen
    bookmark = Bookmark(0, 1)
    busy = MessageReader(storage, max_rows=1).read(bookmark)
    assert next(busy).bookmark == Bookmark(0, 2)

    append(spark, storage, "first", Bookmark(0, 3))
    assert read(storage) == seen, "a replayed batch is skipped"
    compact_tables(spark, storage)
    assert read(storage) == seen
    claim_tables(spark, storage, "second", 1)
    append(spark, storage, "first", Bookmark(0, 4))
    seen += [each for batch_id in range(3) for each in append(spark, storage, "second", Bookmark(1, batch_id))]
    [done] = [each for each in compact_tables(spark, storage) if each.table == Table.MESSAGES]
    assert done.log_files_removed > 0
    log = Path(storage.warehouse) / Table.MESSAGES / "_delta_log"
    assert not (log / f"{0:020}.json").exists(), "commits that the bookmark is older than are gone"
    assert len(list(log.parent.glob("*.parquet"))) <= 2, "so are the files"

    assert read(storage) == seen
    assert read(storage, bookmark) == [each for each in seen if each[0] > bookmark]
    assert [batch.bookmark for batch in busy] == [Bookmark(0, 3), Bookmark(1, 0), Bookmark(1, 1), Bookmark(1, 2)]
    assert read(storage, Bookmark(1, 2)) == []
    assert append(spark, storage, "second", Bookmark(1, 3)) == read(storage, Bookmark(1, 2))


def test_a_reader_goes_on_though_the_next_commits_are_gone_from_the_log(
    spark: SparkSession, storage: StorageSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was suspended for so long that the version after its own is no file any more."""
    monkeypatch.setattr("halfway.clients.reading.message_reader._OPEN_AGAIN_S", 0.2)
    append(spark, storage, "first", Bookmark(0, 0))
    follow = MessageReader(storage).follow(poll_s=0.01)
    assert next(follow).bookmark == Bookmark(0, 0)
    append(spark, storage, "first", Bookmark(0, 1))
    log = Path(storage.warehouse) / Table.MESSAGES / "_delta_log"
    spark._jvm.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, str(log.parent)).checkpoint()  # type: ignore[union-attr]
    for commit in sorted(log.glob("*.json"))[:-1]:
        commit.unlink()
    newest = max(log.glob("*.json"))
    newest.rename(newest.with_suffix(".gone"))
    assert next(follow).bookmark == Bookmark(0, 1)
