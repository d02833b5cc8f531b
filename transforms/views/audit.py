"""Aggregates the outcomes of messages over time: rates, latencies, reasons. Never reads the columns of bodies."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

PERCENTILES = (0.5, 0.95, 0.99)
_PIECES = 60
_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 14_400, 21_600, 43_200, 86_400)
_ACCURACY = 10_000


def step_ms(span_ms: int) -> int:
    """Return a round step, from 1 s to 1 d, that divides a span into about 60 pieces at most."""
    return next((step * 1_000 for step in _STEPS_S if step * 1_000 * _PIECES >= span_ms), _STEPS_S[-1] * 1_000)


def outcomes(messages: DataFrame, discarded: DataFrame, quarantine: DataFrame) -> DataFrame:
    """Return all outcomes as one frame.

    Args:
        messages: the table `messages`.
        discarded: the table `discarded`. Its time is the horizon at which the message was discarded.
        quarantine: the table `quarantine`. Its time is that of the quarantined record.

    Returns:
        at TIMESTAMP, outcome (`committed`, `discarded` or `quarantined`), reason (null for a commit).
    """
    committed = messages.select(
        F.col("committed_at").alias("at"), F.lit("committed").alias("outcome"), F.lit(None).cast("string").alias("reason")
    )
    given_up = discarded.select(F.col("discarded_at").alias("at"), F.lit("discarded").alias("outcome"), "reason")
    refused = quarantine.select(F.col("source_timestamp").alias("at"), F.lit("quarantined").alias("outcome"), "reason")
    return committed.unionByName(given_up).unionByName(refused)


def span(found: DataFrame) -> DataFrame:
    """Return one row with the first and the last time of `at`: first_ms, last_ms; null if there is no outcome."""
    at_ms = F.unix_millis("at")
    return found.agg(F.min(at_ms).alias("first_ms"), F.max(at_ms).alias("last_ms"))


def since(table: DataFrame, column: str, from_ms: int) -> DataFrame:
    """Return the rows whose `column` is not before `from_ms`. Delta skips the files without such rows."""
    return table.where(F.col(column) >= F.timestamp_millis(F.lit(from_ms)))


def rates(found: DataFrame, step: int) -> DataFrame:
    """Count outcomes by time: at (the start of the step), outcome, reason, count.

    Args:
        found: what `outcomes` returns.
        step: in ms.
    """
    return found.groupBy(_begin("at", step), "outcome", "reason").count().orderBy("at", "outcome", "reason")


def latencies(messages: DataFrame, step: int) -> DataFrame:
    """Return the latencies from half to commit, by the time of the commit.

    Args:
        messages: the table `messages`.
        step: in ms.

    Returns:
        at (the start of the step), messages, and in ms p50, p95, p99, worst.
    """
    return messages.groupBy(_begin("committed_at", step)).agg(*_latency_columns()).orderBy("at")


def by_group(messages: DataFrame, discarded: DataFrame) -> DataFrame:
    """Aggregate messages and discards by producer group.

    Args:
        messages: the table `messages`.
        discarded: the table `discarded`.

    Returns:
        producer_group, messages, asked (delivered only after a check), p50, p95, p99, worst (ms), discarded; the
        largest group first.
    """
    asked = F.count_if(F.col("check_times") > 0).alias("asked")
    delivered = messages.groupBy("producer_group").agg(*_latency_columns(), asked)
    given_up = discarded.groupBy("producer_group").agg(F.count(F.lit(1)).alias("discarded"))
    joined = delivered.join(given_up, "producer_group", "full").fillna(0, ["messages", "asked", "discarded"])
    columns = ["producer_group", "messages", "asked", *_names(), "worst", "discarded"]
    return joined.select(*columns).orderBy(F.desc("messages"), F.desc("discarded"), "producer_group")


def _latency_columns() -> list[Column]:
    latency_ms = F.unix_millis("committed_at") - F.unix_millis("half_at")
    # An op may come before its half (R1), which makes the latency negative.
    latency_ms = F.greatest(latency_ms, F.lit(0))
    percentiles = [F.percentile_approx(latency_ms, share, _ACCURACY).alias(name) for share, name in zip(PERCENTILES, _names(), strict=True)]
    return [F.count(F.lit(1)).alias("messages"), *percentiles, F.max(latency_ms).alias("worst")]


def _names() -> list[str]:
    return [f"p{share * 100:.0f}" for share in PERCENTILES]


def _begin(column: str, step: int) -> Column:
    ms = F.unix_millis(column)
    return F.timestamp_millis(ms - F.pmod(ms, F.lit(step))).alias("at")
