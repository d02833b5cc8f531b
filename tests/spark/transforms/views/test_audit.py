"""Rates, latencies and reasons in the audit view, compared with figures that a reader can work out."""

from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from halfway.schemas.tables import DISCARDED_SCHEMA, MESSAGES_SCHEMA, QUARANTINE_SCHEMA
from halfway.transforms.views import audit

START_MS = 1_700_000_000_000


def frame(spark: SparkSession, schema: Any, times: tuple[str, ...], *rows: dict[str, Any]) -> DataFrame:
    """Return rows of a table with some of its columns; times are in ms after START_MS."""
    given = ", ".join(f"{name} {'BIGINT' if name in times else schema[name].dataType.simpleString()}" for name in rows[0])
    made = spark.createDataFrame([tuple(row.values()) for row in rows], given)
    return made.withColumns({name: F.timestamp_millis(F.col(name) + START_MS) for name in times if name in rows[0]})


def message(half_ms: int, commit_ms: int, group: str = "g", checks: int = 0) -> dict[str, Any]:
    return {"half_at": half_ms, "committed_at": commit_ms, "producer_group": group, "check_times": checks}


def messages(spark: SparkSession, *rows: dict[str, Any]) -> DataFrame:
    return frame(spark, MESSAGES_SCHEMA, ("half_at", "committed_at"), *rows)


def discarded(spark: SparkSession, *rows: tuple[int, str, str]) -> DataFrame:
    named = [{"discarded_at": at_ms, "reason": reason, "producer_group": group} for at_ms, reason, group in rows]
    return frame(spark, DISCARDED_SCHEMA, ("discarded_at",), *named)


def quarantine(spark: SparkSession, *rows: tuple[int, str]) -> DataFrame:
    return frame(
        spark, QUARANTINE_SCHEMA, ("source_timestamp",), *({"source_timestamp": at_ms, "reason": reason} for at_ms, reason in rows)
    )


def after_start(rows: DataFrame) -> list[tuple[Any, ...]]:
    """Return the rows, with `at` in ms after START_MS."""
    return [tuple(row) for row in rows.withColumn("at", F.unix_millis("at") - START_MS).collect()]


@pytest.mark.parametrize(
    ("span_ms", "step_ms"),
    [(0, 1_000), (60_000, 1_000), (60_001, 2_000), (3_600_000, 60_000), (86_400_000, 1_800_000), (10**12, 86_400_000)],
)
def test_a_time_step_is_a_round_number(span_ms: int, step_ms: int) -> None:
    assert audit.step_ms(span_ms) == step_ms


def test_rates_are_counted_by_step_outcome_and_reason(spark: SparkSession) -> None:
    found = audit.outcomes(
        messages(spark, message(0, 900), message(0, 999), message(0, 1_000)),
        discarded(spark, (1_500, "check_max", "g")),
        quarantine(spark, (100, "missing_key"), (200, "bad_header"), (300, "bad_header")),
    )
    assert after_start(audit.rates(found, 1_000)) == [
        (0, "committed", None, 2),
        (0, "quarantined", "bad_header", 2),
        (0, "quarantined", "missing_key", 1),
        (1_000, "committed", None, 1),
        (1_000, "discarded", "check_max", 1),
    ]
    assert tuple(audit.span(found).collect()[0]) == (START_MS + 100, START_MS + 1_500)
    assert audit.since(found, "at", START_MS + 1_000).count() == 2
    assert audit.since(found, "at", START_MS + 1_001).count() == 1


def test_the_span_is_empty_without_outcomes(spark: SparkSession) -> None:
    empty = audit.since(messages(spark, message(0, 1)), "committed_at", START_MS + 2)
    none = audit.outcomes(empty, discarded(spark, (0, "x", "g")).limit(0), quarantine(spark, (0, "x")).limit(0))
    assert tuple(audit.span(none).collect()[0]) == (None, None)


def test_latencies_are_percentiles_of_each_step(spark: SparkSession) -> None:
    rows = [message(0, n) for n in range(1, 101)] + [message(1_000, 1_007), message(1_500, 1_400)]
    assert after_start(audit.latencies(messages(spark, *rows), 1_000)) == [(0, 100, 50, 95, 99, 100), (1_000, 2, 0, 7, 7, 7)]


def test_a_group_is_listed_if_it_has_deliveries_or_discards(spark: SparkSession) -> None:
    delivered = messages(spark, message(0, 10), message(0, 20, checks=2), message(0, 5, "h"))
    given_up = discarded(spark, (0, "check_max", "h"), (0, "expired", "mute"))
    assert [tuple(row) for row in audit.by_group(delivered, given_up).collect()] == [
        ("g", 2, 1, 10, 20, 20, 20, 0),
        ("h", 1, 0, 5, 5, 5, 5, 1),
        ("mute", 0, 0, None, None, None, None, 1),
    ]
