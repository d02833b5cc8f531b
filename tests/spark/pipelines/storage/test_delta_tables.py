"""Tables in folders and in a catalog, with real Spark and Delta. Most tests run on both."""

import fcntl
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from halfway.conf.loader import load_settings
from halfway.pipelines.storage import delta_tables
from halfway.pipelines.storage.delta_tables import (
    Owner,
    append_id,
    append_once,
    claim_tables,
    owner_of,
    properties_of,
    read_log_ahead,
    read_table,
    save,
    stored_tables,
    table_exists,
    table_name,
    table_path,
    upgrade_tables,
)
from halfway.pipelines.storage.file_systems import on_local_disk, read_json, write_json
from halfway.pipelines.storage.ownership import verify_still_owner
from halfway.schemas.errors import HalfwayError, OwnershipError, SetupError
from halfway.schemas.outcomes import Reason
from halfway.schemas.settings import StorageSettings
from halfway.schemas.tables import QUARANTINE_SCHEMA, SEARCHED_COLUMNS, TABLE_SCHEMAS, Table
from tests.support.waiting import until

AT = datetime(2026, 1, 2, tzinfo=UTC)


catalog_is_long = pytest.mark.parametrize("storage", ["folders", pytest.param("catalog", marks=pytest.mark.long)], indirect=True)


@pytest.fixture(params=["folders", "catalog"])
def storage(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Iterator[StorageSettings]:
    own = {"storage.checkpoint": str(tmp_path / "checkpoint")}  # not what this source tree's own jobs have left
    if request.param == "folders":
        yield load_settings(environ={}, overrides={"storage.warehouse": str(tmp_path), **own}).storage
        return
    spark.sql(f"CREATE DATABASE payments LOCATION '{tmp_path}'")
    yield load_settings(environ={}, overrides={"storage.catalog_schema": "spark_catalog.payments", **own}).storage
    spark.sql("DROP DATABASE payments CASCADE")


def broken(spark: SparkSession, *offsets: int) -> DataFrame:
    rows = [("t", 0, offset, AT, "id", b"k", b"v", [("h", b"1"), ("n", None)], "bad_header", "", 0, 7) for offset in offsets]
    return spark.createDataFrame(rows, QUARANTINE_SCHEMA)


def test_tables_are_created_once_and_can_get_another_owner(spark: SparkSession, storage: StorageSettings) -> None:
    assert not table_exists(spark, storage, Table.MESSAGES)
    claim_tables(spark, storage, "first")
    claim_tables(spark, storage, "second", 1)
    assert {owner_of(spark, storage, table) for table in Table} == {Owner("second", 1, "first")}
    assert all(table_exists(spark, storage, table) for table in Table)
    assert read_table(spark, storage, Table.QUARANTINE).schema == QUARANTINE_SCHEMA


@catalog_is_long
@pytest.mark.parametrize("next_owner", ["first", "second"])
def test_tables_of_an_earlier_version_get_their_columns_in_place(spark: SparkSession, storage: StorageSettings, next_owner: str) -> None:
    """At the start of the same checkpoint, or when another one takes the tables over."""
    lacks = {"op_partition", "op_offset", "epoch"}
    for table, schema in TABLE_SCHEMAS.items():
        columns = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in schema if field.name not in lacks)
        owner = "'halfway.query_id' = 'first', 'delta.dataSkippingStatsColumns' = 'transaction_id'"
        spark.sql(f"CREATE TABLE {table_name(storage, table)} ({columns}) USING delta TBLPROPERTIES ({owner})")
    spark.sql(f"INSERT INTO {table_name(storage, Table.MESSAGES)} (transaction_id, batch_id) VALUES ('old', 3)")
    for _ in range(2):
        if next_owner == "first":
            upgrade_tables(spark, storage)
        else:
            claim_tables(spark, storage, next_owner, 1)
    for table, schema in TABLE_SCHEMAS.items():
        assert {(each.name, each.dataType) for each in read_table(spark, storage, table).schema} == {(f.name, f.dataType) for f in schema}
        counted = properties_of(spark, storage, table)["delta.dataSkippingStatsColumns"]
        assert set(counted.split(",")) == set(SEARCHED_COLUMNS[table])
    new = spark.createDataFrame([("new", 1, 7, 0)], "transaction_id STRING, op_partition INT, op_offset BIGINT, epoch INT")
    append_once(new, storage, Table.MESSAGES, append_id(next_owner, Table.MESSAGES), 4)
    rows = read_table(spark, storage, Table.MESSAGES).select("transaction_id", "op_partition", "op_offset", "epoch")
    assert {tuple(row) for row in rows.collect()} == {("old", None, None, None), ("new", 1, 7, 0)}


@pytest.mark.parametrize("storage", ["folders"], indirect=True)
def test_a_table_that_a_killed_erasure_has_left_open_is_append_only_after_a_start(spark: SparkSession, storage: StorageSettings) -> None:
    claim_tables(spark, storage, "first")
    spark.sql(f"ALTER TABLE {table_name(storage, Table.MESSAGES)} SET TBLPROPERTIES ('delta.appendOnly' = 'false')")
    upgrade_tables(spark, storage)
    assert properties_of(spark, storage, Table.MESSAGES)["delta.appendOnly"] == "true"


def test_a_missing_table_is_named_with_the_setting_that_places_it(spark: SparkSession, storage: StorageSettings) -> None:
    setting, name = ("storage.catalog_schema", "`payments`.`messages`") if storage.catalog_schema else ("storage.warehouse", "/messages`")
    with pytest.raises(HalfwayError, match=rf"there is no table .*{name} yet: .*, or set {setting}$"):
        stored_tables(spark, storage)


def test_a_second_append_of_the_same_batch_is_skipped(spark: SparkSession, storage: StorageSettings) -> None:
    claim_tables(spark, storage, "query")
    for offsets, app_id, batch_id in [((1, 2), "a", 0), ((1, 2), "a", 0), ((3,), "a", 1), ((1, 2), "a", 0), ((4,), "b", 0)]:
        append_once(broken(spark, *offsets), storage, Table.QUARANTINE, app_id, batch_id)
    rows = read_table(spark, storage, Table.QUARANTINE).orderBy("source_offset").collect()
    assert [row["source_offset"] for row in rows] == [1, 2, 3, 4]
    assert [tuple(header) for header in rows[0]["headers"]] == [("h", b"1"), ("n", None)]


def test_a_table_that_was_renamed_is_not_made_anew_by_an_append(spark: SparkSession, storage: StorageSettings) -> None:
    """It would have no owner, and one batch: who adopted it would write everything in Kafka a second time."""
    claim_tables(spark, storage, "query")
    name = table_name(storage, Table.QUARANTINE)
    append_once(broken(spark, 1), storage, Table.QUARANTINE, "a", 0)
    if storage.catalog_schema:
        spark.sql(f"ALTER TABLE {name} RENAME TO payments.former")
    else:
        Path(storage.warehouse, Table.QUARANTINE).rename(Path(storage.warehouse, "former"))
    with pytest.raises(OwnershipError, match=r"quarantine` is missing: set storage\."):
        append_once(broken(spark, 2), storage, Table.QUARANTINE, "a", 1)
    assert not table_exists(spark, storage, Table.QUARANTINE)
    save(broken(spark, 3).write.format("delta"), storage, Table.QUARANTINE)
    with pytest.raises(OwnershipError, match="quarantine` has no owner: another one is in its place"):
        verify_still_owner(spark, storage, Table.QUARANTINE, "query")


def test_a_former_owner_appends_nothing_more(spark: SparkSession, storage: StorageSettings) -> None:
    claim_tables(spark, storage, "first")
    mine = append_id("first", Table.QUARANTINE), append_id("first", Reason.HALF_LOST)
    for batch_id, app_id in enumerate(mine):
        append_once(broken(spark, batch_id), storage, Table.QUARANTINE, app_id, batch_id)
    claim_tables(spark, storage, "second", 1)
    for app_id in mine:
        append_once(broken(spark, 8), storage, Table.QUARANTINE, app_id, 8)
        with pytest.raises(OwnershipError, match=r"query second, epoch 1\) has taken over the table .*quarantine`: this job has ended"):
            verify_still_owner(spark, storage, Table.QUARANTINE, "first", at_append=True)
    append_once(broken(spark, 9), storage, Table.QUARANTINE, append_id("second", Table.QUARANTINE), 0)
    verify_still_owner(spark, storage, Table.QUARANTINE, "second", at_append=True)
    assert sorted(row["source_offset"] for row in read_table(spark, storage, Table.QUARANTINE).collect()) == [0, 1, 9]


@catalog_is_long
@pytest.mark.parametrize("next_owner", ["second", pytest.param("third", marks=pytest.mark.long)])
def test_a_take_over_that_was_killed_before_its_fence_is_completed(spark: SparkSession, storage: StorageSettings, next_owner: str) -> None:
    """The second owner was killed between naming itself and fencing the first. It or a third one does that later."""
    claim_tables(spark, storage, "first")
    properties = ", ".join(f"'{name}' = '{value}'" for name, value in Owner("second", 1, "first").properties().items())
    spark.sql(f"ALTER TABLE {table_name(storage, Table.MESSAGES)} SET TBLPROPERTIES ({properties})")
    claim_tables(spark, storage, next_owner, 2)
    rows = spark.createDataFrame([("a",)], "transaction_id STRING")
    for owner in {"first", "second"} - {next_owner}:
        append_once(rows, storage, Table.MESSAGES, append_id(owner, Table.MESSAGES), 8)
    assert read_table(spark, storage, Table.MESSAGES).isEmpty()


@pytest.mark.parametrize("storage", ["folders"], indirect=True)
def test_a_table_that_names_no_owner_takes_no_append_of_its_former_one(spark: SparkSession, storage: StorageSettings) -> None:
    """Such as after `CREATE OR REPLACE`. The former job may be frozen in an append."""
    claim_tables(spark, storage, "first")
    append_once(broken(spark, 1), storage, Table.QUARANTINE, append_id("first", Table.QUARANTINE), 0)
    names = ", ".join(f"'{name}'" for name in Owner("first", 1, "former").properties())
    spark.sql(f"ALTER TABLE {table_name(storage, Table.QUARANTINE)} UNSET TBLPROPERTIES IF EXISTS ({names})")
    claim_tables(spark, storage, "second", 1)
    append_once(broken(spark, 2), storage, Table.QUARANTINE, append_id("first", Table.QUARANTINE), 1)
    assert [row["source_offset"] for row in read_table(spark, storage, Table.QUARANTINE).collect()] == [1]


@pytest.mark.parametrize("storage", ["folders"], indirect=True)
def test_a_table_that_somebody_has_changed_is_refused(spark: SparkSession, storage: StorageSettings) -> None:
    """A column that is added anew is empty in old rows; without Delta's memory a repeated batch is written twice."""
    claim_tables(spark, storage, "first")
    name, memory = table_name(storage, Table.DISCARDED), "delta.setTransactionRetentionDuration"
    spark.sql(f"ALTER TABLE {name} SET TBLPROPERTIES ('{memory}' = 'interval 7 days')")
    with pytest.raises(OwnershipError, match=rf"has the property {memory}, by which Delta forgets .*`ALTER TABLE .* UNSET TBLPROPERTIES"):
        upgrade_tables(spark, storage)
    spark.sql(f"ALTER TABLE {name} UNSET TBLPROPERTIES ('{memory}')")
    upgrade_tables(spark, storage)
    spark.sql(f"ALTER TABLE {name} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    spark.sql(f"ALTER TABLE {name} RENAME COLUMN transaction_id TO id")
    for take in (lambda: upgrade_tables(spark, storage), lambda: claim_tables(spark, storage, "second", 1)):
        with pytest.raises(OwnershipError, match="has no column transaction_id, which was renamed or dropped: put it back"):
            take()
    assert {owner_of(spark, storage, table).query_id for table in Table} == {"first"}, "whoever owns the tables goes on with all"


@catalog_is_long
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_start_takes_nothing_that_another_one_took_meanwhile(spark: SparkSession, storage: StorageSettings, epoch: int) -> None:
    """Both looked when the tables did not exist, or belonged to a former owner. Then one of them was frozen."""
    if epoch:
        claim_tables(spark, storage, "former")
    claim_tables(spark, storage, "awake", epoch)
    with pytest.raises(OwnershipError, match=rf"another one \(query awake, epoch {epoch}\) has taken the table .*: nothing was taken"):
        claim_tables(spark, storage, "frozen", epoch)
    assert {owner_of(spark, storage, table).query_id for table in Table} == {"awake"}


def test_a_table_that_another_start_makes_at_the_same_moment_is_not_taken(
    spark: SparkSession, storage: StorageSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have found no table. Delta fails for the second one, because the first one's table has other properties."""
    claim_tables(spark, storage, "first")
    found = iter([False])
    exists = delta_tables.table_exists
    monkeypatch.setattr(delta_tables, "table_exists", lambda *where: next(found, None) is None and exists(*where))
    with pytest.raises(OwnershipError, match=r"another one \(query first, epoch 0\) has taken the table .*messages"):
        claim_tables(spark, storage, "second")
    assert {owner_of(spark, storage, table).query_id for table in Table} == {"first"}


def test_an_append_that_is_under_way_while_the_tables_are_taken_over_is_refused(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a local disk a lock keeps the two apart; elsewhere Delta does."""
    monkeypatch.setattr(delta_tables, "local_warehouse", lambda *_: None)
    storage = load_settings(environ={}, overrides={"storage.warehouse": str(tmp_path)}).storage
    claim_tables(spark, storage, "first")
    go, begun = tmp_path / "go", tmp_path / "begun"

    def slow(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        begun.touch()
        while not go.exists():
            time.sleep(0.05)
        yield from batches

    failures: list[Exception] = []

    def append() -> None:
        try:
            rows = broken(spark, 1).coalesce(1).mapInArrow(slow, QUARANTINE_SCHEMA)  # the others need a core
            append_once(rows, storage, Table.QUARANTINE, append_id("first", Table.QUARANTINE), 0)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=append)
    thread.start()
    until(begun.exists, "the append")
    claim_tables(spark, storage, "second", 1)
    go.touch()
    thread.join(60)
    assert len(failures) == 1
    assert read_table(spark, storage, Table.QUARANTINE).isEmpty()


@catalog_is_long
def test_tables_without_the_epoch_get_it_when_they_are_taken_over(spark: SparkSession, storage: StorageSettings) -> None:
    name = table_name(storage, Table.QUARANTINE)
    columns = ", ".join(f"`{field.name}` {field.dataType.simpleString()}" for field in QUARANTINE_SCHEMA if field.name != "epoch")
    spark.sql(f"CREATE TABLE {name} ({columns}) USING delta TBLPROPERTIES ('halfway.query_id' = 'first')")
    append_once(broken(spark, 1).drop("epoch"), storage, Table.QUARANTINE, "first:quarantine", 0)
    claim_tables(spark, storage, "second", 1)
    append_once(broken(spark, 2), storage, Table.QUARANTINE, "second:quarantine", 0)
    rows = read_table(spark, storage, Table.QUARANTINE).orderBy("source_offset").collect()
    assert [(row["source_offset"], row["epoch"]) for row in rows] == [(1, None), (2, 0)]


def jobs_of_append(spark: SparkSession, storage: StorageSettings, batch_id: int) -> int:
    group = uuid.uuid4().hex
    spark.sparkContext.setJobGroup(group, "")
    append_once(broken(spark, batch_id), storage, Table.QUARANTINE, "a", batch_id)
    return len(spark.sparkContext.statusTracker().getJobIdsForGroup(group))


@catalog_is_long
def test_an_append_does_not_read_a_log_that_was_read_ahead(spark: SparkSession, storage: StorageSettings) -> None:
    claim_tables(spark, storage, "query")
    jobs_of_append(spark, storage, 0)
    reading = jobs_of_append(spark, storage, 1)
    read_log_ahead(spark, storage, Table.QUARANTINE)
    assert jobs_of_append(spark, storage, 2) < reading
    assert read_table(spark, storage, Table.QUARANTINE).count() == 3
    read_log_ahead(spark, storage, Table.QUARANTINE)
    assert jobs_of_append(spark, storage, 2) == 0  # skipped


@catalog_is_long
def test_a_batch_is_still_skipped_after_a_compaction(spark: SparkSession, storage: StorageSettings, tmp_path: Path) -> None:
    claim_tables(spark, storage, "query")
    name = table_name(storage, Table.QUARANTINE)
    spark.sql(f"ALTER TABLE {name} SET TBLPROPERTIES ('delta.checkpointInterval' = '3')")
    for batch_id in range(4):  # past a checkpoint of the log
        append_once(broken(spark, batch_id), storage, Table.QUARANTINE, "a", batch_id)
    assert len(list(tmp_path.rglob("*.checkpoint.parquet"))) == 1
    spark.sql(f"OPTIMIZE {name}").collect()
    append_once(broken(spark, 3), storage, Table.QUARANTINE, "a", 3)
    assert read_table(spark, storage, Table.QUARANTINE).count() == 4


def test_table_path_refuses_a_catalog_and_says_what_to_do() -> None:
    storage = load_settings(environ={}, overrides={"storage.catalog_schema": "main.payments"}).storage
    with pytest.raises(SetupError, match="read them with Spark, or set "):
        table_path(storage, Table.MESSAGES)


@pytest.mark.parametrize("place", ["disk", "hdfs", "s3"])
def test_a_small_file_is_replaced_atomically(spark: SparkSession, tmp_path: Path, place: str) -> None:
    conf, name = spark.sparkContext._jsc.hadoopConfiguration(), "fs.AbstractFileSystem.viewfs.impl"
    # A file system that Python does not know, although a local folder is mounted there.
    conf.set(f"fs.viewfs.mounttable.{place}.link./tables", tmp_path.as_uri())
    uri = f"{tmp_path}/status.json" if place == "disk" else f"viewfs://{place}/tables/status.json"
    known = conf.get(name)
    if place == "s3":
        conf.unset(name)  # Hadoop's FileContext does not support object stores
    try:
        for number in range(2):
            write_json(spark, uri, {"number": number})
    finally:
        conf.set(name, known)
    assert read_json(spark, uri) == {"number": 1}
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".crc")] == ["status.json"]


def test_a_path_without_a_scheme_is_on_hadoops_default_file_system(spark: SparkSession, tmp_path: Path) -> None:
    conf = spark.sparkContext._jsc.hadoopConfiguration()
    assert on_local_disk(spark, str(tmp_path)) == on_local_disk(spark, tmp_path.as_uri()) == tmp_path
    known = conf.get("fs.defaultFS")
    conf.set("fs.viewfs.mounttable.cluster.link./tables", tmp_path.as_uri())
    conf.set("fs.defaultFS", "viewfs://cluster/")
    try:
        assert on_local_disk(spark, "/tables") is None
    finally:
        conf.set("fs.defaultFS", known)


def test_two_processes_never_commit_at_once_on_a_local_disk(spark: SparkSession, tmp_path: Path) -> None:
    storage = load_settings(environ={}, overrides={"storage.warehouse": str(tmp_path)}).storage
    claim_tables(spark, storage, "query")
    append = threading.Thread(target=append_once, args=(broken(spark, 1), storage, Table.QUARANTINE, "a", 0), daemon=True)
    with (tmp_path / ".quarantine.lock").open("a") as other:
        fcntl.flock(other.fileno(), fcntl.LOCK_EX)
        append.start()
        for version in range(3):  # another table can be written meanwhile
            append_once(spark.createDataFrame([], TABLE_SCHEMAS[Table.DISCARDED]), storage, Table.DISCARDED, "a", version)
        assert read_table(spark, storage, Table.QUARANTINE).isEmpty()
        assert append.is_alive()
    append.join(timeout=60)
    assert read_table(spark, storage, Table.QUARANTINE).count() == 1
