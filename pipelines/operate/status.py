"""Reads the state of the job from its checkpoint and from Kafka: horizon, lag, pending transactions, counts, rates."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from confluent_kafka import Consumer
from pyspark.sql import SparkSession

from halfway.pipelines.kafka.admin import Admin, admin_client
from halfway.pipelines.kafka.open_transactions import OpenTransaction, open_transactions
from halfway.pipelines.kafka.range_reader import OffsetRange, ranges_consumer, read_ranges
from halfway.pipelines.kafka.tick_records import is_tick
from halfway.pipelines.kafka.topic_scan import retained_ranges
from halfway.pipelines.relay.relay_status import RelayStatus, relay_states
from halfway.pipelines.storage.locks import is_in_use
from halfway.pipelines.storage.state_reader import StoredState, read_state
from halfway.schemas.batch_status import BatchStatus
from halfway.schemas.errors import AccessError, HalfwayError, TopicError
from halfway.schemas.outcomes import Count
from halfway.schemas.settings import KafkaSettings, Settings, StorageSettings
from halfway.transforms.views.pending import GroupPending, PendingView, pending_by_group, view_pending

RATE_BATCHES = 30
"""Rates cover at most this many batches. Spark keeps a hundred."""
_READ_AT_MOST = 1_000
_READ_LIMIT_S = 5.0
_RATES = (Count.HALVES, Count.OPS, Count.COMMITTED, Count.ROLLED_BACK, Count.CHECKED, Count.DISCARDED)


@dataclass(frozen=True)
class Status:
    """What `halfway status` shows. Times are in ms; None is an unknown value."""

    is_running: bool | None
    """None if the checkpoint is not on a local disk here, or this user may not read its lock."""
    batch_id: int | None
    last_batch: BatchStatus | None
    """What the job wrote after its last batch; None if it has ended none."""
    horizon_ms: int | None
    horizon_lag_ms: int | None
    """How far the horizon is behind the current time. With CreateTime topics, producers' clocks set the horizon."""
    unread: dict[str, int] | None
    """Consumer lag by topic: halves and ops that the job has not read; None if Kafka cannot be reached. Ticks count
    too where a topic has more than 1,000 unread records, or this user may not read it."""
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
    relays: list[RelayStatus] | None
    """None if Kafka cannot be reached, or does not let this user ask."""


def job_status(session: Callable[[], SparkSession], settings: Settings, now_ms: int) -> Status:
    """Read the state of the job.

    Args:
        session: returns a session. Only called where the state, or the name of a producer, cannot be read without.
        settings: the job's.
        now_ms: the current time, to compare the horizon with.

    Raises:
        HalfwayError: the state cannot be read.
    """
    storage = settings.storage
    stored = read_state(session, storage)
    view = view_pending(stored.rows)
    unread: dict[str, int] | None = None
    holding: list[OpenTransaction] = []
    relays: list[RelayStatus] | None = None
    kafka_error = None
    try:
        kafka = settings.kafka
        client = admin_client(kafka)
        holding = open_transactions(client, kafka, (kafka.half_topic, kafka.op_topic), session)
        relays = _relays(client, kafka)
        unread = _unread(kafka, stored)
    except HalfwayError as error:
        kafka_error = str(error)
    rates, rates_over_s = _rates(session, storage, stored, view)
    return Status(
        is_running=is_in_use(storage),
        batch_id=stored.batch_id,
        last_batch=stored.last_batch,
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
        relays=relays,
    )


def _relays(client: Admin, kafka: KafkaSettings) -> list[RelayStatus] | None:
    try:
        return relay_states(client, kafka)
    except AccessError:
        return None


def _unread(kafka: KafkaSettings, stored: StoredState) -> dict[str, int]:
    """Count what was appended after the last committed batch; before the first batch, all that the topics retain."""
    topics = [kafka.half_topic, kafka.op_topic]
    retained = retained_ranges(kafka, topics)

    def left(topic: str, number: int, place: OffsetRange) -> OffsetRange:
        first = max(place.first, stored.read_to.get(topic, {}).get(number, place.first))
        if first > place.end:
            raise TopicError(
                f"the topic {topic} ends at offset {place.end} of partition {number}, and the job has read to {first}: it was recreated or "
                "has lost records, or kafka.bootstrap_servers names another Kafka"
            )
        return OffsetRange(first, place.end)

    ranges = {topic: {number: left(topic, number, place) for number, place in retained[topic].items()} for topic in topics}
    with ranges_consumer(kafka) as consumer:
        return {topic: _without_ticks(consumer, topic, places) for topic, places in ranges.items()}


def _without_ticks(consumer: Consumer, topic: str, places: Mapping[int, OffsetRange]) -> int:
    """Count the records in ranges of a topic without its ticks, where that is quick and allowed."""
    unread = sum(end - first for first, end in places.values())
    if unread > _READ_AT_MOST:
        return unread
    try:
        return sum(not is_tick(record) for record in read_ranges(consumer, topic, places, _READ_LIMIT_S))
    except HalfwayError:
        return unread


def _rates(
    session: Callable[[], SparkSession], storage: StorageSettings, stored: StoredState, view: PendingView
) -> tuple[dict[str, float] | None, float | None]:
    """Compute rates from the totals in an older version of the state, which needs no clock and no waiting."""
    if not stored.batch_id or view.horizon_ms is None:
        return None, None
    try:
        before = view_pending(read_state(session, storage, batches_ago=RATE_BATCHES).rows)
    except HalfwayError:
        # The job has removed that version, because it is set to keep fewer. Rates are optional.
        return None, None
    if before.horizon_ms is None or before.horizon_ms >= view.horizon_ms:
        return None, None
    seconds = (view.horizon_ms - before.horizon_ms) / 1000
    return {str(name): float(f"{(view.totals[name] - before.totals[name]) / seconds:.6g}") for name in _RATES}, seconds
