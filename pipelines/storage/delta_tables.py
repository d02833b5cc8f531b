"""The Delta tables: created at the first start, owned by one query, appended to exactly once (decisions 5 and 6)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from delta.tables import DeltaTable
from py4j.java_gateway import JavaClass
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from halfway.pipelines.storage.file_systems import on_local_disk
from halfway.pipelines.storage.locks import commit_lock
from halfway.schemas.errors import HalfwayError, SetupError
from halfway.schemas.settings import StorageSettings
from halfway.schemas.tables import SEARCHED_COLUMNS, TABLE_SCHEMAS, Table

OWNER_PROPERTY = "halfway.query_id"
_PROPERTIES = {
    # Append only, and readable by any Delta reader.
    "delta.enableDeletionVectors": "false",
    "delta.appendOnly": "true",
    # Delta keeps 30 days of log and 7 days of deleted files by default. With a commit a second the log would hold 2.6
    # million commits, which each append lists, and each checkpoint of the log 600,000 names of files that a compaction
    # replaced (docs/tables.md).
    "delta.logRetentionDuration": "interval 6 hours",
    "delta.deletedFileRetentionDuration": "interval 6 hours",
    # Delta writes a checkpoint of the log each 10 commits by default, which takes a few tenths of a second. Reading up
    # to a hundred small files of one line each takes less.
    "delta.checkpointInterval": "100",
}


def table_path(storage: StorageSettings, table: Table) -> str:
    """Return the URI of a table's folder.

    Raises:
        SetupError: the table is in a catalog, which chooses the folder.
    """
    if storage.catalog_schema:
        raise SetupError(
            f"the tables are in the catalog, in {storage.catalog_schema}, and this command reads them as folders: read them with Spark, "
            "or set storage.warehouse instead of storage.catalog_schema"
        )
    return f"{storage.warehouse.rstrip('/')}/{table}"


def table_name(storage: StorageSettings, table: Table) -> str:
    """Return the name of a table in SQL, for a folder or in a catalog."""
    if storage.catalog_schema:
        return ".".join(f"`{part}`" for part in (*storage.catalog_schema.split("."), table))
    return f"delta.`{table_path(storage, table)}`"


def table_exists(spark: SparkSession, storage: StorageSettings, table: Table) -> bool:
    """Return True if the table exists."""
    if storage.catalog_schema:
        return spark.catalog.tableExists(table_name(storage, table))
    return DeltaTable.isDeltaTable(spark, table_path(storage, table))


def read_table(spark: SparkSession, storage: StorageSettings, table: Table) -> DataFrame:
    """Return a table as it is now."""
    if storage.catalog_schema:
        return spark.table(table_name(storage, table))
    return spark.read.format("delta").load(table_path(storage, table))


def stored_tables(spark: SparkSession, storage: StorageSettings) -> dict[Table, DataFrame]:
    """Return the three tables as they are now, in the order `messages`, `discarded`, `quarantine`.

    Raises:
        HalfwayError: a table does not exist.
    """
    for table in Table:
        if not table_exists(spark, storage, table):
            setting = "catalog_schema" if storage.catalog_schema else "warehouse"
            raise HalfwayError(
                f"there is no table {table_name(storage, table)} yet: run `halfway resolve` with it, or set storage.{setting}"
            )
    return {table: read_table(spark, storage, table) for table in Table}


def ends_of_halves(spark: SparkSession, storage: StorageSettings) -> dict[int, int]:
    """Return, by partition of the half topic, the offset after the last half that `messages` or `discarded` holds."""
    ends: dict[int, int] = {}
    for table in (Table.MESSAGES, Table.DISCARDED):
        if table_exists(spark, storage, table):
            for partition, last in read_table(spark, storage, table).groupBy("half_partition").agg(F.max("half_offset")).collect():
                ends[partition] = max(ends.get(partition, 0), last + 1)
    return ends


def owner_of(spark: SparkSession, storage: StorageSettings, table: Table) -> str | None:
    """Return the id of the query that owns an existing table; None if it has no owner."""
    return properties_of(spark, storage, table).get(OWNER_PROPERTY)


def properties_of(spark: SparkSession, storage: StorageSettings, table: Table) -> dict[str, str]:
    """Return the properties of an existing table."""
    # DESCRIBE DETAIL has them too, but counts the table's files, which takes half of the time of a start.
    return {str(name): str(value) for name, value in spark.sql(f"SHOW TBLPROPERTIES {table_name(storage, table)}").collect()}


def create_tables(spark: SparkSession, storage: StorageSettings, query_id: str) -> None:
    """Create the missing tables, and record in all of them that the query owns them."""
    for table, schema in TABLE_SCHEMAS.items():
        name = table_name(storage, table)
        if table_exists(spark, storage, table):
            if owner_of(spark, storage, table) != query_id:
                spark.sql(f"ALTER TABLE {name} SET TBLPROPERTIES ({_sql_map({OWNER_PROPERTY: query_id})})")
            continue
        # DeltaTable's builder takes no names of three parts.
        columns = ", ".join(f"`{field.name}` {field.dataType.simpleString()}" for field in schema)
        properties = {**_PROPERTIES, OWNER_PROPERTY: query_id, "delta.dataSkippingStatsColumns": ",".join(SEARCHED_COLUMNS[table])}
        spark.sql(f"CREATE TABLE IF NOT EXISTS {name} ({columns}) USING delta TBLPROPERTIES ({_sql_map(properties)})")


def append_once(rows: DataFrame, storage: StorageSettings, table: Table, app_id: str, batch_id: int) -> None:
    """Append rows. Delta skips a second append with the same application id and batch id (`txnAppId`, `txnVersion`)."""
    writer = rows.write.format("delta").mode("append").options(txnAppId=app_id, txnVersion=str(batch_id))
    if storage.catalog_schema:
        writer.saveAsTable(table_name(storage, table))
        return
    with commit_lock(local_warehouse(rows.sparkSession, storage), table):
        writer.save(table_path(storage, table))


def read_log_ahead(spark: SparkSession, storage: StorageSettings, table: Table) -> None:
    """Let Delta compute the table's snapshot now, so that the next append finds it cached.

    An append reads the whole log to find out whether its batch is in the table: three stages of Spark, 0.25 to 0.5 s in
    which it does nothing else. Delta caches the snapshot until the next commit.
    """
    jvm: Any = spark._jvm
    delta_log = jvm.org.apache.spark.sql.delta.DeltaLog
    if storage.catalog_schema or not isinstance(delta_log, JavaClass):  # Databricks has its own class
        # The public statement that computes a snapshot also counts files, which costs another job.
        spark.sql(f"DESCRIBE DETAIL {table_name(storage, table)}").collect()
    else:
        delta_log.forTable(spark._jsparkSession, table_path(storage, table)).unsafeVolatileSnapshot().transactions()


def local_warehouse(spark: SparkSession, storage: StorageSettings) -> Path | None:
    """Return the folder on a local disk that holds the tables; None if they are elsewhere."""
    return None if storage.catalog_schema else on_local_disk(spark, storage.warehouse)


def _sql_map(properties: Mapping[str, str]) -> str:
    return ", ".join(f"'{key}' = '{value}'" for key, value in properties.items())
