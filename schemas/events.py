"""The rows between Kafka and the sinks: events into the operator, outcomes out of it, without bodies (decision 3)."""

from enum import IntEnum
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType

from halfway.schemas.tables import HEADERS_TYPE


class EventKind(IntEnum):
    """The kind of a record."""

    HALF = 1
    OP = 2
    LOST = 3
    TICK = 4
    BROKEN = 5


RECORD_SCHEMA = pa.schema(
    [
        pa.field("source", pa.int32()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("at_ms", pa.int64()),
        pa.field("timestamp_type", pa.int32()),
        pa.field("key", pa.binary()),
        pa.field("headers", pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))),
        pa.field("value_bytes", pa.int32()),
        pa.field("tick_value", pa.binary()),
    ]
)
"""A Kafka record of the half or op topic, without its body.

`timestamp_type` is Kafka's: 0 for CreateTime, 1 for LogAppendTime. `value_bytes` is 0 for a null value. `tick_value` is
the value of a record that may be a tick: without a key, and of at most `MAX_TICK_BYTES`.
"""

EVENT_ROW_SCHEMA = pa.schema(
    [
        pa.field("event", pa.int8(), nullable=False),
        pa.field("source", pa.int8(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("at_ms", pa.int64(), nullable=False),
        pa.field("transaction_id", pa.string()),
        pa.field("producer_group", pa.string()),
        pa.field("topic", pa.string()),
        pa.field("incarnation", pa.int32(), nullable=False),
        pa.field("immunity_ms", pa.int64(), nullable=False),
        pa.field("action", pa.string()),
        pa.field("half_pointer", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("detail", pa.string()),
    ]
)
"""One row for each record but the ticks, whose times travel beside the events."""

EVENT_SCHEMA = StructType(
    [
        StructField("bucket", IntegerType()),
        StructField("event", IntegerType()),
        StructField("source", IntegerType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("at_ms", LongType()),
        StructField("transaction_id", StringType()),
        StructField("producer_group", StringType()),
        StructField("topic", StringType()),
        StructField("incarnation", IntegerType()),
        StructField("immunity_ms", LongType()),
        StructField("action", StringType()),
        StructField("signature", StringType()),
        StructField("half_pointer", StringType()),
        StructField("tick_partitions", IntegerType()),
        StructField("reason", StringType()),
        StructField("detail", StringType()),
    ]
)
"""One row for each record; for a tick, one row for each bucket.

Numbers are never null, because pandas turns an integer column with nulls into floats.
"""

OUTCOME_SCHEMA = StructType(
    [
        StructField("kind", IntegerType()),
        StructField("transaction_id", StringType()),
        StructField("source", IntegerType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("at_ms", LongType()),
        StructField("decided_ms", LongType()),
        StructField("producer_group", StringType()),
        StructField("topic", StringType()),
        StructField("incarnation", IntegerType()),
        StructField("check_times", IntegerType()),
        StructField("reason", StringType()),
        StructField("detail", StringType()),
    ]
)
"""The columns of `halfway.transforms.protocol.Outcome`, in its order."""


class StoredRecord(NamedTuple):
    """The record that Kafka holds at an offset.

    `headers` is None if the name of a header is not UTF-8, because the client cannot return such headers.
    """

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]] | None


CHECK_REQUEST_SCHEMA = StructType(
    [StructField("key", BinaryType()), StructField("value", BinaryType()), StructField("headers", HEADERS_TYPE)]
)
"""The columns that Spark's Kafka sink takes."""
