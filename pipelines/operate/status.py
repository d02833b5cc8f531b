"""Reads the state of the job from its checkpoint and from Kafka: horizon, lag, pending transactions, counts, rates."""

from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession

from halfway.pipelines.kafka.admin import admin_client
from halfway.pipelines.kafka.range_reader import OffsetRange
from halfway.pipelines.kafka.topic_scan import retained_ranges
from halfway.pipelines.kafka.transactions import OpenTransaction, open_transactions
from halfway.pipelines.storage.file_systems import local_path, read_json
from halfway.pipelines.storage.locks import is_in_use
from halfway.pipelines.storage.manifest import STATUS_FILE, checkpoint_file
from halfway.pipelines.storage.state_reader import StoredState, read_state
from halfway.schemas.errors import HalfwayError
from halfway.schemas.outcomes import Count
from halfway.schemas.settings import KafkaSettings, Settings, StorageSettings
from halfway.transforms.views.pending import GroupPending, PendingView, pending_by_group, view_pending

RATE_BATCHES = 30
"""Rates cover at most this many batches. Spark keeps a hundred."""
_RATES = (Count.HALVES, Count.OPS, Count.COMMITTED, Count.ROLLED_BACK, Count.CHECKED, Count.DISCARDED)


@dataclass(frozen=True)
class Status:
    """What `halfway status` shows. Times are in ms; None is an unknown value."""

    is_running: bool | None
    """None if the checkpoint is not on this machine."""
    batch_id: int | None
    last_batch: dict[str, Any] | None
    """`batch_id`, `seconds`, `written_at_ms` and `counts`, which the job writes after each batch."""
    horizon_ms: int | None
    horizon_lag_ms: int | None
    """How far the horizon is behind the current time. With CreateTime topics, producers' clocks set the horizon."""
    unread: dict[str, int] | None
    """Consumer lag by topic, ticks included; None if Kafka cannot be reached."""
    kafka_error: str | None
    open_transactions: list[OpenTransaction]
    """Those that hold the horizon (R18)."""
    pending: int
    pending_by_group: list[GroupPending]
    absent_groups: list[str]
    waiting: int
    totals: dict[str, int]
    """The counts since the checkpoint began."""
    rates: dict[str, float] | None
    """Rates per second of horizon time, over the last 30 batches."""
    rates_over_s: float | None


def job_status(spark: SparkSession, settings: Settings, now_ms: int) -> Status:
    """Read the state of the job.

    Args:
        spark: the session that reads the checkpoint.
        settings: the job's.
        now_ms: the current time, to compare the horizon with.

    Raises:
        HalfwayError: the state cannot be read.
    """
    storage = settings.storage
    last_batch = read_json(spark, checkpoint_file(storage, STATUS_FILE))
    stored = read_state(spark, storage)
    view = view_pending(stored.rows)
    unread: dict[str, int] | None = None
    holding: list[OpenTransaction] = []
    kafka_error = None
    try:
        unread, holding = _unread(settings.kafka, stored), _holding(spark, settings.kafka)
    except HalfwayError as error:
        kafka_error = str(error)
    rates, rates_over_s = _rates(spark, storage, stored, view)
    return Status(
        is_running=None if local_path(storage.checkpoint) is None else is_in_use(storage),
        batch_id=stored.batch_id,
        last_batch=last_batch,
        horizon_ms=view.horizon_ms,
        horizon_lag_ms=None if view.horizon_ms is None else now_ms - view.horizon_ms,
        unread=unread,
        kafka_error=kafka_error,
        open_transactions=holding,
        pending=view.transactions.num_rows,
        pending_by_group=pending_by_group(view.transactions, view.absent_groups),
        absent_groups=sorted(view.absent_groups),
        waiting=view.waiting,
        totals={name: total for name, total in sorted(view.totals.items()) if total},
        rates=rates,
        rates_over_s=rates_over_s,
    )


def _holding(spark: SparkSession, kafka: KafkaSettings) -> list[OpenTransaction]:
    return open_transactions(admin_client(kafka), kafka, (kafka.half_topic, kafka.op_topic), lambda: spark)


def _unread(kafka: KafkaSettings, stored: StoredState) -> dict[str, int]:
    """Count the records after the last committed batch; before the first batch, all records that the topics retain."""
    topics = [kafka.half_topic, kafka.op_topic]
    retained = retained_ranges(kafka, topics)

    def left(topic: str, number: int, place: OffsetRange) -> int:
        low, high = place
        return max(0, high - max(low, stored.read_to.get(topic, {}).get(number, low)))

    return {topic: sum(left(topic, number, place) for number, place in retained[topic].items()) for topic in topics}


def _rates(
    spark: SparkSession, storage: StorageSettings, stored: StoredState, view: PendingView
) -> tuple[dict[str, float] | None, float | None]:
    """Compute rates from the totals in an older version of the state, which needs no clock and no waiting."""
    if not stored.batch_id or view.horizon_ms is None:
        return None, None
    try:
        before = view_pending(read_state(spark, storage, batches_ago=RATE_BATCHES).rows)
    except HalfwayError:
        # The job has removed that version, because it is set to keep fewer. Rates are optional.
        return None, None
    if before.horizon_ms is None or before.horizon_ms >= view.horizon_ms:
        return None, None
    seconds = (view.horizon_ms - before.horizon_ms) / 1000
    return {str(name): round((view.totals[name] - before.totals[name]) / seconds, 1) for name in _RATES}, seconds
