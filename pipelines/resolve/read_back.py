"""Reads records back from Kafka by their pointers, on the executors (decision 3)."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import cast

import pyarrow as pa
from confluent_kafka import Consumer, Message
from pyspark import Accumulator
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from halfway.pipelines.kafka.range_reader import DENSE_GAP, PartitionReader, reading_options
from halfway.pipelines.kafka.rights import FETCH_GROUP
from halfway.pipelines.runtime.collector import collector_paused
from halfway.schemas.events import StoredRecord
from halfway.schemas.headers import Source
from halfway.transforms.rows import RowMaker

CHUNK_OFFSETS = 16_384
"""The number of consecutive offsets that one task reads."""
ROWS_PER_TASK = 2_000
"""With fewer rows, another task, and with it another file, costs more than it saves."""
FLUSH_BYTES = 16 * 1024 * 1024

Pointer = tuple[int, int, int, int, str | None]
"""source, partition, offset, at_ms, transaction id."""


def fetch(
    outcomes: DataFrame,
    connection: Mapping[str, str],
    topics: Mapping[Source, str],
    make_rows: RowMaker,
    schema: StructType,
    *,
    rows: int,
    lost: Accumulator[int],
) -> DataFrame:
    """Read the records that outcomes point to, and make rows of them.

    Args:
        outcomes: OUTCOME_SCHEMA.
        connection: librdkafka's options. They may hold secrets: Spark sends them to the executors in the task, not in
            the plan.
        topics: the names of the half and op topics.
        make_rows: makes rows of outcomes and their records, on the executors. It holds the values that differ from
            batch to batch: as literals they would be part of Spark's generated code, compiled again for every batch.
        schema: the schema of the rows.
        rows: the number of outcomes, to choose the number of tasks.
        lost: receives the number of records that were not found.

    Returns:
        The rows.
    """
    tasks = max(1, min(outcomes.sparkSession.sparkContext.defaultParallelism, -(-rows // ROWS_PER_TASK)))
    task = F.pmod(F.col("partition") + F.floor(F.col("offset") / CHUNK_OFFSETS), F.lit(tasks)).cast("int")
    placed = outcomes.repartitionById(tasks, task) if tasks > 1 else outcomes.coalesce(1)
    return placed.sortWithinPartitions("source", "partition", "offset").mapInArrow(
        _fetch_function(dict(connection), dict(topics), make_rows, lost), schema
    )


def _fetch_function(
    connection: dict[str, str], topics: dict[Source, str], make_rows: RowMaker, lost: Accumulator[int]
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def fetch_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with collector_paused():
            for batch in batches:
                names = ("source", "partition", "offset", "at_ms", "transaction_id")
                pointers: list[Pointer] = list(zip(*(batch.column(name).to_pylist() for name in names), strict=True))
                done = 0
                for records in _in_portions(_read(connection, topics, pointers)):
                    yield make_rows(batch.slice(done, len(records)), records)
                    done += len(records)
                    lost.add(sum(record is None for record in records))

    return fetch_batches


def _in_portions(records: Iterable[StoredRecord | None]) -> Iterator[list[StoredRecord | None]]:
    portion: list[StoredRecord | None] = []
    size = 0
    for record in records:
        portion.append(record)
        size += len(record.value or b"") if record is not None else 0
        if size >= FLUSH_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def _read(connection: dict[str, str], topics: dict[Source, str], pointers: list[Pointer]) -> Iterator[StoredRecord | None]:
    """Yield the record of each pointer, or None if it is lost. The pointers are sorted."""
    for (source, partition), group in groupby(pointers, key=itemgetter(0, 1)):
        wanted = list(group)
        is_half = Source(source) is Source.HALF
        span = wanted[-1][2] - wanted[0][2] + 1
        consumer = _consumer(connection, dense=span <= DENSE_GAP * len(wanted))
        with PartitionReader(consumer, topics[Source(source)], partition) as reader:
            records = reader.records([offset for _, _, offset, _, _ in wanted])
            for (_, _, _, at_ms, transaction_id), record in zip(wanted, records, strict=True):
                yield _stored(record) if record is not None and _is_same(record, is_half, at_ms, transaction_id) else None


def _stored(record: Message) -> StoredRecord:
    try:
        headers = cast("list[tuple[str, bytes | None]]", record.headers() or [])
    except UnicodeDecodeError:
        headers = None
    return StoredRecord(record.key(), record.value(), headers)


def _is_same(record: Message, is_half: bool, at_ms: int, transaction_id: str | None) -> bool:
    """Return True if this is the record that the job read: the topic may have been deleted and filled again (R17)."""
    key = record.key()
    same_key = not is_half or transaction_id is None or (key is not None and bytes(key) == transaction_id.encode())
    return same_key and record.timestamp()[1] == at_ms


_consumers: dict[tuple[tuple[str, str], ...], Consumer] = {}
"""The consumers of this Python worker, by options: connecting takes longer than most fetches."""


def _consumer(connection: dict[str, str], *, dense: bool) -> Consumer:
    fetch_bytes, queue_kbytes = ("4194304", "8192") if dense else ("65536", "256")
    options = {
        **connection,
        **reading_options(FETCH_GROUP),
        "fetch.message.max.bytes": fetch_bytes,
        # The reader drops what is fetched beyond the last record that it wants.
        "queued.max.messages.kbytes": queue_kbytes,
        "fetch.queue.backoff.ms": "2",
        "check.crcs": "true",
    }
    identity = tuple(sorted(options.items()))
    if identity not in _consumers:
        _consumers[identity] = Consumer(options)
    return _consumers[identity]
