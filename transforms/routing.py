"""Fetched outcomes to the rows of each sink (design §4) and to check requests (design §2)."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from schemas import headers as h
from schemas.outcomes import Reason
from schemas.tables import DISCARDED_SCHEMA, MESSAGES_SCHEMA, QUARANTINE_SCHEMA


def to_messages(fetched: DataFrame) -> DataFrame:
    """Return MESSAGES_SCHEMA for fetched commits; halves that were not found are left out."""
    committed = _with_header_map(fetched)
    return committed.select(*_message_columns(), F.timestamp_millis("decided_ms").alias("committed_at")).to(MESSAGES_SCHEMA)


def to_discarded(fetched: DataFrame) -> DataFrame:
    """Return DISCARDED_SCHEMA for fetched discards; halves that were not found are left out."""
    discarded = _with_header_map(fetched)
    return discarded.select(*_message_columns(), "reason", F.timestamp_millis("decided_ms").alias("discarded_at")).to(DISCARDED_SCHEMA)


def to_quarantine(fetched: DataFrame, half_topic: str, op_topic: str) -> DataFrame:
    """Return QUARANTINE_SCHEMA for refused records; one that is gone from its topic keeps its pointer and reason."""
    topic = F.when(F.col("source") == int(h.Source.OP), op_topic).otherwise(half_topic)
    return fetched.select(
        topic.alias("source_topic"),
        F.col("partition").alias("source_partition"),
        F.col("offset").alias("source_offset"),
        F.timestamp_millis("at_ms").alias("source_timestamp"),
        "transaction_id",
        "key",
        "value",
        "headers",
        "reason",
        "detail",
        "batch_id",
    ).to(QUARANTINE_SCHEMA)


def to_half_lost(outcomes: DataFrame, batch_id: int, half_topic: str) -> DataFrame:
    """Return QUARANTINE_SCHEMA for halves that could not be read when they were needed (R17)."""
    nothing = F.lit(None)
    lost = outcomes.withColumns(
        {
            "reason": F.lit(str(Reason.HALF_LOST)),
            "detail": F.lit("the half topic does not hold this half at its offset any more"),
            "batch_id": F.lit(batch_id).cast("bigint"),
            "key": nothing.cast("binary"),
            "value": nothing.cast("binary"),
            "headers": nothing.cast(QUARANTINE_SCHEMA["headers"].dataType),
        }
    )
    return to_quarantine(lost, half_topic, half_topic)


def to_check_requests(fetched: DataFrame) -> DataFrame:
    """Return the Kafka records (key, value, headers) of fetched checks: the half as it was, its number and `CHECK_ID`."""
    own = ", ".join(f"'{name}'" for name in h.CHECK_HEADERS)
    check_id = F.concat_ws(":", "transaction_id", F.concat_ws(".", "partition", "offset"), "check_times")
    numbered = F.array(
        _header(h.TRANSACTION_CHECK_TIMES, F.col("check_times")),
        _header(h.CHECK_ID, check_id),
    )
    return fetched.where("found").select(
        "key",
        F.coalesce("value", F.lit(b"")).alias("value"),
        F.concat(F.expr(f"filter(headers, x -> x.key NOT IN ({own}))"), numbered).alias("headers"),
    )


def _header(name: str, value: Column) -> Column:
    return F.struct(F.lit(name).alias("key"), value.cast("string").cast("binary").alias("value"))


def _with_header_map(fetched: DataFrame) -> DataFrame:
    found = fetched.where("found")
    return found.select("*", F.expr("CAST(map_from_entries(headers) AS map<string,string>)").alias("header_map"))


def _message_columns() -> list[Column]:
    header = F.col("header_map")
    contract = ", ".join(f"'{name}'" for name in h.HALF_HEADERS)
    return [
        F.col("transaction_id"),
        F.col("topic"),
        F.coalesce(header[h.REAL_QID].cast("int"), F.lit(0)).alias("queue_id"),
        header[h.TAGS].alias("tags"),
        header[h.KEYS].alias("keys"),
        F.coalesce("value", F.lit(b"")).alias("body"),
        F.expr(f"map_filter(header_map, (name, value) -> name NOT IN ({contract}))").alias("properties"),
        F.col("producer_group"),
        F.timestamp_millis(F.coalesce(header[h.BORN_TIMESTAMP].cast("bigint"), F.col("at_ms"))).alias("born_at"),
        F.timestamp_millis("at_ms").alias("half_at"),
        F.col("check_times"),
        F.col("incarnation"),
        F.col("partition").alias("half_partition"),
        F.col("offset").alias("half_offset"),
        F.col("batch_id"),
    ]
