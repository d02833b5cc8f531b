"""What the notebooks read besides the state: the tables, and the topics from a point in time on."""

from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession

from halfway.pipelines.storage.delta_tables import read_table, table_exists, table_path
from halfway.schemas.errors import HalfwayError
from halfway.schemas.settings import KafkaSettings, StorageSettings
from halfway.schemas.tables import Table


def stored_tables(spark: SparkSession, storage: StorageSettings) -> dict[Table, DataFrame]:
    """Return the three tables as they are now, in the order `messages`, `discarded`, `quarantine`.

    Raises:
        HalfwayError: one has not been made yet.
    """
    for table in Table:
        if not table_exists(spark, storage, table):
            raise HalfwayError(
                f"there is no table {table_path(storage, table)} yet: run `halfway resolve` with it, or set storage.warehouse"
            )
    return {table: read_table(spark, storage, table) for table in Table}


def records_since(spark: SparkSession, kafka: KafkaSettings, topics: Sequence[str], since_ms: int) -> DataFrame:
    """Return the records of these topics from `since_ms` on, with Spark's Kafka columns and headers.

    Raises:
        SettingsError: no Kafka is configured.
    """
    options = {
        **kafka.as_spark_options(),
        "subscribe": ",".join(topics),
        "startingTimestamp": str(max(0, since_ms)),
        # A partition without a record that young has nothing to read.
        "startingOffsetsByTimestampStrategy": "latest",
        "includeHeaders": "true",
        "failOnDataLoss": "false",
    }
    return spark.read.format("kafka").options(**options).load()
