"""A record as read back from Kafka by its pointer, and the request that goes to Kafka for a check."""

from typing import NamedTuple

from pyspark.sql.types import BinaryType, StructField, StructType

from schemas.tables import HEADERS_TYPE


class StoredRecord(NamedTuple):
    """What Kafka holds at an offset. `headers` is None where a header's name is not UTF-8, which the client cannot show."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]] | None


CHECK_REQUEST_SCHEMA = StructType(
    [StructField("key", BinaryType()), StructField("value", BinaryType()), StructField("headers", HEADERS_TYPE)]
)
"""What Spark's Kafka sink takes."""
