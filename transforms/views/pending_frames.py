"""Aggregates the pending transactions in Spark: by age, by number of checks, by group, and by why they are stuck.

`transforms/views/pending.py` decodes the state rows. Here it runs on the executors, so that only aggregates reach the
driver.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from halfway.schemas import headers as h
from halfway.schemas.reports import common_horizon_ms
from halfway.transforms.views.decoded import header_texts
from halfway.transforms.views.pending import PENDING_SCHEMA, view_pending

_AGE_EDGES_S = (0, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1_800, 3_600, 10_800, 21_600, 43_200, 86_400, 172_800, 259_200)
AGE_EDGES_MS = tuple(edge_s * 1_000 for edge_s in _AGE_EDGES_S)
"""Lower bounds of the age classes. Each is about twice the one before, because ages span six powers of ten."""
OTHERS = "(all others)"
ANSWERS = "transaction_id STRING, producer_group STRING, incarnation INT, action STRING, remark STRING"
_OF_ONE = ("transaction_id", "producer_group", "incarnation")

_BUCKET_FACTS_SCHEMA = pa.schema(
    [
        pa.field("horizon_ms", pa.int64()),
        pa.field("absent_groups", pa.list_(pa.string())),
        pa.field("totals", pa.string()),
        pa.field("waiting", pa.int64()),
        pa.field("remembered", pa.int64()),
    ]
)


class Why(StrEnum):
    """The reasons why a transaction is still pending."""

    NOT_ASKED = "not asked yet"
    ABSENT = "its group is away, or behind its check requests"
    SILENT = "asked, and nobody answers"
    UNKNOWN = "the answer is UNKNOWN"
    UNSETTLED = "a verdict came that does not settle it"


REMEDIES = {
    Why.NOT_ASKED: "nothing to do: its first check is not due yet",
    Why.ABSENT: "start an instance of the group; until then its checks are put off and not counted (R15)",
    Why.SILENT: "check that the group's consumer txn-check-<group> reads the check topic, and read the service's log",
    Why.UNKNOWN: "the listener does not know the outcome: read its remark, and look in the service's database",
    Why.UNSETTLED: "look in the quarantine for another group or incarnation; or wait for the next batch, which may settle it",
}


@dataclass(frozen=True)
class StateFacts:
    """What the state holds besides its transactions. The fields are those of `PendingView`."""

    horizon_ms: int | None
    absent_groups: frozenset[str]
    totals: Counter[str]
    waiting: int
    remembered: int


def pending_transactions(states: DataFrame) -> DataFrame:
    """Return the pending transactions, one row each (PENDING_SCHEMA).

    Args:
        states: one row per bucket (`halfway.schemas.state_format.STATE_SCHEMA`).
    """

    def view(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from view_pending(_rows(batch)).transactions.to_batches(max_chunksize=10_000)

    return states.mapInArrow(view, from_arrow_schema(PENDING_SCHEMA))


def bucket_facts(states: DataFrame) -> DataFrame:
    """Return one small row per bucket, which the caller collects for `state_facts`.

    Args:
        states: one row per bucket (`halfway.schemas.state_format.STATE_SCHEMA`).

    Returns:
        horizon_ms, absent_groups, totals (JSON), waiting, remembered.
    """

    def view(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = [
                (view.horizon_ms, sorted(view.absent_groups), json.dumps(view.totals), view.waiting, view.remembered)
                for view in (view_pending([row]) for row in _rows(batch))
            ]
            facts = [dict(zip(_BUCKET_FACTS_SCHEMA.names, row, strict=True)) for row in rows]
            yield pa.RecordBatch.from_pylist(facts, schema=_BUCKET_FACTS_SCHEMA)

    return states.mapInArrow(view, from_arrow_schema(_BUCKET_FACTS_SCHEMA))


def state_facts(rows: Collection[Mapping[str, Any] | Row]) -> StateFacts:
    """Combine the rows of `bucket_facts`."""
    return StateFacts(
        horizon_ms=common_horizon_ms(row["horizon_ms"] for row in rows),
        absent_groups=frozenset(group for row in rows for group in row["absent_groups"]),
        totals=sum((Counter(json.loads(row["totals"])) for row in rows), Counter[str]()),
        waiting=sum(row["waiting"] for row in rows),
        remembered=sum(row["remembered"] for row in rows),
    )


def age_histogram(pending: DataFrame) -> DataFrame:
    """Count transactions by age class.

    Returns:
        from_ms (one of AGE_EDGES_MS; null while the horizon is undefined), transactions.
    """
    return pending.groupBy(_age_class().alias("from_ms")).agg(_transactions()).orderBy("from_ms")


def check_histogram(pending: DataFrame) -> DataFrame:
    """Count transactions by the number of their checks: check_times, transactions."""
    return pending.groupBy("check_times").agg(_transactions()).orderBy("check_times")


def ages_by_group(pending: DataFrame, groups: int = 12) -> DataFrame:
    """Count transactions by producer group and age class.

    Args:
        pending: PENDING_SCHEMA.
        groups: how many of the largest groups are named. The others count as one group, OTHERS.

    Returns:
        producer_group, from_ms, transactions.
    """
    largest = pending.groupBy("producer_group").agg(_transactions()).orderBy(F.desc("transactions"), "producer_group").limit(groups)
    named = pending.join(F.broadcast(largest.select("producer_group", F.lit(True).alias("is_named"))), "producer_group", "left")
    group = F.when(F.col("is_named"), F.col("producer_group")).otherwise(OTHERS).alias("producer_group")
    return named.groupBy(group, _age_class().alias("from_ms")).agg(_transactions()).orderBy("producer_group", "from_ms")


def last_answers(ops: DataFrame) -> DataFrame:
    """Return the last answer to a check of each transaction by group and incarnation (ANSWERS).

    Args:
        ops: Spark's Kafka columns of the op topic, with headers.
    """
    answers = ops.where("headers IS NOT NULL AND key IS NOT NULL").select(
        F.col("key").cast("string").alias("transaction_id"), "timestamp", "partition", "offset", header_texts()
    )
    header, place = F.col("header"), F.struct("timestamp", "partition", "offset")
    last = F.max_by(F.struct(header[h.ACTION].alias("action"), header[h.REMARK].alias("remark")), place)
    incarnation = F.when(header[h.INCARNATION].isNull(), 0).otherwise(header[h.INCARNATION].try_cast("int"))
    of_checks = answers.where(F.lower(header[h.FROM_CHECK]) == "true")
    names = ("transaction_id", header[h.PGROUP].alias("producer_group"), incarnation.alias("incarnation"))
    return of_checks.groupBy(*names).agg(last.alias("last")).select(*_OF_ONE, "last.action", "last.remark")


def stuck(pending: DataFrame, answers: DataFrame, absent_groups: Collection[str]) -> DataFrame:
    """Return by group why its transactions are pending, the oldest first.

    Args:
        pending: PENDING_SCHEMA.
        answers: what `last_answers` returns (ANSWERS).
        absent_groups: the groups that are away or behind (R15).

    Returns:
        producer_group, why (a `Why`), transactions, oldest_age_ms, most_checks, remark (of one of the answers), example
        (the id of the oldest).
    """
    is_unknown = F.col("action").isin([said for said, action in h.ACTIONS.items() if action is h.LocalTransactionState.UNKNOWN])
    # Anyone may answer. UNKNOWN is the service's word only if it is of this group and incarnation.
    verdicts = answers.where(~is_unknown).select("transaction_id", F.lit(True).alias("has_verdict")).distinct()
    why = (
        F.when(F.col("producer_group").isin(sorted(absent_groups)), Why.ABSENT)
        .when(F.col("check_times") == 0, Why.NOT_ASKED)
        .when(is_unknown, Why.UNKNOWN)
        .when(F.col("has_verdict"), Why.UNSETTLED)
        .otherwise(Why.SILENT)
    )
    told = pending.join(answers, list(_OF_ONE), "left").join(verdicts, "transaction_id", "left").select("*", why.alias("why"))
    by_group = told.groupBy("producer_group", "why").agg(
        _transactions(),
        F.max("age_ms").alias("oldest_age_ms"),
        F.max("check_times").alias("most_checks"),
        F.max("remark").alias("remark"),
        F.min_by("transaction_id", F.struct("start_ms", "transaction_id")).alias("example"),
    )
    return by_group.orderBy(F.desc("oldest_age_ms"), "producer_group", "why")


def _rows(batch: pa.RecordBatch) -> list[tuple[int, bytes]]:
    return list(zip(batch["format_version"].to_pylist(), batch["payload"].to_pylist(), strict=True))


def _age_class() -> Column:
    """Return the largest of AGE_EDGES_MS that is not above the age. A negative age counts as 0."""
    edges = F.array(*(F.lit(edge).cast("long") for edge in AGE_EDGES_MS))
    age = F.greatest(F.col("age_ms"), F.lit(0))
    return F.when(F.col("age_ms").isNotNull(), F.array_max(F.filter(edges, lambda edge: edge <= age)))


def _transactions() -> Column:
    return F.count(F.lit(1)).alias("transactions")
