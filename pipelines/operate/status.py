"""How the job stands: its horizon and lag, what is pending, what it counts and how fast; told by the checkpoint and by Kafka."""

from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession

from halfway.pipelines.kafka.range_reader import Range, ranges
from halfway.pipelines.storage.checkpoint import STATUS_FILE, checkpoint_file, is_in_use
from halfway.pipelines.storage.file_systems import local_path, read_json
from halfway.pipelines.storage.state_reader import StoredState, read_state
from halfway.schemas.errors import HalfwayError
from halfway.schemas.outcomes import Count
from halfway.schemas.settings import Settings
from halfway.transforms.views.pending import PendingView, view_pending

RATE_BATCHES = 30
"""How many batches rates are told over, at most; Spark keeps a hundred."""
_RATES = (Count.HALVES, Count.OPS, Count.COMMITTED, Count.ROLLED_BACK, Count.CHECKED, Count.DISCARDED)


@dataclass(frozen=True)
class Status:
    """What `halfway status` tells. Times in ms; None where something is not known."""

    is_running: bool | None
    """None where the checkpoint is not on this machine: it cannot be told."""
    batch_id: int | None
    last_batch: dict[str, Any] | None
    """`batch_id`, `seconds`, `written_at_ms`, `counts`: the job wrote it after its last batch."""
    horizon_ms: int | None
    horizon_lag_ms: int | None
    """How far the horizon is behind now; with CreateTime topics behind what their producers call now."""
    unread: dict[str, int] | None
    """By topic the records that are not read yet, ticks among them; None if Kafka does not say."""
    kafka_error: str | None
    pending: int
    pending_by_group: list[dict[str, Any]]
    absent_groups: list[str]
    waiting: int
    totals: dict[str, int]
    """Counted since the checkpoint began."""
    rates: dict[str, float] | None
    """Per second of the horizon's time, over the last 30 batches."""
    rates_over_s: float | None


def job_status(spark: SparkSession, settings: Settings, now_ms: int) -> Status:
    """Find out how the job stands.

    Args:
        spark: to read the checkpoint with.
        settings: the job's.
        now_ms: the time now, which the horizon is compared with.

    Raises:
        HalfwayError: the state cannot be read.
    """
    storage = settings.storage
    last_batch = read_json(spark, checkpoint_file(storage, STATUS_FILE))
    stored = read_state(spark, storage)
    view = view_pending(stored.rows)
    unread, kafka_error = _unread(settings, stored)
    rates, rates_over_s = _rates(spark, settings, stored, view)
    return Status(
        is_running=None if local_path(storage.checkpoint) is None else is_in_use(storage),
        batch_id=stored.batch_id,
        last_batch=last_batch,
        horizon_ms=view.horizon_ms,
        horizon_lag_ms=None if view.horizon_ms is None else now_ms - view.horizon_ms,
        unread=unread,
        kafka_error=kafka_error,
        pending=view.transactions.num_rows,
        pending_by_group=_by_group(view),
        absent_groups=sorted(view.absent_groups),
        waiting=view.waiting,
        totals={name: total for name, total in sorted(view.totals.items()) if total},
        rates=rates,
        rates_over_s=rates_over_s,
    )


def _unread(settings: Settings, stored: StoredState) -> tuple[dict[str, int] | None, str | None]:
    """Count what lies behind the last committed batch; before the first one that is all that the topics retain."""
    topics = [settings.kafka.half_topic, settings.kafka.op_topic]
    try:
        retained = ranges(settings, topics)
    except HalfwayError as error:
        return None, str(error)

    def left(topic: str, number: int, place: Range) -> int:
        low, high = place
        return max(0, high - max(low, stored.read_to.get(topic, {}).get(number, low)))

    return {topic: sum(left(topic, number, place) for number, place in retained[topic].items()) for topic in topics}, None


def _rates(spark: SparkSession, settings: Settings, stored: StoredState, view: PendingView) -> tuple[dict[str, float] | None, float | None]:
    """Compare the totals with those of some batches ago, as the state kept them: it needs no second look, and no clock."""
    if not stored.batch_id or view.horizon_ms is None:
        return None, None
    try:
        before = view_pending(read_state(spark, settings.storage, batches_ago=RATE_BATCHES).rows)
    except HalfwayError:
        # Removed by the job, which may be set to keep fewer: rates are not worth more than a try.
        return None, None
    if before.horizon_ms is None or before.horizon_ms >= view.horizon_ms:
        return None, None
    seconds = (view.horizon_ms - before.horizon_ms) / 1000
    return {str(name): round((view.totals[name] - before.totals[name]) / seconds, 1) for name in _RATES}, seconds


def _by_group(view: PendingView) -> list[dict[str, Any]]:
    counted = view.transactions.group_by("producer_group").aggregate([("age_ms", "max"), ("transaction_id", "count")])
    rows = [
        {
            "producer_group": row["producer_group"],
            "pending": row["transaction_id_count"],
            "oldest_age_ms": row["age_ms_max"],
            "is_away": row["producer_group"] in view.absent_groups,
        }
        for row in counted.to_pylist()
    ]
    return sorted(rows, key=lambda row: (-row["pending"], row["producer_group"]))
