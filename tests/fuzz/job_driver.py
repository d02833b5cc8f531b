"""Writes records to Kafka with a plain producer, and runs the real job over them while ticks move its horizon."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from confluent_kafka import Producer
from pyspark.sql import SparkSession

from halfway.pipelines.resolve.job import ResolveJob
from halfway.pipelines.resolve.report import BatchReport
from halfway.schemas.settings import Settings
from tests.fuzz.generator import NewRecord

log = logging.getLogger(__name__)


class JobStuckError(Exception):
    """The job did not finish within the time limit."""


@dataclass
class JobRun:
    """What the job did in all its batches."""

    counts: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    seconds: float = 0.0
    pending: dict[int, int] = field(default_factory=dict)
    """Pending transactions by bucket, after the last batch."""
    remembered: dict[int, int] = field(default_factory=dict)
    """Remembered ids by bucket, after the last batch."""

    def add(self, report: BatchReport) -> None:
        self.batches += 1
        unread = sum((report.unread or {}).values())
        log.info(
            "event=batch number=%d seconds=%.1f rows=%d unread=%d horizon_ms=%s",
            self.batches,
            report.seconds,
            report.rows.total(),
            unread,
            report.horizon_ms,
        )
        self.counts.update(report.counts)
        for number, bucket in report.buckets.items():
            self.pending[number], self.remembered[number] = bucket.pending, bucket.entries


def write(settings: Settings, records: Iterable[NewRecord]) -> int:
    """Write records in their order, and return their number."""
    failures: list[object] = []
    common = {"bootstrap.servers": settings.kafka.servers(), "partitioner": "murmur2_random", "acks": "all", "enable.idempotence": True}
    producer = Producer({**common, "linger.ms": 50, "message.max.bytes": 16_000_000, "queue.buffering.max.messages": 200_000})
    topics = {True: settings.kafka.half_topic, False: settings.kafka.op_topic}

    def delivered(error: object, _: object) -> None:
        if error is not None:
            failures.append(error)

    count = 0
    for record in records:
        while True:
            try:
                producer.produce(
                    topics[record.of_half],
                    record.value,
                    record.key,
                    partition=record.partition,
                    timestamp=record.at_ms,
                    headers=[*record.headers],
                    on_delivery=delivered,
                )
                break
            except BufferError:
                producer.poll(0.1)
        count += 1
        if count % 1_000 == 0:
            producer.poll(0)
    assert producer.flush(60) == 0
    assert not failures, failures[0]
    return count


def resolve(
    settings: Settings,
    session: Callable[[], SparkSession],
    rounds_ms: Iterable[int],
    ticks: Callable[[int], Iterable[NewRecord]],
    limit_s: float,
) -> JobRun:
    """Run the job through rounds of ticks.

    A round is written when the horizon has reached the round before. Then the job has read every record before that.

    Args:
        settings: the settings of the job.
        session: returns the Spark session.
        rounds_ms: the time of each round.
        ticks: returns the ticks of a round.
        limit_s: the time limit of the job.

    Raises:
        JobStuckError: the job is not done within the limit.
    """
    run, left = JobRun(), list(rounds_ms)
    waited_ms, is_done = left.pop(0), False

    def next_round(report: BatchReport) -> None:
        nonlocal waited_ms, is_done
        run.add(report)
        if report.horizon_ms is None or report.horizon_ms < waited_ms:
            return
        if left:
            waited_ms = left.pop(0)
            write(settings, ticks(waited_ms))
        else:
            is_done = True
            job.stop()

    write(settings, ticks(waited_ms))
    job = ResolveJob(settings, on_batch=next_round)
    timer = threading.Timer(limit_s, job.stop)
    timer.daemon = True
    timer.start()
    began_s = time.monotonic()
    try:
        job.run(session)
    finally:
        timer.cancel()
    run.seconds = time.monotonic() - began_s
    if not is_done:
        raise JobStuckError(f"after {run.batches} batches and {limit_s:.0f} s the horizon has not reached {waited_ms}")
    return run
