"""Pending transactions aggregated in Spark, compared with the state rows that they come from."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from chispa import assert_df_equality
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from halfway.schemas.state_format import STATE_SCHEMA
from halfway.transforms.views import pending_frames
from halfway.transforms.views.pending import PENDING_SCHEMA, view_pending
from halfway.transforms.views.pending_frames import AGE_EDGES_MS, OTHERS, StateFacts, Why
from tests.support.scenario import Record, commit, half, rollback, states_after, tick

KAFKA = "key BINARY, timestamp TIMESTAMP, partition INT, offset BIGINT, headers ARRAY<STRUCT<key: STRING, value: BINARY>>"


def states_of(spark: SparkSession, batches: Iterable[Iterable[Record]]) -> tuple[list[tuple[int, bytes]], DataFrame]:
    rows, _ = states_after(batches)
    return rows, spark.createDataFrame(rows, STATE_SCHEMA).repartition(2)


def pending_of(spark: SparkSession, *rows: tuple[str, str, int | None, int]) -> DataFrame:
    """Return pending transactions; each row is (id, group, age, checks)."""
    full = [
        (name, 0, group, "orders", 1_000_000 - (age_ms or 0), age_ms, checks, 2_000_000, 0, number)
        for number, (name, group, age_ms, checks) in enumerate(rows)
    ]
    return spark.createDataFrame(full, from_arrow_schema(PENDING_SCHEMA))


def op(key: bytes | None, second: int, *headers: tuple[str, bytes]) -> tuple[Any, ...]:
    return key, f"2026-01-01 00:00:{second:02d}", 0, second, [*headers]


def ops_of(spark: SparkSession, *rows: tuple[Any, ...]) -> DataFrame:
    frame = spark.createDataFrame(rows, KAFKA.replace("TIMESTAMP", "STRING"))
    return frame.withColumn("timestamp", frame["timestamp"].cast("timestamp"))


def facts_of(states: DataFrame) -> StateFacts:
    return pending_frames.state_facts(pending_frames.bucket_facts(states).collect())


def tuples(frame: DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in (frame.select(*columns) if columns else frame).collect()]


def test_spark_computes_the_same_as_view_pending(spark: SparkSession) -> None:
    rows, states = states_of(
        spark,
        [
            [half(f"t{n}", n * 10, group=f"g{n % 3}", offset=n) for n in range(40)],
            [commit("t1", 60, group="g1"), rollback("t2", 61, group="g2"), commit("waits", 62), tick(65, away=("g0",))],
        ],
    )
    view = view_pending(rows)
    pending = pending_frames.pending_transactions(states)
    assert_df_equality(pending, spark.createDataFrame(view.transactions), ignore_row_order=True, ignore_nullable=True)
    facts = facts_of(states)
    assert facts == StateFacts(view.horizon_ms, view.absent_groups, view.totals, view.waiting, view.remembered)
    assert (facts.horizon_ms, facts.absent_groups, facts.waiting, facts.remembered) == (65, {"g0"}, 1, 2)


def test_the_horizon_is_unknown_while_a_bucket_has_none(spark: SparkSession) -> None:
    _, states = states_of(spark, [[half("a", 0)]])
    assert facts_of(states).horizon_ms is None
    assert tuples(pending_frames.age_histogram(pending_frames.pending_transactions(states))) == [(None, 1)]


@pytest.mark.parametrize(("age_ms", "from_ms"), [(-5, 0), (0, 0), (999, 0), (1_000, 1_000), (59_999, 30_000), (10**12, AGE_EDGES_MS[-1])])
def test_an_age_class_includes_its_lower_bound(spark: SparkSession, age_ms: int, from_ms: int) -> None:
    assert tuples(pending_frames.age_histogram(pending_of(spark, ("a", "g", age_ms, 0)))) == [(from_ms, 1)]


def test_pending_transactions_are_counted_by_their_checks(spark: SparkSession) -> None:
    pending = pending_of(spark, ("a", "g", 1, 0), ("b", "g", 1, 2), ("c", "h", 1, 2))
    assert tuples(pending_frames.check_histogram(pending)) == [(0, 1), (2, 2)]


def test_the_largest_groups_are_named_and_the_others_are_summed(spark: SparkSession) -> None:
    groups: Sequence[tuple[str, int]] = (("big", 3), ("mid", 2), ("small", 1), ("tiny", 1))
    pending = pending_of(spark, *((f"{group}{n}", group, 1_000 * n, 0) for group, count in groups for n in range(count)))
    assert tuples(pending_frames.ages_by_group(pending, groups=2)) == [
        (OTHERS, 0, 2),
        ("big", 0, 1),
        ("big", 1_000, 1),
        ("big", 2_000, 1),
        ("mid", 0, 1),
        ("mid", 1_000, 1),
    ]


def test_the_latest_answer_to_a_check_counts(spark: SparkSession) -> None:
    asked = ("FROM_CHECK", b"TRUE")
    ops = ops_of(
        spark,
        op(b"a", 1, ("ACTION", b"UNKNOWN"), asked, ("REMARK", b"down")),
        op(b"a", 3, ("ACTION", b"COMMIT"), asked),
        op(b"a", 2, ("ACTION", b"UNKNOWN"), asked),
        op(b"a", 4, ("ACTION", b"ROLLBACK")),
        op(b"b", 5, ("ACTION", b"UNKNOWN")),
        op(None, 6, ("TICK", b"1")),
        (b"c", "2026-01-01 00:00:07", 0, 7, None),
        op(b"d", 8, ("ACTION", b"UNKNOWN"), asked, ("ACTION", b"COMMIT"), ("REMARK", b"")),  # which the job quarantines
        op(b"e", 9, ("ACTION", b"UNKNOWN"), asked, ("PGROUP", b"g"), ("INCARNATION", b"1")),
        op(b"e", 10, ("ACTION", b"COMMIT"), asked, ("PGROUP", b"g")),
        op(b"e", 11, ("ACTION", b"UNKNOWN"), asked, ("PGROUP", b"another"), ("INCARNATION", b"one")),
    )
    found = sorted(tuples(pending_frames.last_answers(ops)), key=str)
    assert found == [
        ("a", None, 0, "COMMIT", None),
        ("d", None, 0, "COMMIT", ""),
        ("e", "another", None, "UNKNOWN", None),  # which the job quarantines
        ("e", "g", 0, "COMMIT", None),
        ("e", "g", 1, "UNKNOWN", None),
    ]


def test_each_reason_why_a_group_is_stuck_has_a_row(spark: SparkSession) -> None:
    pending = pending_of(
        spark,
        ("young", "g", 10, 0),
        ("mute", "g", 50, 3),
        ("mute2", "g", 40, 4),
        ("unsure", "g", 60, 1),
        ("odd", "g", 30, 1),
        ("gone", "away", 70, 2),
    )
    answers = spark.createDataFrame(
        [
            ("unsure", "g", 0, "UNKNOWN", "down"),
            ("odd", "another", 0, "COMMIT", None),
            ("gone", "away", 0, "UNKNOWN", "x"),
            ("settled", "g", 0, "COMMIT", None),
            ("mute", "another", 0, "UNKNOWN", "of a stranger"),
            ("mute2", "g", 1, "UNKNOWN", "of another incarnation"),
        ],
        pending_frames.ANSWERS,
    )
    assert tuples(pending_frames.stuck(pending, answers, {"away"})) == [
        ("away", Why.ABSENT, 1, 70, 2, "x", "gone"),
        ("g", Why.UNKNOWN, 1, 60, 1, "down", "unsure"),
        ("g", Why.SILENT, 2, 50, 4, None, "mute"),
        ("g", Why.UNSETTLED, 1, 30, 1, None, "odd"),
        ("g", Why.NOT_ASKED, 1, 10, 0, None, "young"),
    ]
