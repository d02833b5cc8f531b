"""Tells which discarded messages need no replay: it was sent before, or nothing proves that it was not.

`replay.py` says what is searched, and with which limits.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Message
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from halfway.pipelines.kafka.topic_scan import TopicScan
from halfway.pipelines.storage.delta_tables import read_table
from halfway.schemas.headers import TICK
from halfway.schemas.outcomes import Reason
from halfway.schemas.records import HalfHeaders, RecordError, headers_of
from halfway.schemas.settings import KafkaSettings, Settings, StorageSettings
from halfway.schemas.signing import Keyring, Signable, sha256_of
from halfway.schemas.tables import Table

_SAY_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class LatestDiscard:
    """The latest discard of a transaction id by one group."""

    incarnation: int
    discarded_ms: int
    half_partition: int
    half_offset: int
    reason: str
    topic: str
    keys: str | None


class Identity(NamedTuple):
    """Whose message it is. Another group's discard of an id must not hide a group's own."""

    transaction_id: str
    producer_group: str


Candidates = dict[Identity, LatestDiscard]


class SentHalf(NamedTuple):
    """A half of a higher incarnation that was sent after a discard, and where it is."""

    identity: Identity
    partition: int
    offset: int
    at_ms: int


def drop_committed(spark: SparkSession, storage: StorageSettings, candidates: Candidates) -> None:
    """Drop ids that are committed in a higher incarnation."""
    # Most messages have incarnation 0, so that file statistics skip nearly all of the table.
    committed = read_table(spark, storage, Table.MESSAGES).where(F.col("incarnation") > 0)
    for row in rows_of(committed.select("transaction_id", "incarnation", "producer_group").toArrow()):
        drop_if_higher(candidates, *row)


def drop_pending(pending: pa.Table, candidates: Candidates) -> None:
    """Drop ids that are pending in a higher incarnation.

    Args:
        pending: see `pending_of`.
        candidates: the messages to replay.
    """
    for row in rows_of(pending.select(["transaction_id", "incarnation", "producer_group"])):
        drop_if_higher(candidates, *row)


def pending_of(candidates: Candidates, pending: pa.Table) -> pa.Table:
    """Return those of the pending transactions (PENDING_SCHEMA) that have the id of a candidate, and are not itself.

    The state may be from before the batch that discarded it.
    """
    ids = pa.array(ids_of(candidates), pa.string())
    found = pending.filter(pc.is_in(pending["transaction_id"], value_set=ids))
    own = {(*identity, row.half_partition, row.half_offset) for identity, row in candidates.items()}
    names = ["transaction_id", "producer_group", "half_partition", "half_offset"]
    return found.filter(pa.array([row not in own for row in rows_of(found.select(names))], pa.bool_()))


def drop_unproven(scan: TopicScan, candidates: Candidates) -> list[Identity]:
    """Drop ids that were discarded before the topic's oldest record. Return them, each with its group."""
    known_since_ms = scan.known_since_ms()
    ends = scan.ends
    unproven = [
        identity
        for identity, row in candidates.items()
        # A half beyond the end was in an earlier topic of the same name, which was deleted.
        if row.discarded_ms < known_since_ms or row.half_offset >= ends.get(row.half_partition, 0)
    ]
    for identity in unproven:
        del candidates[identity]
    return unproven


def sent_halves(
    scans: tuple[TopicScan, TopicScan],
    candidates: Candidates,
    settings: Settings,
    read_to: Mapping[int, int],
    progress: Callable[[int, int], None],
) -> Iterator[SentHalf]:
    """Return the halves of a higher incarnation that the half topic holds since the discard, whatever their outcome.

    The clock that gave one its time may be behind the one that gave the discard its horizon. One from before the
    discard was refused, which `refused_halves` finds out.

    The job will refuse a half that is not signed as it must be, so it counts for nothing here either. Those that it has
    read were judged by the keys of their time, which `refused_halves` finds out too.

    Args:
        scans: the half topic, up to the first open transaction of each partition; and all of it, opened later: an
            earlier replay may be behind that transaction.
        candidates: the messages to replay.
        settings: the job's.
        read_to: by partition, the offset after the last record that the job has read.
        progress: called with what is done, and of how much.
    """
    scan, whole = scans
    most_apart_ms = 2 * settings.resolution.max_clock_skew
    since = scan.since(max(0, min(row.discarded_ms for row in candidates.values()) - most_apart_ms), progress)
    return higher_halves(chain(since, whole.beyond(scan.ends)), candidates, ids_of(candidates), settings.kafka, read_to)


def ids_of(candidates: Candidates) -> AbstractSet[str]:
    """Return the transaction ids of messages."""
    return {transaction_id for transaction_id, _ in candidates}


def higher_halves(
    records: Iterable[Message], candidates: Candidates, ids: AbstractSet[str], kafka: KafkaSettings, read_to: Mapping[int, int]
) -> Iterator[SentHalf]:
    """Yield the halves of a higher incarnation among records of the half topic; see `sent_halves`."""
    keyring = kafka.signing.keyring()
    for record in records:
        key, at_ms = record.key(), record.timestamp()[1]
        transaction_id = key.decode(errors="replace") if key is not None else ""
        if transaction_id not in ids:
            continue
        is_read = (record.offset() or 0) < read_to.get(record.partition() or 0, 0)
        half = _half_of(record, kafka.half_topic, None if is_read else keyring)
        if half is None:
            continue
        identity = Identity(transaction_id, half.producer_group)
        discarded = candidates.get(identity)
        if discarded is not None and half.incarnation > discarded.incarnation:
            yield SentHalf(identity, record.partition() or 0, record.offset() or 0, at_ms)


def refused_halves(spark: SparkSession, storage: StorageSettings, half_topic: str, sent: list[SentHalf]) -> set[SentHalf]:
    """Return those of the halves that `quarantine` holds: the job read them, and they had no effect.

    A half that was lost (R17) had been taken. A record at the place of another one, in a topic that was recreated, has
    another time.
    """
    identities = {half[1:]: half for half in sent}
    places = pa.Table.from_pylist(
        [{"source_partition": half.partition, "source_offset": half.offset, "at_ms": half.at_ms} for half in sent],
        pa.schema({"source_partition": pa.int32(), "source_offset": pa.int64(), "at_ms": pa.int64()}),
    )
    rows = read_table(spark, storage, Table.QUARANTINE).where(
        (F.col("source_topic") == half_topic) & (F.col("reason") != str(Reason.HALF_LOST))
    )
    at = rows.withColumn("at_ms", F.unix_millis("source_timestamp"))
    refused = at.join(F.broadcast(spark.createDataFrame(places)), places.column_names).select(*places.column_names)
    return {identities[place] for place in rows_of(refused.toArrow())}


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


def drop_if_higher(candidates: Candidates, transaction_id: str, incarnation: int, producer_group: str) -> None:
    """Drop a candidate of which a higher incarnation is known."""
    identity = Identity(transaction_id, producer_group)
    discarded = candidates.get(identity)
    if discarded is not None and incarnation > discarded.incarnation:
        del candidates[identity]


def rows_of(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table."""
    return zip(*(column.to_pylist() for column in table.columns), strict=True)


class ProgressLine:
    """Reports the progress of long work, at most every 5 s."""

    def __init__(self, say: Callable[[str], None], what: str) -> None:
        """Store what is reported, and where to."""
        self._say = say
        self._what = what
        self._next_s = time.monotonic() + _SAY_EVERY_S

    def __call__(self, done: int, total: int) -> None:
        """Report that a part is done, if the last report was long ago."""
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _SAY_EVERY_S
            self._say(f"{self._what}: {done:,} of {total:,}")
