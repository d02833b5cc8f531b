"""A notebook sees each record as the job reads it."""

from datetime import UTC, datetime

from pyspark.sql import SparkSession
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType, TimestampType

from halfway.schemas.tables import HEADERS_TYPE
from halfway.transforms.decoding import DecoderConfig
from halfway.transforms.views.decoded import decoded_records, header_texts

KAFKA_SCHEMA = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("timestampType", IntegerType()),
        StructField("headers", HEADERS_TYPE),
    ]
)
AT = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
AT_MS = 1_767_323_045_678


def test_one_row_for_each_record_with_what_was_read_or_why_it_is_refused(spark: SparkSession) -> None:
    tick = [("TICK", str(AT_MS).encode()), ("PARTITIONS", b"4")]
    records = [
        (b"a", b"body", "half", [("REAL_TOPIC", b"orders"), ("PGROUP", b"g"), ("INCARNATION", b"2")]),
        (b"a", None, "op", [("ACTION", b"UNKNOW"), ("PGROUP", b"g")]),
        (b"b", b"x" * 101, "half", [("REAL_TOPIC", b"orders"), ("PGROUP", b"g")]),
        (b"c", None, "half", None),
        (None, b'{"absent_groups": ["away"]}', "op", tick),
    ]
    rows = [(key, value, topic, 3, offset, AT, 1, headers) for offset, (key, value, topic, headers) in enumerate(records)]
    config = DecoderConfig(max_body_bytes=100, max_clock_skew_ms=1_000)
    found = decoded_records(spark.createDataFrame(rows, KAFKA_SCHEMA).coalesce(1), config, "op").collect()
    assert {row.at_ms for row in found} == {AT_MS}
    columns = ("event", "source", "transaction_id", "producer_group", "topic", "incarnation", "action", "reason", "detail")
    assert sorted([tuple(row[name] for name in columns) for row in found], key=str) == [
        ("BROKEN", 0, "b", None, None, 0, None, "body_too_large", "101 bytes, at most 100"),
        ("BROKEN", 0, "c", None, None, 0, None, "missing_header", "REAL_TOPIC"),
        ("HALF", 0, "a", "g", "orders", 2, None, None, None),
        ("OP", 1, "a", "g", None, 0, "UNKNOWN", None, None),
        ("TICK", 1, None, None, None, 0, None, None, '{"absent_groups": ["away"]}'),
    ]


def test_a_header_that_is_no_utf8_does_not_end_a_notebook(spark: SparkSession) -> None:
    """Anyone who may write to the topic can send one, and the job only refuses its record."""
    headers = [("REMARK", "für später".encode("latin-1")), ("TAGS", b"a"), ("TAGS", b"b"), ("KEYS", None)]
    records = spark.createDataFrame([(b"a", None, "op", 0, 0, AT, 1, headers)], KAFKA_SCHEMA)
    found = records.select(header_texts()).select("header.REMARK", "header.TAGS", "header.KEYS").toPandas()
    assert found.to_dict("records") == [{"REMARK": "f\ufffdr sp\ufffdter", "TAGS": "b", "KEYS": None}]
