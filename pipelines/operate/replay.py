"""Resends discarded messages, each as a half of the next incarnation. The operation is idempotent.

It can be repeated and interrupted because the half topic is its only memory. For each id and group, the latest
discarded incarnation i is sent as i + 1, unless a half of the same id and group with an incarnation above i was written
after the discard. The search covers, in this order, `messages`, the state, and all of the half topic since the discard.
The topic also holds the halves that the job has not read yet, that an interrupted replay has sent, and that were rolled
back.
Halves written after a discard have a record time that is not below `discarded_at`, because that is a horizon: the job
had read a tick of this time in every partition.

The guarantee has these limits:

- A message that was discarded before the oldest record that the half topic retains is *unproven*: it may have been
  replayed before and rolled back. It is skipped unless requested.
- A second replay, or an erasure, is refused meanwhile if the checkpoint is a local folder. Elsewhere, the second half
  of one incarnation is a counted duplicate (R12) while the first is pending or remembered.
- If producers set the time of records (CreateTime), a service that sends a higher incarnation itself must not set an
  earlier time.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Message
from pydantic import ValidationError
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F

from halfway.pipelines.kafka.range_reader import headers_of
from halfway.pipelines.kafka.topic_scan import TopicScan
from halfway.pipelines.kafka.writer import RecordWriter, verify_topic_writable
from halfway.pipelines.storage.delta_tables import read_table, stored_tables
from halfway.pipelines.storage.locks import replay_lock
from halfway.pipelines.storage.state_reader import read_state
from halfway.schemas.errors import HalfwayError, NotPendingError
from halfway.schemas.headers import TICK, HeaderList
from halfway.schemas.records import HalfHeaders, RecordError, encode_key
from halfway.schemas.settings import KafkaSettings, Settings, StorageSettings
from halfway.schemas.signing import Keyring, Signable, sha256_of
from halfway.schemas.tables import Table
from halfway.transforms.views.pending import view_pending

_SAY_EVERY_S = 5.0
_NAMED_IDS = 5
_PARTITION_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class LatestDiscard:
    """The latest discard of a transaction id by one group."""

    incarnation: int
    discarded_ms: int
    half_partition: int
    half_offset: int


Candidates = dict[tuple[str, str], LatestDiscard]
"""Transaction id and producer group → discard. Another group's discard of an id must not hide a group's own."""


@dataclass(frozen=True)
class ReplayResult:
    """Numbers of messages: resent now, resent before, and skipped because they are unproven."""

    replayed: int
    already_replayed: int
    unproven: int


@dataclass(frozen=True)
class ReplaySelection:
    """Selects discarded messages: by id, or, without ids, all that match the other fields."""

    transaction_ids: Sequence[str] = ()
    producer_group: str | None = None
    reason: str | None = None
    unproven: bool = False
    """True to also select unproven messages."""


def replay_discarded(spark: SparkSession, settings: Settings, wanted: ReplaySelection, say: Callable[[str], None]) -> ReplayResult:
    """Resend discarded messages, except those that were resent before.

    Args:
        spark: the session that reads the tables and the state.
        settings: the job's.
        wanted: the messages to resend.
        say: gets a sentence about the progress every 5 s.

    Raises:
        HalfwayError: there are no tables. Nothing was sent.
        NotPendingError: an id was not discarded. Nothing was sent.
        CheckpointInUseError: another replay or an erasure is running.
        TopicError: the half topic does not exist, or takes no message of this size.
        KafkaUnavailableError: Kafka cannot be read or does not accept a record. A repeated call continues from there.
    """
    with replay_lock(settings.storage):
        candidates = _latest_discards(spark, settings.storage, wanted)
        selected = len(candidates)
        _drop_known(spark, settings.storage, candidates)
        unproven = 0
        if candidates:
            with TopicScan.open(settings.kafka, settings.kafka.half_topic) as scan:
                if not wanted.unproven:
                    unproven = _drop_unproven(scan, candidates)
                _drop_sent(scan, candidates, settings.kafka, say)
        left = len(candidates)
        replayed = _send(spark, settings, candidates, say) if candidates else 0
        return ReplayResult(replayed, selected - unproven - left, unproven)


def _latest_discards(spark: SparkSession, storage: StorageSettings, wanted: ReplaySelection) -> Candidates:
    """Return the latest discard of each selected id and group."""
    found: Candidates = {}
    rows = stored_tables(spark, storage)[Table.DISCARDED]
    if wanted.transaction_ids:
        rows = rows.where(F.col("transaction_id").isin(list(wanted.transaction_ids)))
    discarded_ms = F.unix_millis("discarded_at").alias("discarded_ms")
    latest = F.max(F.struct("incarnation", discarded_ms, "half_partition", "half_offset", "reason")).alias("latest")
    if wanted.producer_group is not None:
        rows = rows.where(F.col("producer_group") == wanted.producer_group)
    by_id = rows.groupBy("transaction_id", "producer_group").agg(latest).select("transaction_id", "producer_group", "latest.*")
    if wanted.reason is not None:
        by_id = by_id.where(F.col("reason") == wanted.reason)
    for row in _columns(by_id.drop("reason").toArrow()):
        transaction_id, group, *discard = row
        found[transaction_id, group] = LatestDiscard(*discard)
    known = {transaction_id for transaction_id, _ in found}
    missing = [transaction_id for transaction_id in wanted.transaction_ids if transaction_id not in known]
    if missing:
        named = ", ".join(missing[:_NAMED_IDS]) + (f" and {len(missing) - _NAMED_IDS} more" if len(missing) > _NAMED_IDS else "")
        raise NotPendingError(f"not discarded, so nothing was sent: {named}")
    return found


def _drop_known(spark: SparkSession, storage: StorageSettings, candidates: Candidates) -> None:
    """Drop ids that are committed or pending in a higher incarnation."""
    if not candidates:
        return
    # Most messages have incarnation 0, so that file statistics skip nearly all of the table.
    committed = read_table(spark, storage, Table.MESSAGES).where(F.col("incarnation") > 0)
    for row in _columns(committed.select("transaction_id", "incarnation", "producer_group").toArrow()):
        _drop_if_higher(candidates, *row)
    pending = view_pending(read_state(lambda: spark, storage).rows).transactions
    replayed = pending.filter(pc.greater(pending["incarnation"], 0))
    for row in _columns(replayed.select(["transaction_id", "incarnation", "producer_group"])):
        _drop_if_higher(candidates, *row)


def _drop_unproven(scan: TopicScan, candidates: Candidates) -> int:
    """Drop ids that were discarded before the topic's oldest record. Return how many."""
    known_since_ms = scan.known_since_ms()
    ends = {number: high for number, (_, high) in scan.retained.items()}
    unproven = [
        identity
        for identity, row in candidates.items()
        # A half beyond the end was in an earlier topic of the same name, which was deleted.
        if row.discarded_ms < known_since_ms or row.half_offset >= ends.get(row.half_partition, 0)
    ]
    for identity in unproven:
        del candidates[identity]
    return len(unproven)


def _drop_sent(scan: TopicScan, candidates: Candidates, kafka: KafkaSettings, say: Callable[[str], None]) -> None:
    """Drop ids of which the half topic holds a higher incarnation since the discard, whatever its outcome.

    The job refuses a half that is not signed as it must be, so it counts for nothing here either.
    """
    if not candidates:
        return
    progress = _ProgressLine(say, "searching the half topic for earlier replays")
    keyring = kafka.signing.keyring()
    ids = {transaction_id for transaction_id, _ in candidates}
    for record in scan.since(min(row.discarded_ms for row in candidates.values()), progress):
        key = record.key()
        transaction_id = key.decode(errors="replace") if key is not None else ""
        if transaction_id not in ids:
            continue
        half = _half_of(record, kafka.half_topic, keyring)
        discarded = None if half is None else candidates.get((transaction_id, half.producer_group))
        if half is not None and discarded is not None and record.timestamp()[1] >= discarded.discarded_ms:
            _drop_if_higher(candidates, transaction_id, half.incarnation, half.producer_group)
        if not candidates:
            return


def _half_of(record: Message, topic: str, keyring: Keyring | None) -> HalfHeaders | None:
    """Return a half's headers; None if the record is not a half, or if it breaks the contract and is quarantined."""
    headers = headers_of(record)
    if headers is None or any(name == TICK for name, _ in headers):
        return None
    try:
        half = HalfHeaders.from_headers(headers)
    except RecordError:
        return None
    if keyring is None:
        return half
    signable = Signable(topic, record.key(), sha256_of(record.value()), headers)
    return None if half.is_refused(signable, record.timestamp()[1], keyring) else half


def _drop_if_higher(candidates: Candidates, transaction_id: str, incarnation: int, producer_group: str) -> None:
    discarded = candidates.get((transaction_id, producer_group))
    if discarded is not None and incarnation > discarded.incarnation:
        del candidates[transaction_id, producer_group]


def _send(spark: SparkSession, settings: Settings, candidates: Candidates, say: Callable[[str], None]) -> int:
    """Send the halves. Return how many Kafka has acknowledged."""
    progress = _ProgressLine(say, "sending")
    half_topic, total = settings.kafka.half_topic, len(candidates)
    verify_topic_writable(settings.kafka, half_topic)
    writer, max_body_bytes = RecordWriter(settings.kafka), settings.resolution.max_body_bytes
    for done, row in enumerate(_rows(spark, settings.storage, candidates)):
        discarded = candidates.pop((row["transaction_id"], row["producer_group"]), None)
        if discarded is not None:
            # With CreateTime, a later replay must find this half after the discard.
            at_ms = max(time.time_ns() // 1_000_000, discarded.discarded_ms)
            if row["body"] is None:
                say(f"{row['transaction_id']} is not sent: its body was erased (`halfway erase`)")
                continue
            try:
                headers = next_half(row, settings.kafka, at_ms)
            except HalfwayError as error:
                # The incarnation may be the largest one, the headers that it has in addition too much, or the key of
                # the group may be missing. The others do not wait for this one.
                say(f"{row['transaction_id']} is not sent: {error}")
                continue
            if len(row["body"]) > max_body_bytes:
                # The job would quarantine the half.
                say(f"{row['transaction_id']} is not sent: its body has {len(row['body'])} bytes, over resolution.max_body_bytes: raise it")
                continue
            writer.put(half_topic, encode_key(row["transaction_id"]), bytes(row["body"]), headers, at_ms=at_ms)
        progress(done, total)
    writer.flush()
    return writer.delivered


def _rows(spark: SparkSession, storage: StorageSettings, candidates: Candidates) -> Iterator[Row]:
    """Stream the rows of `discarded` to send, with their bodies, one partition at a time."""
    spark.conf.set("spark.sql.files.maxPartitionBytes", str(_PARTITION_BYTES))
    pointers = pa.table(
        {
            "transaction_id": pa.array([transaction_id for transaction_id, _ in candidates], pa.string()),
            "producer_group": pa.array([group for _, group in candidates], pa.string()),
            "half_partition": pa.array([row.half_partition for row in candidates.values()], pa.int32()),
            "half_offset": pa.array([row.half_offset for row in candidates.values()], pa.int64()),
        }
    )
    chosen = F.broadcast(spark.createDataFrame(pointers))
    rows = read_table(spark, storage, Table.DISCARDED).join(chosen, pointers.column_names)
    names = ("transaction_id", "topic", "queue_id", "tags", "keys", "body", "properties", "producer_group", "incarnation")
    return rows.select(*names, F.unix_millis("born_at").alias("born_at_ms")).toLocalIterator()


def next_half(row: Row, kafka: KafkaSettings, at_ms: int) -> HeaderList:
    """Return the headers of a discarded message's next incarnation. They keep everything, also `BORN_TIMESTAMP`.

    Raises:
        RecordError: the headers break the contract, such as an incarnation above the largest one.
        SettingsError: signing is required, and there is no key for the group.
    """
    try:
        headers = HalfHeaders(
            real_topic=row["topic"],
            producer_group=row["producer_group"],
            queue_id=row["queue_id"],
            tags=row["tags"],
            keys=row["keys"],
            born_at_ms=row["born_at_ms"],
            incarnation=row["incarnation"] + 1,
            properties=row["properties"] or {},
        )
    except ValidationError as error:
        raise RecordError.from_validation(error) from None
    keyring = kafka.signing.keyring_of(row["producer_group"])
    key, body = encode_key(row["transaction_id"]), bytes(row["body"])
    return headers.signed(key, body, kafka.half_topic, keyring, at_ms).to_headers()


def _columns(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    return zip(*(column.to_pylist() for column in table.columns), strict=True)


class _ProgressLine:
    """Reports the progress of long work, at most every 5 s."""

    def __init__(self, say: Callable[[str], None], what: str) -> None:
        self._say = say
        self._what = what
        self._next_s = time.monotonic() + _SAY_EVERY_S

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _SAY_EVERY_S
            self._say(f"{self._what}: {done:,} of {total:,}")
