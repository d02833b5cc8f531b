"""A record as read back from Kafka by its pointer: OUTCOME_SCHEMA and what the topic holds there."""

from pyspark.sql.types import BinaryType, BooleanType, LongType, StructField, StructType

from schemas.events import OUTCOME_SCHEMA
from schemas.tables import HEADERS_TYPE

FETCHED_SCHEMA = StructType(
    [
        *OUTCOME_SCHEMA.fields,
        StructField("batch_id", LongType()),
        StructField("found", BooleanType()),
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("headers", HEADERS_TYPE),
    ]
)
"""`found` is false where the offset is gone, or holds another record than the one that was read first (R17)."""
