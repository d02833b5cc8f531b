"""Tables in folders and in a catalog, with real Spark and Delta. Most tests run on both."""

import fcntl
import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from halfway.conf.loader import load_settings
from halfway.pipelines.storage.delta_tables import (
    append_once,
    create_tables,
    owner_of,
    read_log_ahead,
    read_table,
    stored_tables,
    table_exists,
    table_name,
    table_path,
)
from halfway.pipelines.storage.file_systems import on_local_disk, read_json, write_json
from halfway.schemas.errors import HalfwayError, SetupError
from halfway.schemas.settings import StorageSettings
from halfway.schemas.tables import QUARANTINE_SCHEMA, TABLE_SCHEMAS, Table

AT = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture(params=["folders", "catalog"])
def storage(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Iterator[StorageSettings]:
    if request.param == "folders":
        yield load_settings(environ={}, overrides={"storage.warehouse": str(tmp_path)}).storage
        return
    spark.sql(f"CREATE DATABASE payments LOCATION '{tmp_path}'")
    yield load_settings(environ={}, overrides={"storage.catalog_schema": "spark_catalog.payments"}).storage
    spark.sql("DROP DATABASE payments CASCADE")


def broken(spark: SparkSession, *offsets: int) -> DataFrame:
    rows = [("t", 0, offset, AT, "id", b"k", b"v", [("h", b"1"), ("n", None)], "bad_header", "", 7) for offset in offsets]
    return spark.createDataFrame(rows, QUARANTINE_SCHEMA)


def test_tables_are_created_once_and_can_get_another_owner(spark: SparkSession, storage: StorageSettings) -> None:
    assert not table_exists(spark, storage, Table.MESSAGES)
    create_tables(spark, storage, "first")
    create_tables(spark, storage, "second")
    assert {owner_of(spark, storage, table) for table in Table} == {"second"}
    assert all(table_exists(spark, storage, table) for table in Table)
    assert read_table(spark, storage, Table.QUARANTINE).schema == QUARANTINE_SCHEMA


def test_a_missing_table_is_named_with_the_setting_that_places_it(spark: SparkSession, storage: StorageSettings) -> None:
    setting, name = ("storage.catalog_schema", "`payments`.`messages`") if storage.catalog_schema else ("storage.warehouse", "/messages`")
    with pytest.raises(HalfwayError, match=rf"there is no table .*{name} yet: .*, or set {setting}$"):
        stored_tables(spark, storage)


def test_a_second_append_of_the_same_batch_is_skipped(spark: SparkSession, storage: StorageSettings) -> None:
    create_tables(spark, storage, "query")
    for offsets, app_id, batch_id in [((1, 2), "a", 0), ((1, 2), "a", 0), ((3,), "a", 1), ((1, 2), "a", 0), ((4,), "b", 0)]:
        append_once(broken(spark, *offsets), storage, Table.QUARANTINE, app_id, batch_id)
    rows = read_table(spark, storage, Table.QUARANTINE).orderBy("source_offset").collect()
    assert [row["source_offset"] for row in rows] == [1, 2, 3, 4]
    assert [tuple(header) for header in rows[0]["headers"]] == [("h", b"1"), ("n", None)]


def jobs_of_append(spark: SparkSession, storage: StorageSettings, batch_id: int) -> int:
    group = uuid.uuid4().hex
    spark.sparkContext.setJobGroup(group, "")
    append_once(broken(spark, batch_id), storage, Table.QUARANTINE, "a", batch_id)
    return len(spark.sparkContext.statusTracker().getJobIdsForGroup(group))


def test_an_append_does_not_read_a_log_that_was_read_ahead(spark: SparkSession, storage: StorageSettings) -> None:
    create_tables(spark, storage, "query")
    jobs_of_append(spark, storage, 0)
    reading = jobs_of_append(spark, storage, 1)
    read_log_ahead(spark, storage, Table.QUARANTINE)
    assert jobs_of_append(spark, storage, 2) < reading
    assert read_table(spark, storage, Table.QUARANTINE).count() == 3
    read_log_ahead(spark, storage, Table.QUARANTINE)
    assert jobs_of_append(spark, storage, 2) == 0  # skipped


def test_a_batch_is_still_skipped_after_a_compaction(spark: SparkSession, storage: StorageSettings, tmp_path: Path) -> None:
    create_tables(spark, storage, "query")
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
    create_tables(spark, storage, "query")
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
