"""The Delta tables: made at the first start, owned by one query, appended to exactly once (design §1.5, §1.6)."""

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from schemas.settings import StorageSettings
from schemas.tables import SEARCHED_COLUMNS, TABLE_SCHEMAS, Table

OWNER_PROPERTY = "halfway.query_id"


def table_path(storage: StorageSettings, table: Table) -> str:
    """Return where a table is."""
    return f"{storage.warehouse.rstrip('/')}/{table}"


def table_exists(spark: SparkSession, storage: StorageSettings, table: Table) -> bool:
    """Whether the table has been made."""
    return DeltaTable.isDeltaTable(spark, table_path(storage, table))


def read_table(spark: SparkSession, storage: StorageSettings, table: Table) -> DataFrame:
    """Return a table as it is now."""
    return spark.read.format("delta").load(table_path(storage, table))


def owner_of(spark: SparkSession, storage: StorageSettings, table: Table) -> str | None:
    """Return the id of the query that the table belongs to, None if it is not there or nobody's."""
    if not table_exists(spark, storage, table):
        return None
    properties: dict[str, str] = DeltaTable.forPath(spark, table_path(storage, table)).detail().select("properties").collect()[0][0]
    return properties.get(OWNER_PROPERTY)


def create_tables(spark: SparkSession, storage: StorageSettings, query_id: str) -> None:
    """Make the tables that are missing, and write down in all of them that they are this query's."""
    for table, schema in TABLE_SCHEMAS.items():
        path = table_path(storage, table)
        if table_exists(spark, storage, table):
            if owner_of(spark, storage, table) != query_id:
                spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ('{OWNER_PROPERTY}' = '{query_id}')")
            continue
        (
            DeltaTable.createIfNotExists(spark)
            .location(path)
            .addColumns(schema)
            .property(OWNER_PROPERTY, query_id)
            # Append only, and readable by any Delta reader.
            .property("delta.enableDeletionVectors", "false")
            .property("delta.appendOnly", "true")
            .property("delta.dataSkippingStatsColumns", ",".join(SEARCHED_COLUMNS[table]))
            .execute()
        )


def append_once(rows: DataFrame, path: str, app_id: str, batch_id: int) -> None:
    """Append rows; a second append of the same application and batch is passed over by Delta."""
    options = {"txnAppId": app_id, "txnVersion": str(batch_id)}
    rows.write.format("delta").mode("append").options(**options).save(path)
