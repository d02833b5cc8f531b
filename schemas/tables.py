"""The schemas of the Delta tables: the three of the job, which it only appends to, and `erasures` (docs/tables.md)."""

from enum import StrEnum

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)


class Table(StrEnum):
    """The names of the tables, below `storage.warehouse` or in `storage.catalog_schema`."""

    MESSAGES = "messages"
    DISCARDED = "discarded"
    QUARANTINE = "quarantine"


HEADERS_TYPE = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))

_MESSAGE = [
    StructField("transaction_id", StringType()),
    StructField("topic", StringType()),
    StructField("queue_id", IntegerType()),
    StructField("tags", StringType()),
    StructField("keys", StringType()),
    StructField("body", BinaryType()),
    StructField("properties", MapType(StringType(), StringType())),
    StructField("producer_group", StringType()),
    StructField("born_at", TimestampType()),
    StructField("half_at", TimestampType()),
]
_BOOKMARK = [StructField("epoch", IntegerType()), StructField("batch_id", LongType())]
_POINTER = [
    StructField("check_times", IntegerType()),
    StructField("incarnation", IntegerType()),
    StructField("half_partition", IntegerType()),
    StructField("half_offset", LongType()),
]

_OP_POINTER = [StructField("op_partition", IntegerType()), StructField("op_offset", LongType())]

MESSAGES_SCHEMA = StructType([*_MESSAGE, StructField("committed_at", TimestampType()), *_POINTER, *_OP_POINTER, *_BOOKMARK])
DISCARDED_SCHEMA = StructType(
    [*_MESSAGE, *_POINTER, *_BOOKMARK, StructField("reason", StringType()), StructField("discarded_at", TimestampType())]
)
QUARANTINE_SCHEMA = StructType(
    [
        StructField("source_topic", StringType()),
        StructField("source_partition", IntegerType()),
        StructField("source_offset", LongType()),
        StructField("source_timestamp", TimestampType()),
        StructField("transaction_id", StringType()),
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("headers", HEADERS_TYPE),
        StructField("reason", StringType()),
        StructField("detail", StringType()),
        *_BOOKMARK,
    ]
)

ERASURES = "erasures"
"""The table of what `halfway erase` has erased, made with the first erasure."""
ERASURES_SCHEMA = StructType(
    [
        StructField("erased_at", TimestampType()),
        StructField("transaction_id", StringType()),
        StructField("producer_group", StringType()),
        StructField("erased_by", StringType()),
        StructField("remark", StringType()),
        StructField("messages", IntegerType()),
        StructField("discarded", IntegerType()),
        StructField("quarantine", IntegerType()),
    ]
)

TABLE_SCHEMAS = {Table.MESSAGES: MESSAGES_SCHEMA, Table.DISCARDED: DISCARDED_SCHEMA, Table.QUARANTINE: QUARANTINE_SCHEMA}

SEARCHED_COLUMNS = {
    Table.MESSAGES: ("transaction_id", "topic", "producer_group", "committed_at", "half_partition", "half_offset", "epoch", "batch_id"),
    Table.DISCARDED: ("transaction_id", "topic", "producer_group", "discarded_at", "half_partition", "half_offset", "epoch", "batch_id"),
    Table.QUARANTINE: ("source_topic", "source_partition", "source_offset", "transaction_id", "reason", "epoch", "batch_id"),
}
"""The columns with statistics, which queries filter by. Statistics on bodies would cost time and serve no query."""
