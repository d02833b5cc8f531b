"""The whole job on tables of a catalog, such as Unity Catalog, instead of folders."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from halfway.clients.reading.committed import MessageBatch
from halfway.clients.reading.message_reader import MessageReader
from halfway.clients.reading.message_rows import Wanted
from halfway.pipelines.operate import catalog_messages as reading
from halfway.pipelines.operate.catalog_messages import catalog_messages
from halfway.pipelines.storage import lineage
from halfway.pipelines.storage.delta_tables import claim_tables, table_name
from halfway.schemas.bookmark import Bookmark
from halfway.schemas.errors import OwnershipError, TableError
from halfway.schemas.tables import Table
from tests.support.job_world import SMALL_JOB, World
from tests.support.kafka_topics import MakeTopics


@pytest.fixture
def catalog_world(spark: SparkSession, topics: MakeTopics, tmp_path: Path) -> Iterator[World]:
    spark.sql(f"CREATE DATABASE payments LOCATION '{tmp_path / 'payments'}'")
    storage = {"storage.catalog_schema": "spark_catalog.payments", "storage.checkpoint": str(tmp_path / "checkpoint")}
    yield World(spark, topics(timestamps="CreateTime", overrides={**SMALL_JOB, **storage}))
    spark.sql("DROP DATABASE payments CASCADE")


@pytest.mark.timeout(300)
def test_a_repeated_batch_writes_nothing_twice_to_a_catalog(catalog_world: World, tmp_path: Path) -> None:
    w = catalog_world
    for n in range(20):
        w.half(f"t{n}", n)
        w.op(f"t{n}", b"COMMIT" if n % 2 else b"ROLLBACK", n)
    w.op("nobody", b"COMMIT", 5)
    w.tick(60_000)
    w.resolve()
    before = {table: w.rows(table) for table in Table}
    assert sorted(row["transaction_id"] for row in before[Table.MESSAGES]) == sorted(f"t{n}" for n in range(1, 20, 2))
    assert [row["reason"] for row in before[Table.QUARANTINE]] == ["orphan_op"]
    commits = tmp_path / "checkpoint" / "commits"
    newest = max((path for path in commits.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    newest.unlink()
    (commits / f".{newest.name}.crc").unlink(missing_ok=True)
    assert w.resolve()
    assert {table: w.rows(table) for table in Table} == before


def committed(w: World, name: str, at_ms: int) -> None:
    w.half(name, at_ms)
    w.op(name, b"COMMIT", at_ms)
    w.tick(at_ms)
    w.resolve()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_batch_that_was_not_committed_goes_on_although_somebody_has_changed_the_table_since(catalog_world: World, tmp_path: Path) -> None:
    w = catalog_world
    committed(w, "a", 1)
    [newest] = (tmp_path / "checkpoint" / "commits").glob("[0-9]*")
    newest.unlink()
    (newest.parent / f".{newest.name}.crc").unlink(missing_ok=True)
    w.spark.sql("ALTER TABLE spark_catalog.payments.messages ALTER COLUMN topic COMMENT 'where it goes'")
    committed(w, "b", 2)
    assert set(w.by_id(Table.MESSAGES)) == {"a", "b"}


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("looked_at", "refusal"), [(100, "takes no more batches of"), (1, "takes no batch 1 of")])
def test_a_checkpoint_whose_tables_were_adopted_and_put_back_is_refused(
    catalog_world: World, tmp_path: Path, looked_at: int, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They name it as owner, and Delta skips all that it appends. A catalog does not tell which batches it takes."""
    w = catalog_world
    committed(w, "a", 1)
    names = [f"spark_catalog.payments.{table}" for table in Table]
    versions = {name: w.spark.sql(f"DESCRIBE HISTORY {name} LIMIT 1").first().version for name in names}
    other = w.settings.model_copy(update={"storage": w.settings.storage.model_copy(update={"checkpoint": str(tmp_path / "other")})})
    w.resolve(other, adopt=True)
    for name, version in versions.items():
        w.spark.sql(f"RESTORE TABLE {name} TO VERSION AS OF {version}")
    monkeypatch.setattr(lineage, "COMMITS_LOOKED_AT", looked_at)
    with pytest.raises(OwnershipError, match=rf"messages` {refusal} the checkpoint .*checkpoint: it was taken over .*--adopt"):
        committed(w, "b", 2)
    adopting = w.settings.model_copy(update={"storage": w.settings.storage.model_copy(update={"checkpoint": str(tmp_path / "third")})})
    w.resolve(adopting, adopt=True)
    assert set(w.by_id(Table.MESSAGES)) == {"a", "b"}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_messages_of_a_catalog_are_read_as_those_of_a_folder(catalog_world: World, tmp_path: Path) -> None:
    w = catalog_world
    for batch in range(3):
        for n in range(batch * 5, batch * 5 + 5):
            w.half(f"t{n}", 10 * n)
            w.op(f"t{n}", b"COMMIT", 10 * n + 1)
        w.tick(100 * (batch + 1))
        w.resolve()
    ahead: list[tuple[Bookmark, Bookmark | None]] = []

    def read(after: Bookmark | None, wanted: Wanted) -> list[MessageBatch]:
        def warn(bookmark: Bookmark, end: Bookmark | None) -> None:
            ahead.append((bookmark, end))

        return [*catalog_messages(w.spark, w.settings.storage, after, wanted, goes_on=lambda: False, warn_of_ahead=warn)]

    folder = MessageReader(str(tmp_path / "payments" / "messages"))
    inside = [*folder.read()]
    first, last = inside[0].messages[0].bookmark, inside[-1].bookmark
    for after in (None, first, last):
        found = [message for batch in read(after, Wanted(None, frozenset(), 1, 1)) for message in batch.messages]
        assert found == [message for batch in folder.read(after) for message in batch.messages]
        assert len(found) == {None: 15, first: 10, last: 0}[after]
    assert ahead == []
    beyond = Bookmark(last.epoch, last.batch_id + 1)
    assert read(beyond, Wanted(None, frozenset(), 1, 1)) == []
    assert ahead == [(beyond, last)]


@pytest.mark.timeout(300)
def test_a_reader_that_follows_a_table_of_a_catalog_ends_when_it_is_recreated(
    catalog_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for the batch after its bookmark, and never show what the new table has before it."""
    w = catalog_world
    w.half("a")
    w.op("a", b"COMMIT", 1)
    w.tick(100)
    w.resolve()
    monkeypatch.setattr(reading, "_LOOK_AT_ID_S", 0.0)
    wanted, storage = Wanted(None, frozenset(), 1, 1), w.settings.storage
    messages = catalog_messages(w.spark, storage, None, wanted, goes_on=lambda: True, warn_of_ahead=lambda *_: None)
    assert [message.transaction_id for message in next(messages).messages] == ["a"]
    for table in Table:
        w.spark.sql(f"DROP TABLE {table_name(storage, table)}")
    claim_tables(w.spark, storage, "another")
    with pytest.raises(TableError, match="was recreated since it was first read"):
        next(messages)


@pytest.mark.timeout(300)
@pytest.mark.long
def test_another_checkpoint_is_refused_with_the_schema_to_change(catalog_world: World, tmp_path: Path) -> None:
    w = catalog_world
    w.half("a")
    w.op("a", b"COMMIT")
    w.tick(1)
    w.resolve()
    other = w.settings.storage.model_copy(update={"checkpoint": str(tmp_path / "other")})
    with pytest.raises(OwnershipError, match=r"`payments`.`messages` belongs to another checkpoint .* storage.catalog_schema to a new one"):
        w.resolve(w.settings.model_copy(update={"storage": other}))
