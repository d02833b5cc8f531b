"""Reading records back from Kafka by their pointers, on the executors (design §1.3).

Where pointers are dense the partition is read through and the rest dropped; where they are sparse the reader seeks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from time import monotonic, sleep
from typing import Self, cast

import pyarrow as pa
from confluent_kafka import OFFSET_INVALID, Consumer, KafkaError, KafkaException, Message, TopicPartition
from pyspark import Accumulator
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from halfway.pipelines.kafka.admin import FETCH_GROUP
from halfway.pipelines.runtime.collector import collector_paused
from halfway.schemas.errors import KafkaUnavailableError
from halfway.schemas.events import StoredRecord
from halfway.schemas.headers import Source
from halfway.transforms.rows import RowMaker

CHUNK_OFFSETS = 16_384
"""Offsets that one task reads in one go."""
ROWS_PER_TASK = 2_000
"""Below this a further task, and with it a further file, costs more than it saves."""
DENSE_GAP = 1_000
"""Up to this many records it is not slower to read on than to seek: 140,000 records of 1 KiB a second, against 4 ms a seek."""
FLUSH_BYTES = 16 * 1024 * 1024
READ_TIMEOUT_S = 60.0
_END_POLL_S = 0.1

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
    """Read back the records that outcomes point to, and make rows of them.

    Args:
        outcomes: OUTCOME_SCHEMA.
        connection: librdkafka's options; it may hold secrets and goes to the executors in the task, not in the plan.
        topics: name of the half and the op topic.
        make_rows: takes outcomes and their records, on the executors. What differs from batch to batch belongs in there: as a literal
            it would be in Spark's generated code, which would then be compiled, and run cold, for every batch anew.
        schema: of the rows that it makes.
        rows: how many outcomes there are, to size the work.
        lost: gets the number of records that were not found.

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
    """Yield for each pointer its record, or None where it is not there any more; pointers are sorted."""
    for (source, partition), group in groupby(pointers, key=itemgetter(0, 1)):
        wanted = list(group)
        is_half = Source(source) is Source.HALF
        span = wanted[-1][2] - wanted[0][2] + 1
        with _PartitionReader(connection, topics[Source(source)], partition, dense=span <= DENSE_GAP * len(wanted)) as reader:
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
    """Whether this is the record that was read first: a topic may have been deleted, and made and filled again (R17)."""
    key = record.key()
    same_key = not is_half or transaction_id is None or (key is not None and bytes(key) == transaction_id.encode())
    return same_key and record.timestamp()[1] == at_ms


_consumers: dict[tuple[tuple[str, str], ...], Consumer] = {}
"""One consumer a Python worker and way of reading: connecting takes longer than most fetches."""


def _consumer(connection: dict[str, str], dense: bool) -> Consumer:
    fetch_bytes, queue_kbytes = ("4194304", "8192") if dense else ("65536", "256")
    options = {
        **connection,
        "group.id": FETCH_GROUP,
        "enable.auto.commit": "false",
        "enable.auto.offset.store": "false",
        "enable.partition.eof": "true",
        "auto.offset.reset": "error",
        "fetch.wait.max.ms": "10",
        "fetch.message.max.bytes": fetch_bytes,
        # What is fetched beyond the last record that is wanted is thrown away.
        "queued.max.messages.kbytes": queue_kbytes,
        # 1000 by default: a full queue would be empty again before that is over.
        "fetch.queue.backoff.ms": "2",
        "check.crcs": "true",
    }
    identity = tuple(sorted(options.items()))
    if identity not in _consumers:
        _consumers[identity] = Consumer(options)
    return _consumers[identity]


class _PartitionReader:
    """Reads one partition forward, by offsets that only grow."""

    def __init__(self, connection: dict[str, str], topic: str, partition: int, *, dense: bool) -> None:
        self._consumer = _consumer(connection, dense)
        self._place = (topic, partition)
        self._low = self._high = self._position = 0
        self._read: Iterator[Message] = iter(())
        self._ahead: Message | None = None

    def __enter__(self) -> Self:
        self._position = OFFSET_INVALID
        self._ask()
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.unassign()

    def records(self, offsets: Sequence[int]) -> Iterator[Message | None]:
        """Return for each of these offsets its record, or None if there is none (any more)."""
        lasts = list(offsets)
        for place in range(len(lasts) - 2, -1, -1):
            if offsets[place + 1] - offsets[place] <= DENSE_GAP:
                lasts[place] = lasts[place + 1]
        return map(self._record_at, offsets, lasts)

    def _record_at(self, offset: int, last: int) -> Message | None:
        """Return a record; `last` is the last one to read on to from there, or this one."""
        if not self._is_kept(offset):
            return None
        if self._position < 0 or offset - self._position > DENSE_GAP:
            self._seek(offset)
        while True:
            record = self._ahead if self._ahead is not None else self._next(offset, last)
            found = OFFSET_INVALID if record is None else record.offset() or 0
            if record is None or found > offset:
                self._ahead = record
                return None
            self._ahead = None
            self._position = found + 1
            if found == offset:
                return record

    def _ask(self) -> None:
        """Ask Kafka where the partition begins and ends."""
        try:
            self._low, self._high = self._consumer.get_watermark_offsets(TopicPartition(*self._place), timeout=READ_TIMEOUT_S)
        except KafkaException as error:
            if error.args[0].code() not in (KafkaError._UNKNOWN_PARTITION, KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
                raise KafkaUnavailableError(f"cannot read {self._place[0]}: {error.args[0].str()}") from None
            self._low = self._high = 0
            # For up to 15 minutes the client would go by what it knew of the topic before it had this partition.
            with suppress(KafkaException):
                self._consumer.list_topics(self._place[0], timeout=READ_TIMEOUT_S)

    def _is_kept(self, offset: int) -> bool:
        """Tell whether the partition still has this offset, which was read before; False only if its beginning is past it.

        An end before it proves nothing: a broker that is back after a crash, or has just become the leader, tells an end that lies behind
        until its replicas agree, and for a moment it knows no topic at all (KAFKA-16452). So that is waited for.
        """
        deadline = monotonic() + READ_TIMEOUT_S
        while offset >= self._high:
            if monotonic() >= deadline:
                raise KafkaUnavailableError(
                    f"{self._place[0]} ends at offset {self._high} of partition {self._place[1]}, and {offset} was read from there before: "
                    "is a broker still down, or has one lost records?"
                )
            sleep(_END_POLL_S)
            self._ask()
        return offset >= self._low

    def _seek(self, offset: int) -> None:
        self._consumer.assign([TopicPartition(*self._place, offset)])
        self._position, self._read, self._ahead = offset, iter(()), None

    def _next(self, offset: int, last: int) -> Message | None:
        """Return the next record; None at the partition's end, or where retention has just taken the offset away."""
        deadline = monotonic() + READ_TIMEOUT_S
        while monotonic() < deadline:
            record = next(self._read, None)
            if record is None:
                self._read = iter(self._consumer.consume(max(1, min(last + 1 - self._position, 4096)), timeout=0.05))
                continue
            error = record.error()
            if error is None:
                return record
            if error.code() == KafkaError._PARTITION_EOF:
                if (record.offset() or 0) < self._high:
                    continue
                return None
            if error.code() not in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                raise KafkaUnavailableError(f"cannot read {self._place[0]}: {error.str()}")
            self._ask()
            if not self._is_kept(offset):
                return None
            self._seek(offset)
        raise KafkaUnavailableError(f"no answer from Kafka for {self._place[0]} in {READ_TIMEOUT_S:.0f} s")
