"""What is pending, how old, how often asked, and why it is stuck: aggregates for people, made in Spark over the job's state.

`transforms/views/pending.py` says what a state row holds; here it runs on the executors, so that only counts come to the driver.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from halfway.schemas import headers as h
from halfway.transforms.views.pending import PENDING_SCHEMA, view_pending

_S, _M, _H, _D = 1_000, 60_000, 3_600_000, 86_400_000
AGE_EDGES_MS = (
    0,
    _S,
    2 * _S,
    5 * _S,
    10 * _S,
    30 * _S,
    _M,
    2 * _M,
    5 * _M,
    10 * _M,
    30 * _M,
    _H,
    3 * _H,
    6 * _H,
    12 * _H,
    _D,
    2 * _D,
    3 * _D,
)
"""Lower bounds of the age classes: each about twice the one before, as ages spread over six powers of ten."""
OTHERS = "(all others)"

_FACTS_SCHEMA = pa.schema(
    [
        pa.field("horizon_ms", pa.int64()),
        pa.field("absent_groups", pa.list_(pa.string())),
        pa.field("totals", pa.string()),
        pa.field("waiting", pa.int64()),
        pa.field("remembered", pa.int64()),
    ]
)


class Why(StrEnum):
    """Why a transaction is still pending."""

    NOT_ASKED = "not asked yet"
    AWAY = "every instance of its group is away"
    SILENT = "asked, and nobody answers"
    UNKNOWN = "the answer is UNKNOWN"
    UNSETTLED = "a verdict came that does not settle it"


WAY_OUT = {
    Why.NOT_ASKED: "none needed: it is younger than its first check",
    Why.AWAY: "start an instance of the group; checks are put off and not counted meanwhile (R15)",
    Why.SILENT: "see whether the group's consumer txn-check-<group> reads the check topic, and its log",
    Why.UNKNOWN: "the listener does not know the outcome: see its remark, and look in the service's database",
    Why.UNSETTLED: "see the quarantine: another group, or another incarnation; or the next batch settles it",
}


@dataclass(frozen=True)
class Facts:
    """What the whole state says besides its transactions; see `halfway.transforms.views.pending.PendingView`."""

    horizon_ms: int | None
    absent_groups: frozenset[str]
    totals: Counter[str]
    waiting: int
    remembered: int


def pending_transactions(states: DataFrame) -> DataFrame:
    """Return what is pending as one row a transaction (PENDING_SCHEMA).

    Args:
        states: one row a bucket (`halfway.schemas.state_format.STATE_SCHEMA`).
    """

    def view(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from view_pending(_rows(batch)).transactions.to_batches(max_chunksize=10_000)

    return states.mapInArrow(view, from_arrow_schema(PENDING_SCHEMA))


def facts_of_state(states: DataFrame) -> Facts:
    """Return what the whole state says; one small row a bucket is collected."""

    def view(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            views = [view_pending([row]) for row in _rows(batch)]
            columns = [
                [view.horizon_ms for view in views],
                [sorted(view.absent_groups) for view in views],
                [json.dumps(view.totals) for view in views],
                [view.waiting for view in views],
                [view.remembered for view in views],
            ]
            arrays = [pa.array(column, field.type) for column, field in zip(columns, _FACTS_SCHEMA, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=_FACTS_SCHEMA)

    rows = states.mapInArrow(view, from_arrow_schema(_FACTS_SCHEMA)).collect()
    horizons = [row["horizon_ms"] for row in rows]
    return Facts(
        horizon_ms=min(horizons) if horizons and None not in horizons else None,
        absent_groups=frozenset(group for row in rows for group in row["absent_groups"]),
        totals=sum((Counter(json.loads(row["totals"])) for row in rows), Counter[str]()),
        waiting=sum(row["waiting"] for row in rows),
        remembered=sum(row["remembered"] for row in rows),
    )


def age_histogram(pending: DataFrame) -> DataFrame:
    """Count transactions by age class: from_ms (a bound of AGE_EDGES_MS; null where there is no horizon yet), transactions."""
    return pending.groupBy(_age_class().alias("from_ms")).agg(_transactions()).orderBy("from_ms")


def check_histogram(pending: DataFrame) -> DataFrame:
    """Count transactions by how often they were asked about: check_times, transactions."""
    return pending.groupBy("check_times").agg(_transactions()).orderBy("check_times")


def pending_by_group(pending: DataFrame, groups: int = 12) -> DataFrame:
    """Count transactions by producer group and age class, the largest groups by name and the rest as one.

    Args:
        pending: PENDING_SCHEMA.
        groups: how many are named.

    Returns:
        producer_group, from_ms, transactions.
    """
    largest = pending.groupBy("producer_group").agg(_transactions()).orderBy(F.desc("transactions"), "producer_group").limit(groups)
    named = pending.join(F.broadcast(largest.select("producer_group", F.lit(True).alias("is_named"))), "producer_group", "left")
    group = F.when(F.col("is_named"), F.col("producer_group")).otherwise(OTHERS).alias("producer_group")
    return named.groupBy(group, _age_class().alias("from_ms")).agg(_transactions()).orderBy("producer_group", "from_ms")


def last_answers(ops: DataFrame) -> DataFrame:
    """Return for each transaction the last answer to a check: transaction_id, action, remark.

    Args:
        ops: Spark's Kafka columns of the op topic, with headers.
    """
    header = F.expr("CAST(map_from_entries(headers) AS map<string,string>)")
    answers = ops.where("headers IS NOT NULL AND key IS NOT NULL").select(
        F.col("key").cast("string").alias("transaction_id"), "timestamp", "partition", "offset", header.alias("header")
    )
    place = F.struct("timestamp", "partition", "offset")
    last = F.max_by(F.struct(F.col("header")[h.ACTION].alias("action"), F.col("header")[h.REMARK].alias("remark")), place)
    of_checks = answers.where(F.lower(F.col("header")[h.FROM_CHECK]) == "true")
    return of_checks.groupBy("transaction_id").agg(last.alias("last")).select("transaction_id", "last.action", "last.remark")


def stuck(pending: DataFrame, answers: DataFrame, absent_groups: Collection[str]) -> DataFrame:
    """Say by group why its transactions are pending, the oldest first.

    Args:
        pending: PENDING_SCHEMA.
        answers: what `last_answers` returns.
        absent_groups: the groups that are away (R15).

    Returns:
        producer_group, why (a `Why`), transactions, oldest_ms, most_checks, remark (one of the answers'), example (the oldest one's id).
    """
    is_unknown = F.col("action").isin("UNKNOWN", "UNKNOW")
    why = (
        F.when(F.col("producer_group").isin(sorted(absent_groups)), Why.AWAY)
        .when(F.col("check_times") == 0, Why.NOT_ASKED)
        .when(F.col("action").isNull(), Why.SILENT)
        .when(is_unknown, Why.UNKNOWN)
        .otherwise(Why.UNSETTLED)
    )
    told = pending.join(answers, "transaction_id", "left").select("*", why.alias("why"))
    by_group = told.groupBy("producer_group", "why").agg(
        _transactions(),
        F.max("age_ms").alias("oldest_ms"),
        F.max("check_times").alias("most_checks"),
        F.max("remark").alias("remark"),
        F.min_by("transaction_id", F.struct("start_ms", "transaction_id")).alias("example"),
    )
    return by_group.orderBy(F.desc("oldest_ms"), "producer_group", "why")


def _rows(batch: pa.RecordBatch) -> list[tuple[int, bytes]]:
    return list(zip(batch["format_version"].to_pylist(), batch["payload"].to_pylist(), strict=True))


def _age_class() -> Column:
    """The largest of AGE_EDGES_MS that is not above the age; a half that the horizon has not passed yet counts as new."""
    edges = F.array(*(F.lit(edge).cast("long") for edge in AGE_EDGES_MS))
    age = F.greatest(F.col("age_ms"), F.lit(0))
    return F.when(F.col("age_ms").isNotNull(), F.array_max(F.filter(edges, lambda edge: edge <= age)))


def _transactions() -> Column:
    return F.count(F.lit(1)).alias("transactions")
