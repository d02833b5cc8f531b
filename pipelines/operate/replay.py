"""Resends discarded messages, each as a half of the next incarnation. The operation is idempotent.

It can be repeated and interrupted because the half topic is its only memory. For each id and group, the latest
discarded incarnation i is sent as i + 1, unless a half of the same id and group with an incarnation above i was written
after the discard. The search covers, in this order, `messages`, the state, and the half topic from 2 × `max_clock_skew`
before the discard on: a broker's clock may be behind the horizon of the discard. A half of a higher incarnation from
before the discard was refused, so `quarantine` holds it. The topic also holds the halves that the job has not read yet,
that an interrupted replay has sent, and that were rolled back. A half that the job has refused, as `quarantine` tells,
had no effect and does not count.

While an id is pending otherwise, such as for another group, the job would refuse another half of it (R12). It is named
and not sent.

The guarantee has these limits:

- A message that was discarded before the oldest record that the half topic retains is *unproven*: it may have been
  replayed before and rolled back. It is skipped unless requested.
- A second replay, or an erasure, is refused meanwhile if the checkpoint is a local folder. Elsewhere, the second half
  of one incarnation is a counted duplicate (R12) while the first is pending or remembered.
- If producers set the time of records (CreateTime), a service that sends a higher incarnation itself must not set an
  earlier time.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
from confluent_kafka import Message
from pydantic import ValidationError
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F

from halfway.pipelines.kafka.range_reader import READ_UNCOMMITTED
from halfway.pipelines.kafka.topic_scan import TopicScan
from halfway.pipelines.kafka.writer import RecordWriter, verify_topic_writable
from halfway.pipelines.operate.earlier_replays import (
    Candidates,
    LatestDiscard,
    ProgressLine,
    drop_committed,
    drop_pending,
    drop_unproven,
    pending_of,
    refused_halves,
    rows_of,
    sent_halves,
)
from halfway.pipelines.operate.find_pending import block_of
from halfway.pipelines.operate.settle import argument_of
from halfway.pipelines.storage.delta_tables import read_table, stored_tables
from halfway.pipelines.storage.locks import replay_lock
from halfway.pipelines.storage.state_reader import read_state
from halfway.schemas.errors import HalfwayError, NotPendingError, SettingsError
from halfway.schemas.headers import SIGNATURE, SIGNED_WINDOW_MS, HeaderList
from halfway.schemas.records import HalfHeaders, RecordError, encode_key
from halfway.schemas.settings import KafkaSettings, Settings, StorageSettings
from halfway.schemas.tables import Table
from halfway.transforms.views.pending import view_pending

_NAMED_IDS = 5
_PARTITION_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class Discarded:
    """A message that a replay would resend."""

    transaction_id: str
    producer_group: str
    discarded_at_ms: int
    reason: str
    topic: str
    keys: str | None


@dataclass(frozen=True)
class Left:
    """A message that a replay has not resent, and why."""

    transaction_id: str
    producer_group: str
    why: str


@dataclass(frozen=True)
class ReplayResult:
    """Numbers of messages: resent now, resent before, skipped because they are unproven, and named as not sent."""

    replayed: int
    already_replayed: int
    unproven: int
    not_sent: int
    would_resend: Sequence[Discarded] = ()
    """Of a dry run: what would be resent, in the order of the discards."""
    left: Sequence[Left] = ()
    """Those that are unproven, or named as not sent."""


@dataclass(frozen=True)
class ReplaySelection:
    """Selects discarded messages: by id, or, without ids, all that match the other fields."""

    transaction_ids: Sequence[str] = ()
    producer_group: str | None = None
    reason: str | None = None
    unproven: bool = False
    """True to also select unproven messages."""


def replay_discarded(
    spark: SparkSession, settings: Settings, wanted: ReplaySelection, say: Callable[[str], None], *, dry_run: bool = False
) -> ReplayResult:
    """Resend discarded messages, except those that were resent before.

    Args:
        spark: the session that reads the tables and the state.
        settings: the job's.
        wanted: the messages to resend.
        say: gets a sentence about the progress every 5 s, and one about each message that cannot be sent.
        dry_run: True to send nothing, and return what would be resent. Bodies are not read: one that was erased, or is
            too large, is listed too.

    Raises:
        HalfwayError: there are no tables, or the checkpoint does not tell what is pending. Nothing was sent.
        NotPendingError: an id was not discarded. Nothing was sent.
        CheckpointInUseError: another replay or an erasure is running.
        TopicError: the half topic does not exist, or takes no message of this size.
        KafkaUnavailableError: Kafka cannot be read or does not accept a record. A repeated call continues from there.
    """
    with replay_lock(settings.storage):
        candidates = _latest_discards(spark, settings.storage, wanted)
        if not candidates:
            return ReplayResult(0, 0, 0, 0)
        selected, unproven, left = len(candidates), list[tuple[str, str]](), list[Left]()
        drop_committed(spark, settings.storage, candidates)
        pending, read_to, absent_groups = _pending(spark, settings, candidates)
        drop_pending(pending, candidates)
        unsure: set[tuple[str, str]] = set()
        if candidates:
            kafka = settings.kafka
            with TopicScan.open(kafka, kafka.half_topic) as scan, TopicScan.open(kafka, kafka.half_topic, READ_UNCOMMITTED) as whole:
                if not wanted.unproven:
                    unproven = drop_unproven(scan, candidates)
                unsure = _drop_sent(spark, settings, (scan, whole), candidates, say, read_to=read_to)
        to_send = len(candidates)
        already = selected - len(unproven) - to_send
        _drop_unsure(unsure, candidates, say, left)
        _drop_held(pending, candidates, say, left)
        for group in sorted({group for _, group in candidates} & absent_groups):
            say(f"the group {group} was away or behind at the job's last batch: its messages wait until it answers checks")
        found = []
        if dry_run:
            found = [Discarded(*identity, each.discarded_ms, each.reason, each.topic, each.keys) for identity, each in candidates.items()]
            found.sort(key=lambda each: (each.discarded_at_ms, each.transaction_id, each.producer_group))
        replayed = _send(spark, settings, candidates, say, left) if candidates and not dry_run else 0
        left += [Left(*identity, "unproven") for identity in unproven]
        return ReplayResult(replayed, already, len(unproven), to_send - len(found) - replayed, found, left)


def _latest_discards(spark: SparkSession, storage: StorageSettings, wanted: ReplaySelection) -> Candidates:
    """Return the latest discard of each selected id and group."""
    found: Candidates = {}
    rows = stored_tables(spark, storage)[Table.DISCARDED]
    if wanted.transaction_ids:
        rows = rows.where(F.col("transaction_id").isin(list(wanted.transaction_ids)))
    discarded_ms = F.unix_millis("discarded_at").alias("discarded_ms")
    latest = F.max(F.struct("incarnation", discarded_ms, "half_partition", "half_offset", "reason", "topic", "keys")).alias("latest")
    if wanted.producer_group is not None:
        rows = rows.where(F.col("producer_group") == wanted.producer_group)
    by_id = rows.groupBy("transaction_id", "producer_group").agg(latest).select("transaction_id", "producer_group", "latest.*")
    if wanted.reason is not None:
        by_id = by_id.where(F.col("reason") == wanted.reason)
    for row in rows_of(by_id.toArrow()):
        transaction_id, group, *discard = row
        found[transaction_id, group] = LatestDiscard(*discard)
    known = {transaction_id for transaction_id, _ in found}
    missing = [transaction_id for transaction_id in wanted.transaction_ids if transaction_id not in known]
    if missing:
        named = ", ".join(missing[:_NAMED_IDS]) + (f" and {len(missing) - _NAMED_IDS} more" if len(missing) > _NAMED_IDS else "")
        ask = block_of([read_table(spark, storage, Table.DISCARDED)], missing[0])
        raise NotPendingError(f"not discarded, so nothing was sent: {named}{ask or '; `halfway replay --all --dry-run` lists what was'}")
    return found


def _pending(spark: SparkSession, settings: Settings, candidates: Candidates) -> tuple[pa.Table, Mapping[int, int], frozenset[str]]:
    """Return what is pending (PENDING_SCHEMA) under ids of candidates, how far halves are read, and who is absent."""
    stored = read_state(lambda: spark, settings.storage)
    if stored.batch_id is None:
        raise HalfwayError(
            f"the checkpoint {settings.storage.checkpoint} has no batch yet, and does not tell what is pending: let the job end one, and "
            "replay then"
        )
    view = view_pending(stored.rows)
    return pending_of(candidates, view.transactions), stored.read_to.get(settings.kafka.half_topic, {}), view.absent_groups


def _drop_sent(
    spark: SparkSession,
    settings: Settings,
    scans: tuple[TopicScan, TopicScan],
    candidates: Candidates,
    say: Callable[[str], None],
    *,
    read_to: Mapping[int, int],
) -> set[tuple[str, str]]:
    """Drop ids of which the half topic holds a higher incarnation since the discard, unless the job has refused it.

    Returns:
        The other ids of which it holds one that cannot be read yet: it may be of a transaction that will be aborted.
    """
    if not candidates:
        return set()
    progress = ProgressLine(say, "searching the half topic for earlier replays")
    sent = list(sent_halves(scans, candidates, settings, read_to, progress))
    committed, _ = scans
    readable = {partition: end for partition, (_, end) in committed.retained.items()}
    refused = refused_halves(spark, settings.storage, settings.kafka.half_topic, sent) if sent else set()
    unsure = set()
    for half in sent:
        if half.offset >= readable.get(half.partition, 0):
            unsure.add(half.identity)
        elif half not in refused:
            candidates.pop(half.identity, None)
    return unsure & candidates.keys()


def _leave(identity: tuple[str, str], why: str, say: Callable[[str], None], left: list[Left]) -> None:
    say(f"{identity[0]} is not sent: {why}")
    left.append(Left(*identity, why))


def _drop_unsure(unsure: set[tuple[str, str]], candidates: Candidates, say: Callable[[str], None], left: list[Left]) -> None:
    """Drop the ids of which the half topic holds a half that cannot be read yet, and name them."""
    for identity in sorted(unsure):
        open_before = "one of its later halves cannot be read yet: the Kafka transaction before it, which `halfway status` names, is open"
        _leave(identity, f"{open_before}: repeat this when it has ended", say, left)
        del candidates[identity]


def _drop_held(pending: pa.Table, candidates: Candidates, say: Callable[[str], None], left: list[Left]) -> None:
    """Drop the ids that are pending, and name them."""
    holders = {row[0]: row[1:] for row in rows_of(pending.select(["transaction_id", "producer_group", "incarnation"]))}
    for identity in [each for each in candidates if each[0] in holders]:
        name, (group, incarnation) = identity[0], holders[identity[0]]
        held = f"the id is pending for the group {group} (incarnation {incarnation}), so that the job would refuse the half"
        ends = f"`halfway rollback {argument_of(name)}` ends it"
        _leave(identity, f"{held}: replay it when that transaction has ended and is forgotten; {ends}", say, left)
        del candidates[identity]


def _send(spark: SparkSession, settings: Settings, candidates: Candidates, say: Callable[[str], None], left: list[Left]) -> int:
    """Send the halves. Return how many Kafka has acknowledged, without those that the job will refuse."""
    progress = ProgressLine(say, "sending")
    half_topic, total = settings.kafka.half_topic, len(candidates)
    verify_topic_writable(settings.kafka, half_topic)
    writer, max_body_bytes = RecordWriter(settings.kafka), settings.resolution.max_body_bytes
    refused: dict[tuple[str, str], int] = {}

    def verify_clock(identity: tuple[str, str], signed_ms: int, half: Message) -> None:
        ahead_ms = signed_ms - half.timestamp()[1]
        if abs(ahead_ms) > SIGNED_WINDOW_MS:
            refused[identity] = ahead_ms

    for done, row in enumerate(_rows(spark, settings.storage, candidates)):
        identity = row["transaction_id"], row["producer_group"]
        discarded = candidates.pop(identity, None)
        if discarded is not None:
            # With CreateTime, a later replay must find this half after the discard.
            at_ms = max(time.time_ns() // 1_000_000, discarded.discarded_ms)
            if row["body"] is None:
                _leave(identity, "its body was erased (`halfway erase`)", say, left)
                continue
            try:
                headers = next_half(row, settings.kafka, at_ms)
            except HalfwayError as error:
                # The incarnation may be the largest one, the headers that it has in addition too much, or the key of
                # the group may be missing. The others do not wait for this one.
                _leave(identity, str(error), say, left)
                continue
            if len(row["body"]) > max_body_bytes:
                # The job would quarantine the half.
                _leave(identity, f"its body has {len(row['body'])} bytes, over resolution.max_body_bytes: raise it", say, left)
                continue
            is_signed = any(name == SIGNATURE for name, _ in headers)
            verify = partial(verify_clock, identity, at_ms) if is_signed else None
            writer.put(half_topic, encode_key(row["transaction_id"]), bytes(row["body"]), headers, at_ms=at_ms, on_delivered=verify)
        progress(done, total)
    writer.flush()
    for identity, ahead_ms in refused.items():
        clock = f"its signature is of {abs(ahead_ms) / 1000:.0f} s {'after' if ahead_ms > 0 else 'before'} the broker's time"
        vain = f"sent in vain: {clock}, so that the job refuses it: set this machine's clock right, and repeat"
        say(f"{identity[0]} was {vain}")
        left.append(Left(*identity, vain))
    return writer.delivered - len(refused)


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
    """Return the headers of a discarded message's next incarnation. They keep all but an immunity.

    A half of before 1970, on a topic with CreateTime, had none: no header can say its time.

    Raises:
        RecordError: the headers break the contract, such as an incarnation above the largest one.
        SettingsError: signing is required, and there is no key for the group, or it may not send to the topic any more.
    """
    try:
        headers = HalfHeaders(
            real_topic=row["topic"],
            producer_group=row["producer_group"],
            queue_id=row["queue_id"],
            tags=row["tags"],
            keys=row["keys"],
            born_at_ms=row["born_at_ms"] if (row["born_at_ms"] or 0) >= 0 else None,
            incarnation=row["incarnation"] + 1,
            properties=row["properties"] or {},
        )
    except ValidationError as error:
        raise RecordError.from_validation(error) from None
    keyring = kafka.signing.keyring_of(row["producer_group"])
    if keyring is not None and (problem := keyring.topic_problem(row["producer_group"], row["topic"])):
        raise SettingsError(f"{problem}, says kafka.signing.topics")
    key, body = encode_key(row["transaction_id"]), bytes(row["body"])
    return headers.signed(key, body, kafka.half_topic, keyring, at_ms).to_headers()
