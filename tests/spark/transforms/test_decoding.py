"""Kafka's columns become events, compared frame by frame.

`tests/kafka/pipelines/resolve/test_bad_input.py` sends every kind of broken record through a real Kafka.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from chispa import assert_df_equality
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType, TimestampType

from halfway.schemas.events import EVENT_SCHEMA, EventKind
from halfway.schemas.tables import HEADERS_TYPE
from halfway.transforms.decoding import DecoderConfig, decode

CONFIG = DecoderConfig("half", "op", max_body_bytes=100, bucket_keys=(0, 1, 2, 3))
KAFKA_SCHEMA = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("headers", HEADERS_TYPE),
    ]
)
AT = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
AT_MS = 1_767_323_045_678


def decoded(spark: SparkSession, *records: tuple[bytes | None, bytes | None, str, Sequence[tuple[str, bytes | None]] | None]) -> DataFrame:
    rows = [(key, value, topic, 3, 10 + n, AT, headers) for n, (key, value, topic, headers) in enumerate(records)]
    return decode(spark.createDataFrame(rows, KAFKA_SCHEMA), CONFIG)


def expected(spark: SparkSession, **columns: Any) -> DataFrame:
    numbers = dict.fromkeys(("incarnation", "immunity_ms", "tick_partitions"), 0)
    row = dict.fromkeys(EVENT_SCHEMA.fieldNames()) | numbers | {"partition": 3, "offset": 10, "at_ms": AT_MS} | columns
    return spark.createDataFrame([row], EVENT_SCHEMA)


def test_half(spark: SparkSession) -> None:
    headers = [("REAL_TOPIC", b"orders"), ("PGROUP", b"g"), ("INCARNATION", b"2"), ("CHECK_IMMUNITY_TIME_IN_SECONDS", b"7"), ("own", b"x")]
    event = decoded(spark, (b"id", b"body", "half", headers))
    half = {
        "event": int(EventKind.HALF),
        "source": 0,
        "transaction_id": "id",
        "producer_group": "g",
        "topic": "orders",
        "incarnation": 2,
        "immunity_ms": 7000,
    }
    assert_df_equality(event.drop("bucket"), expected(spark, **half).drop("bucket"), ignore_nullable=True)


def test_op_of_either_spelling_of_unknown(spark: SparkSession) -> None:
    for spelled in (b"UNKNOWN", b"UNKNOW"):
        event = decoded(spark, (b"id", None, "op", [("ACTION", spelled), ("PGROUP", b"g")]))
        op = {"event": int(EventKind.OP), "source": 1, "transaction_id": "id", "producer_group": "g", "action": "UNKNOWN"}
        assert_df_equality(event.drop("bucket"), expected(spark, **op).drop("bucket"), ignore_nullable=True)


def test_a_half_and_its_op_share_a_bucket(spark: SparkSession) -> None:
    halves = [(b"id%d" % n, b"", "half", [("REAL_TOPIC", b"t"), ("PGROUP", b"g")]) for n in range(50)]
    ops = [(b"id%d" % n, b"", "op", [("ACTION", b"COMMIT"), ("PGROUP", b"g")]) for n in range(50)]
    by_id = decoded(spark, *halves, *ops).groupBy("transaction_id").agg(F.collect_set("bucket").alias("buckets"), F.count("*").alias("n"))
    rows = by_id.collect()
    assert all(len(row.buckets) == 1 and row.n == 2 for row in rows)
    assert {row.buckets[0] for row in rows} == {0, 1, 2, 3}


def test_a_tick_goes_to_every_bucket(spark: SparkSession) -> None:
    event = decoded(spark, (None, b'{"absent_groups": ["g"]}', "op", [("TICK", b"5"), ("PARTITIONS", b"4")]))
    assert sorted(row.bucket for row in event.collect()) == [0, 1, 2, 3]
    tick = {"event": int(EventKind.TICK), "source": 1, "tick_partitions": 4, "detail": '{"absent_groups":["g"]}'}
    assert_df_equality(event.where("bucket = 0").drop("bucket"), expected(spark, **tick).drop("bucket"), ignore_nullable=True)


def test_a_record_without_headers_is_broken_and_goes_to_one_bucket(spark: SparkSession) -> None:
    event = decoded(spark, (b"id", b"body", "half", None))
    broken = {"event": int(EventKind.BROKEN), "source": 0, "transaction_id": "id", "reason": "missing_header", "detail": "REAL_TOPIC"}
    assert_df_equality(event.drop("bucket"), expected(spark, **broken).drop("bucket"), ignore_nullable=True)


def test_lost_notice(spark: SparkSession) -> None:
    event = decoded(spark, (b"id", None, "half", [("HALF_LOST", b"3:17")]))
    lost = {"event": int(EventKind.LOST), "source": 0, "transaction_id": "id", "half_pointer": "3:17"}
    assert_df_equality(event.drop("bucket"), expected(spark, **lost).drop("bucket"), ignore_nullable=True)


def test_a_lost_notice_without_a_valid_pointer_is_broken(spark: SparkSession) -> None:
    for said in ([("HALF_LOST", None)], [("HALF_LOST", b"3:17\n")], [("HALF_LOST", b"3:")]):
        event = decoded(spark, (b"id", None, "half", said)).collect()
        assert [(row.event, row.reason) for row in event] == [(EventKind.BROKEN, "bad_header")]
    [twice] = decoded(spark, (b"id", None, "half", [("HALF_LOST", b"3:17"), ("HALF_LOST", b"3:18")])).collect()
    assert (twice.event, twice.reason) == (EventKind.BROKEN, "duplicate_header")


def test_a_number_with_a_line_end_is_not_a_number(spark: SparkSession) -> None:
    [event] = decoded(spark, (b"id", None, "op", [("ACTION", b"COMMIT"), ("PGROUP", b"g"), ("INCARNATION", b"5\n")])).collect()
    assert (event.event, event.reason) == (EventKind.BROKEN, "bad_header")


def test_a_tick_with_a_duplicate_header_or_without_json_is_broken(spark: SparkSession) -> None:
    good = [("TICK", b"5"), ("PARTITIONS", b"4")]
    bad: list[tuple[bytes, list[tuple[str, bytes]]]] = [
        (b"", [*good, ("PARTITIONS", b"9")]),
        (b"", [*good, ("TICK", b"5")]),
        (b"{'absent_groups': []}", good),
    ]
    for value, headers in bad:
        [event] = decoded(spark, (None, value, "op", headers)).collect()
        assert (event.event, event.reason) == (EventKind.BROKEN, "bad_tick"), (value, headers)
