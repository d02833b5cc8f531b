"""Records into Kafka by a plain producer, and the real job over them, its time moved round by round."""

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
from tests.fuzz.generator import Made

log = logging.getLogger(__name__)


class StuckError(Exception):
    """The job stands still though there is something to do."""


@dataclass
class Run:
    """What the job did: its counts over all batches, and how many there were."""

    counts: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    seconds: float = 0.0
    pending: dict[int, int] = field(default_factory=dict)
    remembered: dict[int, int] = field(default_factory=dict)

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
            self.pending[number], self.remembered[number] = bucket.pending, bucket.remembered


def write(settings: Settings, records: Iterable[Made]) -> int:
    """Write records by a plain producer, in their order; return how many."""
    failures: list[object] = []
    common = {"bootstrap.servers": settings.kafka.servers(), "partitioner": "murmur2_random", "acks": "all", "enable.idempotence": True}
    producer = Producer({**common, "linger.ms": 50, "message.max.bytes": 16_000_000, "queue.buffering.max.messages": 200_000})
    topics = {True: settings.kafka.half_topic, False: settings.kafka.op_topic}

    def delivered(error: object, _: object) -> None:
        if error is not None:
            failures.append(error)

    count = 0
    for made in records:
        while True:
            try:
                producer.produce(
                    topics[made.of_half],
                    made.value,
                    made.key,
                    partition=made.partition,
                    timestamp=made.at_ms,
                    headers=[*made.headers],
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
    ticks: Callable[[int], Iterable[Made]],
    limit_s: float,
) -> Run:
    """Run the job through rounds of ticks, each written as soon as the one before is the horizon: then all before it has been read.

    Raises:
        StuckError: it is not done within the limit; what a batch raises comes out as it is.
    """
    run, left = Run(), list(rounds_ms)
    waited_ms, is_done = left.pop(0), False

    def told(report: BatchReport) -> None:
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
    job = ResolveJob(settings, on_batch=told)
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
        raise StuckError(f"after {run.batches} batches and {limit_s:.0f} s; waiting for the horizon {waited_ms}")
    return run
