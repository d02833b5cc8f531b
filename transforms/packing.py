"""Packs events and outcomes for their way through Spark: a few rows a bucket instead of one a record (decision 2).

Spark carries rows between the JVM and Python one by one, which took more time than the rules. A *pack* is a table in
one BINARY value, as an Arrow IPC stream.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import Broadcast
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from halfway.schemas.events import EVENT_SCHEMA, OUTCOME_SCHEMA, PACKED_EVENTS_SCHEMA, PACKED_OUTCOMES_SCHEMA, EventKind
from halfway.schemas.headers import MAX_TICK_BYTES, Source
from halfway.schemas.outcomes import Kind
from halfway.transforms.by_batch import ByBatch
from halfway.transforms.decoding import DecoderConfig, decode
from halfway.transforms.former import FormerRecords
from halfway.transforms.horizon import SourcePartition, Tick, latest_ticks, read_on
from halfway.transforms.protocol import Outcome
from halfway.transforms.record_columns import Integers, is_before

ROWS_IN_MEMORY = 500_000
"""A task packs its events when it holds this many."""
CHUNK_OFFSETS = 16_384
"""The number of consecutive offsets whose records one task reads back."""
UNDIVIDED = -1
"""The slot of the outcomes of a bucket that has few: the driver may collect them."""

TaskTimes = tuple[Sequence[Tick], Mapping[SourcePartition, int]]
"""What every bucket has to know of a task's records: the ticks, and by partition the last broker time.

A task reads its partitions whole, each by its offsets: Kafka's source divides none without `minPartitions`.
"""
PackEvents = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class Takeover(NamedTuple):
    """What tables that were adopted may hold messages of; of nothing if there were none."""

    ends: Mapping[Source, Mapping[int, int]] = {}
    """By topic and partition, where the topics ended then."""
    copied_until_ms: int = 0
    """Until when a later signed half may be a copy of an earlier one, and be read first."""
    signing_groups: Sequence[str] = ()
    """The groups that sign."""


class OutcomePack(NamedTuple):
    """A row of PACKED_OUTCOMES_SCHEMA."""

    kind: int
    slot: int
    may_be_held: bool
    rows: int
    outcomes: bytes


def to_records(records: DataFrame, op_topic: str, *, digests: bool = False) -> DataFrame:
    """Select RECORD_SCHEMA from Spark's Kafka columns. Bodies stay in the JVM.

    Args:
        records: Spark's Kafka columns, with headers.
        op_topic: the name of the op topic.
        digests: True if signatures are verified, which cover the digests of the values.
    """
    digest = F.unhex(F.sha2(F.coalesce("value", F.lit(b"")), 256)) if digests else F.lit(None).cast("binary")
    may_be_tick = F.col("key").isNull() & (F.length("value") <= MAX_TICK_BYTES)
    return records.select(
        (F.col("topic") == op_topic).cast("int").alias("source"),
        "partition",
        "offset",
        F.unix_millis("timestamp").alias("at_ms"),
        F.col("timestampType").alias("timestamp_type"),
        "key",
        "headers",
        F.coalesce(F.length("value"), F.lit(0)).alias("value_bytes"),
        F.when(may_be_tick, F.col("value")).alias("tick_value"),
        digest.alias("value_sha256"),
    )


def pack_events(
    configs: ByBatch[DecoderConfig], bucket_keys: Sequence[int], secret: bytes, former: Broadcast[FormerRecords] | None = None
) -> PackEvents:
    """Return the function that decodes the records of a task (RECORD_SCHEMA) to PACKED_EVENTS_SCHEMA.

    Args:
        configs: what decoding depends on.
        bucket_keys: the keys that Spark groups the buckets by.
        secret: the checkpoint's, by which ids fall into buckets.
        former: what former checkpoints have dealt with; None if that cannot be read again.
    """

    def pack(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        config = configs.here()
        kept: list[pa.RecordBatch] = []
        ticks: list[Tick] = []
        read_ms: dict[SourcePartition, int] = {}
        for batch in batches:
            decoded = decode(batch, config)
            kept.append(decoded.events if former is None else former.value.mark(decoded.events))
            ticks = latest_ticks([*ticks, *decoded.ticks])
            read_ms = read_on(read_ms, decoded.read_ms)
            if sum(map(len, kept)) >= ROWS_IN_MEMORY:
                yield _by_bucket(kept, b"", bucket_keys, secret)
                kept = []
        yield _by_bucket(kept, _pack_times((ticks, read_ms)), bucket_keys, secret)

    return pack


def buckets_of(transaction_ids: Sequence[bytes], buckets: int, secret: bytes) -> Integers:
    """Return the number of the bucket that each id belongs to: a hash by the checkpoint's secret.

    Without one, somebody could send ids of one bucket, whose state Spark would then hand over as one huge value.
    """
    keyed = blake2b(key=secret, digest_size=8)

    def digest(transaction_id: bytes) -> bytes:
        of_id = keyed.copy()  # half the time of hashing the key again
        of_id.update(transaction_id)
        return of_id.digest()

    hashes = np.frombuffer(b"".join(map(digest, transaction_ids)), "<u8")
    return (hashes % np.uint64(buckets)).astype(np.int64)


def unpack(pack: bytes) -> pa.Table:
    """Return the table in a pack, without copying it."""
    with pa.ipc.open_stream(pack) as reader:
        return reader.read_all()


@lru_cache(maxsize=256)
def unpack_times(times: bytes) -> TaskTimes:
    """Return the times of a task. Cached, because all buckets get the same."""
    lists, ticks, read = json.loads(times) if times else ((), (), ())
    named = list(map(tuple, lists))
    return (
        [Tick(Source(source), partition, count, at_ms, named[which], asked) for source, partition, count, at_ms, which, asked in ticks],
        {(Source(source), partition): at_ms for source, partition, at_ms in read},
    )


def pack_outcomes(outcomes: Sequence[Outcome], slots: int, max_undivided: int, takeover: Takeover) -> list[OutcomePack]:
    """Pack the outcomes of one bucket.

    Args:
        outcomes: the outcomes.
        slots: the number of tasks that read records back.
        max_undivided: up to this many outcomes are not divided among the tasks.
        takeover: what adopted tables may hold messages of.
    """
    if not outcomes:
        return []
    table = pa.Table.from_arrays(list(zip(*outcomes, strict=True)), schema=OUTCOME_SCHEMA)
    kinds, partitions, offsets = (table[name].to_numpy() for name in ("kind", "partition", "offset"))
    is_undivided = len(outcomes) <= max_undivided
    of_slot = np.zeros(len(outcomes), np.int64) if is_undivided else (partitions + offsets // CHUNK_OFFSETS) % slots
    may_be_held = is_before(takeover.ends.get(Source.HALF), partitions, offsets)
    if takeover.copied_until_ms:
        is_signed = pc.is_in(table["producer_group"], pa.array(takeover.signing_groups, pa.string())).to_numpy()
        may_be_held |= is_signed & (table["at_ms"].to_numpy() <= takeover.copied_until_ms)
    may_be_held &= kinds != Kind.QUARANTINE
    op_partitions, op_offsets = (table[name].to_numpy() for name in ("op_partition", "op_offset"))
    may_be_held |= (kinds == Kind.COMMIT) & is_before(takeover.ends.get(Source.OP), op_partitions, op_offsets)
    rows = []
    for key, of_key in _grouped(table, (kinds * 2 + may_be_held) * slots + of_slot):
        kind_and_held, slot = divmod(key, slots)
        slot = UNDIVIDED if is_undivided else slot
        rows.append(OutcomePack(kind_and_held // 2, slot, bool(kind_and_held % 2), of_key.num_rows, _to_bytes(of_key)))
    return rows


def outcomes_in(packs: DataFrame) -> DataFrame:
    """Return the outcomes of PACKED_OUTCOMES_SCHEMA, without reports, one row each (OUTCOME_SCHEMA)."""

    def rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for pack in batch["outcomes"].to_pylist():
                yield from unpack(pack).to_batches()

    return packs.where(F.col("kind") != int(Kind.REPORT)).mapInArrow(rows, from_arrow_schema(OUTCOME_SCHEMA))


def repacked(outcomes: DataFrame) -> DataFrame:
    """Pack outcomes (OUTCOME_SCHEMA) again, one pack of each kind and batch; no adopted table may hold them.

    `slot` is the partition of the first (PACKED_OUTCOMES_SCHEMA).
    """

    def packs(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            table = pa.Table.from_batches([batch]).cast(OUTCOME_SCHEMA)
            for kind, of_kind in _grouped(table, table["kind"].to_numpy()):
                row = OutcomePack(kind, of_kind["partition"][0].as_py(), False, of_kind.num_rows, _to_bytes(of_kind))
                yield pa.RecordBatch.from_pylist([row._asdict()], schema=PACKED_OUTCOMES_SCHEMA)

    return outcomes.mapInArrow(packs, from_arrow_schema(PACKED_OUTCOMES_SCHEMA))


def _by_bucket(kept: Sequence[pa.RecordBatch], times: bytes, bucket_keys: Sequence[int], secret: bytes) -> pa.RecordBatch:
    """Pack events by bucket. Time concerns every bucket, also one without events."""
    events = pa.Table.from_batches(kept, EVENT_SCHEMA)
    packs = {number: _to_bytes(rows) for number, rows in _grouped(events, _bucket_numbers(events, len(bucket_keys), secret))}
    wanted = range(len(bucket_keys)) if times else list(packs)
    columns = [[bucket_keys[number] for number in wanted], [packs.get(number, b"") for number in wanted], [times] * len(wanted)]
    return pa.RecordBatch.from_arrays(columns, schema=PACKED_EVENTS_SCHEMA)


def _bucket_numbers(events: pa.Table, buckets: int, secret: bytes) -> Integers:
    """Return the bucket of each event: of its id, or of its place if the record is broken."""
    ids = events["transaction_id"].cast(pa.binary()).to_numpy().tolist()
    of_id = buckets_of([key or b"" for key in ids], buckets, secret)
    of_place = events["partition"].to_numpy() + events["offset"].to_numpy()
    return np.where(events["event"].to_numpy() == EventKind.BROKEN, of_place % buckets, of_id)


def _grouped(table: pa.Table, keys: Integers) -> Iterator[tuple[int, pa.Table]]:
    """Yield each key with its rows, in their order."""
    order = np.argsort(keys, kind="stable")
    ordered, rows = keys[order], table.take(order).combine_chunks()
    edges = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(ordered)] if len(ordered) else []
    for begin, end in pairwise(edges):
        yield int(ordered[begin]), rows.slice(begin, end - begin)


def _to_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _pack_times(times: TaskTimes) -> bytes:
    """Return times as JSON, each list of groups once; nothing if the records of the task say nothing of time."""
    ticks, read_ms = times
    if not ticks and not read_ms:
        return b""
    lists: dict[tuple[str, ...], int] = {}
    said = [(*tick[:4], lists.setdefault(tick.absent_groups, len(lists)), tick.asked_ms) for tick in ticks]
    return json.dumps([list(lists), said, [(*place, at_ms) for place, at_ms in read_ms.items()]]).encode()
