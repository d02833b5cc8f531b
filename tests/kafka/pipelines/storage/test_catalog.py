"""The whole job on tables of a catalog, such as Unity Catalog, instead of folders."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from halfway.pipelines.operate.catalog_messages import end_in_catalog
from halfway.schemas.bookmark import Bookmark
from halfway.schemas.errors import OwnershipError
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
    assert end_in_catalog(w.spark, w.settings.storage) == Bookmark(0, 0)
    newest.unlink()
    (commits / f".{newest.name}.crc").unlink(missing_ok=True)
    assert w.resolve()
    assert {table: w.rows(table) for table in Table} == before


@pytest.mark.timeout(300)
def test_another_checkpoint_is_refused_with_the_schema_to_change(catalog_world: World, tmp_path: Path) -> None:
    w = catalog_world
    w.half("a")
    w.op("a", b"COMMIT")
    w.tick(1)
    w.resolve()
    other = w.settings.storage.model_copy(update={"checkpoint": str(tmp_path / "other")})
    with pytest.raises(OwnershipError, match=r"`payments`.`messages` belongs to another checkpoint .* storage.catalog_schema to a new one"):
        w.resolve(w.settings.model_copy(update={"storage": other}))
