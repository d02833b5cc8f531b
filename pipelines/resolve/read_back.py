"""Reads records back from Kafka by their pointers, on an executor or on the driver (decision 3)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import pyarrow as pa
from confluent_kafka import Consumer, Message

from halfway.pipelines.kafka.admin import librdkafka_log
from halfway.pipelines.kafka.range_reader import DENSE_GAP, PartitionReader, reading_options
from halfway.pipelines.kafka.rights import FETCH_GROUP
from halfway.pipelines.runtime.collector import collector_paused
from halfway.schemas.events import StoredRecord
from halfway.schemas.headers import Source
from halfway.schemas.records import headers_of

FLUSH_BYTES = 16 * 1024 * 1024
"""A portion ends when its records take this much memory together."""

Pointer = tuple[int, int, int, int, str | None]
"""source, partition, offset, at_ms, transaction id."""
Portion = tuple[pa.RecordBatch, list[StoredRecord | None]]
"""Outcomes (OUTCOME_SCHEMA), and for each the record that it points to, or None if that record is gone."""


class RecordFetcher:
    """Reads the records that outcomes point to."""

    def __init__(self, connection: Mapping[str, str], topics: Mapping[Source, str]) -> None:
        """Store the configuration. Does not connect.

        Args:
            connection: librdkafka's options, of which `client.id` names the job: two jobs in one process must not share
                a consumer. They may hold secrets: Spark sends them to the executors in the task, not in the plan.
            topics: the names of the half and op topics.
        """
        self._connection, self._topics = dict(connection), dict(topics)

    def portions(self, outcomes: pa.Table) -> Iterator[Portion]:
        """Yield outcomes with their records, in portions of `FLUSH_BYTES`, in the order of their pointers.

        Args:
            outcomes: OUTCOME_SCHEMA.
        """
        with collector_paused():
            ordered = outcomes.sort_by([(name, "ascending") for name in ("source", "partition", "offset")]).combine_chunks()
            names = ("source", "partition", "offset", "at_ms", "transaction_id")
            pointers: list[Pointer] = list(zip(*(ordered[name].to_pylist() for name in names), strict=True))
            done = 0
            for records in _in_portions(self.records(pointers)):
                yield ordered.slice(done, len(records)).to_batches()[0], records
                done += len(records)

    def records(self, pointers: Sequence[Pointer]) -> Iterator[StoredRecord | None]:
        """Yield the record of each pointer, or None if it is gone. The pointers are sorted."""
        for (source, partition), group in groupby(pointers, key=itemgetter(0, 1)):
            wanted = list(group)
            is_half = Source(source) is Source.HALF
            span = wanted[-1][2] - wanted[0][2] + 1
            consumer = _consumer(self._connection, dense=span <= DENSE_GAP * len(wanted))
            with PartitionReader(consumer, self._topics[Source(source)], partition) as reader:
                found = reader.records([offset for _, _, offset, _, _ in wanted])
                for (_, _, _, at_ms, transaction_id), record in zip(wanted, found, strict=True):
                    yield _stored(record) if record is not None and _is_same(record, is_half, at_ms, transaction_id) else None

    def close(self) -> None:
        """Close the consumers of this process that have these options. On executors they end with their process."""
        for identity in [identity for identity in _consumers if identity.issuperset(self._connection.items())]:
            _consumers.pop(identity).close()


def is_full(portion: Sequence[StoredRecord | None]) -> bool:
    """Return True for a portion that ended because its records are large. Every portion but the last one is full."""
    return sum(record.size() for record in portion if record is not None) >= FLUSH_BYTES


def _in_portions(records: Iterable[StoredRecord | None]) -> Iterator[list[StoredRecord | None]]:
    portion: list[StoredRecord | None] = []
    size = 0
    for record in records:
        portion.append(record)
        size += record.size() if record is not None else 0
        if size >= FLUSH_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def _stored(record: Message) -> StoredRecord:
    return StoredRecord(record.key(), record.value(), headers_of(record))


def _is_same(record: Message, is_half: bool, at_ms: int, transaction_id: str | None) -> bool:
    """Return True if this is the record that the job read: the topic may have been deleted and filled again (R17)."""
    key = record.key()
    same_key = not is_half or transaction_id is None or (key is not None and bytes(key) == transaction_id.encode())
    return same_key and record.timestamp()[1] == at_ms


_consumers: dict[frozenset[tuple[str, str]], Consumer] = {}
"""The consumers of this process, by options: connecting takes longer than most fetches."""


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
    identity = frozenset(options.items())
    if identity not in _consumers:
        _consumers[identity] = Consumer(options, logger=librdkafka_log)
    return _consumers[identity]
