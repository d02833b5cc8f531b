"""Benchmarks of a running job: latency, pending transactions, check-back."""

import statistics
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from confluent_kafka import Consumer, TopicPartition
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.streaming.state import GroupState

from benchmarks.load import Load
from benchmarks.rig import LONG_S, PARTITIONS, Batches, Figures, Rig, commits, count_rows, latencies_ms
from benchmarks.service import Client, service
from halfway.pipelines.resolve.job import stop_between_batches
from halfway.pipelines.resolve.sources import read_records
from halfway.pipelines.storage.delta_tables import append_once, read_log_ahead
from halfway.schemas.events import PACKED_EVENTS_SCHEMA, PACKED_OUTCOMES_SCHEMA
from halfway.schemas.outcomes import Count
from halfway.schemas.settings import Settings
from halfway.schemas.tables import TABLE_SCHEMAS, Table
from halfway.transforms.operator import resolve_events
from halfway.transforms.packing import to_records
from tests.support.waiting import until

_WARM_UP_S = 240
"""The time until the JVM has compiled most of the hot code. Small batches take longer for that than large ones."""


def latency(rig: Rig) -> Figures:
    """Measure the latency at 500 transactions/s, after a warm-up, and beside it the batches of an empty job.

    It is the time from a half's record timestamp to the Delta commit that makes its message readable.
    """
    settings = rig.settings("latency")
    with rig.job(settings) as batches:
        cold_ms = time.time() * 1000
        Load(settings.kafka, seed=2).send_paced(rig.seconds(_WARM_UP_S))
        warm_ms = time.time() * 1000
        Load(settings.kafka, seed=3).send_paced(rig.seconds(60))
        ended = len(batches.reports)
        batch_s = statistics.median(_batch_seconds(rig.spark.streams.active[0]))
        until(lambda: len(batches.reports) >= ended + 3, "the last batches", 60)
    edges = np.linspace(cold_ms, warm_ms, _WARM_UP_S // 60 + 1).tolist()
    warming = {str(n): quantiles(latencies_ms(settings, *edge))["p50"] for n, edge in enumerate(pairwise(edges), 1)}
    return {
        **quantiles(latencies_ms(settings, warm_ms)),
        "p50_of_minute": warming,
        "batch_s": batch_s,
        "empty_job_batch_s": empty_job(rig, settings),
    }


def empty_job(rig: Rig, settings: Settings) -> float:
    """Return the seconds of a batch of an empty job: Spark's floor.

    It has the shape of the job: source, packing, state of each bucket, a collecting job, an append to Delta. It decodes
    nothing, follows no rule, reads nothing back and appends no row.
    """
    spark, storage, state = rig.spark, settings.storage, settings.state
    no_rows = spark.createDataFrame([], TABLE_SCHEMAS[Table.MESSAGES]).coalesce(1)

    def packs(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        yield pa.RecordBatch.from_pylist(
            [{"bucket": bucket, "events": b"", "times": b""} for bucket in range(state.buckets)], PACKED_EVENTS_SCHEMA
        )

    def bucket(_key: Any, frames: Iterable[pd.DataFrame], group_state: GroupState) -> Iterator[pd.DataFrame]:
        for _ in frames:
            pass
        group_state.update((0, b""))
        yield pd.DataFrame([(0, 0, False, 0, b"")], columns=PACKED_OUTCOMES_SCHEMA.names)

    def write(outcomes: DataFrame, batch_id: int) -> None:
        outcomes.toArrow()
        append_once(no_rows, storage, Table.MESSAGES, "empty", batch_id)
        read_log_ahead(spark, storage, Table.MESSAGES)

    records = to_records(
        read_records(spark, settings.kafka, settings.kafka.starting_offsets).coalesce(state.shuffle_partitions), settings.kafka.op_topic
    )
    outcomes = resolve_events(records.mapInArrow(packs, from_arrow_schema(PACKED_EVENTS_SCHEMA)), bucket)
    writer = outcomes.writeStream.option("checkpointLocation", storage.checkpoint + "-empty").outputMode("append").foreachBatch(write)
    query = writer.trigger(processingTime=f"{settings.trigger.interval} milliseconds").start()
    try:
        Load(settings.kafka, seed=4).send_paced(rig.seconds(60))
        return statistics.median(_batch_seconds(query))
    finally:
        stop_between_batches(query)


def _batch_seconds(query: StreamingQuery) -> list[float]:
    """Return the seconds of a query's last thirty batches."""
    recent = [progress for progress in query.recentProgress if progress.numInputRows]
    return [progress.durationMs["triggerExecution"] / 1000 for progress in recent[-30:]]


def quantiles(ms: list[float]) -> Figures:
    """Return p50, p99 and the longest, in ms."""
    at = statistics.quantiles(ms, n=100)
    return {"messages": len(ms), "p50": round(at[49]), "p99": round(at[98]), "max": round(max(ms))}


def pending(rig: Rig) -> Figures:
    """Measure with 0, 10,000, 100,000 and 1,000,000 pending transactions."""
    warm_up(rig)
    figures: Figures = {}
    for wanted in (0, 10_000, 100_000, 1_000_000):
        settings = rig.settings("pending")
        load = Load(settings.kafka)
        load.send(int(wanted * rig.scale), answered=False)
        each: Figures = {}
        if wanted:
            rig.drain(settings)  # Before `measured`, which adds other transactions to the state.
            each = {"state_bytes_each": round(_state_bytes(rig, settings) / load.sent.unanswered, 1)}
        point = measured(rig, settings)
        base_s = figures["0"]["idle_batch_s"] if figures else point["idle_batch_s"]
        figures[str(wanted)] = {**point, "added_idle_s": round(point["idle_batch_s"] - base_s, 3), **each}
    return figures


def warm_up(rig: Rig) -> None:
    """Run small and large batches until the JVM has compiled most of the hot code."""
    settings = rig.settings("warm")
    with rig.job(settings):
        Load(settings.kafka, seed=2).send_paced(rig.seconds(_WARM_UP_S))
    _backlog_rate(rig, settings, 1_000_000)


def measured(rig: Rig, settings: Settings) -> Figures:
    """Read what waits, then measure the job: idle, at 500 transactions/s, and with a backlog after a restart."""
    rig.drain(settings)
    with rig.job(settings) as batches:
        idle = _seconds_of_next(batches, 25)
        memory = dict(batches.memory_mib[-1])
        Load(settings.kafka, seed=3).send_paced(rig.seconds(10))
        read, since_ms = len(batches.reports), time.time() * 1000
        Load(settings.kafka, seed=4).send_paced(rig.seconds(40))
        busy = [report.seconds for report in batches.reports[read:]]
        ended = len(batches.reports)
        until(lambda: len(batches.reports) >= ended + 3, "the last batches", LONG_S)
    return {
        "idle_batch_s": round(statistics.median(idle), 3),
        "idle_batch_max_s": round(max(idle), 3),
        "busy_batch_s": round(statistics.median(busy), 3) if busy else None,
        "latency_ms": quantiles(latencies_ms(settings, since_ms)),
        "backlog_tx_per_s": _backlog_rate(rig, settings, 200_000),
        "memory_mib": memory,
    }


def _backlog_rate(rig: Rig, settings: Settings, transactions: int) -> int:
    """Return the transactions/s at which a restarted job drains a backlog."""
    backlog = Load(settings.kafka, seed=5)
    backlog.send(rig.amount(transactions))
    _, seconds = rig.drain(settings)
    return round(backlog.sent.transactions / sum(seconds))


def _seconds_of_next(batches: Batches, count: int) -> list[float]:
    read = len(batches.reports)
    until(lambda: len(batches.reports) >= read + 5 + count, f"{count} batches", LONG_S)
    return [report.seconds for report in batches.reports[read + 5 : read + 5 + count]]


def _state_bytes(rig: Rig, settings: Settings) -> int:
    state = rig.spark.read.format("statestore").load(settings.storage.checkpoint)
    return int(state.agg(F.sum(F.length("value.groupState.payload"))).collect()[0][0])


def checkback(rig: Rig) -> Figures:
    """Measure the time from the first check to the last row of 100,000 pending transactions, all answered COMMIT.

    The service answers in Java. As many transactions before that warm the JVM up.
    """
    settings = rig.settings("checkback", {"resolution.transactionTimeOut": "10s", "resolution.transactionCheckInterval": "10m"})
    committed = 0
    with rig.job(settings) as batches, service(Client.JAVA, settings.kafka, rig.folder / "java", threads=0):
        for seed in (1, 2):
            began_ms = time.time() * 1000
            load = Load(settings.kafka, seed=seed)
            load.send(rig.amount(100_000), answered=False)
            committed += load.sent.unanswered
            batches.reach(Count.COMMITTED, committed)
    first_ms, last_ms = _first_check_ms(settings, began_ms), commits(settings)[-1][0]
    seconds = (last_ms - first_ms) / 1000
    right = count_rows(settings) == committed
    return {
        "messages": load.sent.unanswered,
        "right": right,
        "seconds": round(seconds, 1),
        "tx_per_s": round(load.sent.unanswered / seconds),
    }


def _first_check_ms(settings: Settings, since_ms: float) -> int:
    with Consumer({"bootstrap.servers": settings.kafka.servers(), "group.id": "bench"}) as consumer:
        places = [TopicPartition(settings.kafka.check_topic, partition, int(since_ms)) for partition in range(PARTITIONS)]
        consumer.assign(consumer.offsets_for_times(places, timeout=10))
        found = [record.timestamp()[1] for record in consumer.consume(2_000, timeout=10) if record.error() is None]
    return min(found)
