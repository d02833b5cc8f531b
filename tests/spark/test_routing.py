"""Fetched records to rows: the schemas are the contract's, and agree with each other."""

from chispa.schema_comparer import assert_schema_equality
from pyspark.sql import SparkSession

from schemas.records import FETCHED_SCHEMA
from schemas.tables import DISCARDED_SCHEMA, MESSAGES_SCHEMA, QUARANTINE_SCHEMA
from transforms import routing


def test_each_sink_gets_its_schema(spark: SparkSession) -> None:
    fetched = spark.createDataFrame([], FETCHED_SCHEMA)
    assert_schema_equality(routing.to_messages(fetched).schema, MESSAGES_SCHEMA, ignore_nullable=True)
    assert_schema_equality(routing.to_discarded(fetched).schema, DISCARDED_SCHEMA, ignore_nullable=True)
    assert_schema_equality(routing.to_quarantine(fetched, "half", "op").schema, QUARANTINE_SCHEMA, ignore_nullable=True)
    outcomes = fetched.drop("batch_id", "found", "key", "value", "headers")
    assert_schema_equality(routing.to_half_lost(outcomes, 1, "half").schema, QUARANTINE_SCHEMA, ignore_nullable=True)


def test_a_half_that_was_not_found_makes_no_row(spark: SparkSession) -> None:
    row = dict.fromkeys(FETCHED_SCHEMA.fieldNames()) | {"transaction_id": "a", "found": False, "partition": 0, "offset": 1}
    fetched = spark.createDataFrame([row], FETCHED_SCHEMA)
    assert routing.to_messages(fetched).isEmpty()
    assert routing.to_check_requests(fetched).isEmpty()
