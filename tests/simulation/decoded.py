"""The product's decoder over simulated records, fast enough for a thousand histories a minute.

A call of the decoder takes milliseconds, however few records it gets. What it says of a record depends on that record
alone, so it is asked once for each shape of a record, and its answer is used again with another place and time. Every
`FULL`th history goes the whole way instead, through packs, buckets and the operator, so that this is tested too.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa

from halfway.schemas import headers as h
from halfway.schemas.events import EVENT_SCHEMA, RECORD_SCHEMA, EventKind
from halfway.schemas.headers import Source
from halfway.schemas.tick_value import TickValue
from halfway.transforms import operator
from halfway.transforms.by_batch import ByBatch
from halfway.transforms.decoding import DecoderConfig, decode
from halfway.transforms.former import FormerRecords
from halfway.transforms.horizon import NO_TIME, SourcePartition, Tick
from halfway.transforms.packing import pack_events
from halfway.transforms.protocol import Batch, Half, Lost, Op, Outcome
from tests.simulation.history import OP, Record
from tests.simulation.log import LOG_APPEND_TIME

Said = Tick | Half | Op | Lost | Outcome
Told = tuple[Record, Said]
_answers: dict[Hashable, Any] = {}


def to_arrow(records: Iterable[Record], timestamp_type: int) -> pa.RecordBatch:
    """Return RECORD_SCHEMA, as Spark's Kafka source gives it."""
    rows = [
        {
            "source": int(record.topic == OP),
            "partition": record.partition,
            "offset": record.offset,
            "at_ms": record.at_ms,
            "timestamp_type": timestamp_type,
            "key": record.key,
            "headers": [{"key": name, "value": value} for name, value in record.headers],
            "value_bytes": len(record.value or b""),
            "tick_value": record.value if record.key is None and len(record.value or b"") <= h.MAX_TICK_BYTES else None,
        }
        for record in records
    ]
    return pa.RecordBatch.from_pylist(rows, schema=RECORD_SCHEMA)


def to_packs(records: pa.RecordBatch, config: DecoderConfig, bucket_keys: Sequence[int], former: Any) -> pd.DataFrame:
    """Return the packs (PACKED_EVENTS_SCHEMA) that a task makes of its records (RECORD_SCHEMA)."""
    pack = pack_events(ByBatch([(0, config)]), bucket_keys, b"", former)
    return pd.concat([batch.to_pandas() for batch in pack([records])])


def to_batch(records: Sequence[Record], config: DecoderConfig, former: Any, timestamp_type: int) -> Batch:
    """Return what the records say, in the words of the protocol.

    Args:
        records: the records.
        config: what decoding depends on.
        former: what former checkpoints have dealt with, if they may have dealt with one of these.
        timestamp_type: whose clock the times of the records are of.
    """
    halves: list[Half] = []
    ops: list[Op] = []
    lost: list[Lost] = []
    broken: list[Outcome] = []
    ticks: dict[SourcePartition, Tick] = {}
    read_ms: dict[SourcePartition, int] = {}
    told = [(record, _said(record, config)) for record in records]
    for record, said in told:
        place = (Source(int(record.topic == OP)), record.partition)
        if isinstance(said, Tick):
            ticks[place] = said._replace(at_ms=record.at_ms)
        if timestamp_type == LOG_APPEND_TIME:
            read_ms[place] = read_ms.get(place, NO_TIME) if isinstance(said, Outcome) else record.at_ms
    for record, said in told if former is None else _not_dealt_with(told, former.value):
        if isinstance(said, Half):
            halves.append(said._replace(at_ms=record.at_ms, partition=record.partition, offset=record.offset))
        elif isinstance(said, Op):
            ops.append(said._replace(at_ms=record.at_ms, partition=record.partition, offset=record.offset))
        elif isinstance(said, Lost):
            lost.append(said._replace(at_ms=record.at_ms))
        elif isinstance(said, Outcome):
            broken.append(said._replace(at_ms=record.at_ms, partition=record.partition, offset=record.offset))
    return Batch(halves, ops, lost, list(ticks.values()), broken, read_ms)


def _not_dealt_with(told: Sequence[Told], former: FormerRecords) -> list[Told]:
    """Leave out what former checkpoints have dealt with, as `pack_events` does; a half that was discarded says so."""
    others: list[Told] = []
    events = [(record, said) for record, said in told if not isinstance(said, Tick)]
    marked = former.mark(pa.RecordBatch.from_pylist([_event(record, said) for record, said in events], schema=EVENT_SCHEMA))
    for (record, said), kind, discarded_ms in zip(events, marked["event"].to_pylist(), marked["discarded_ms"].to_pylist(), strict=True):
        if kind != EventKind.COUNTED:
            others.append((record, said._replace(discarded_ms=discarded_ms) if isinstance(said, Half) else said))
    return others


def _event(record: Record, said: Said) -> dict[str, Any]:
    place = {"source": int(record.topic == OP), "partition": record.partition, "offset": record.offset, "at_ms": record.at_ms}
    return {"event": _KINDS[type(said)], **place, "incarnation": 0, "immunity_ms": 0, "discarded_ms": 0}


_KINDS: dict[type, EventKind] = {Half: EventKind.HALF, Op: EventKind.OP, Lost: EventKind.LOST, Outcome: EventKind.BROKEN}


def forget_answers() -> None:
    """Forget what the decoder said: it was replaced."""
    _answers.clear()


def _said(record: Record, config: DecoderConfig) -> Said:
    key, headers, size = record.key, record.headers, len(record.value or b"")
    is_plain = key is not None and key[:1] == b"t" and key[1:].isdigit()
    limits = config.max_body_bytes, config.max_clock_skew_ms
    shape: Hashable
    told = None  # what a tick says with its value, each of another time
    if headers[:1] and headers[0][0] == h.TICK:
        skew_ms = record.at_ms - int(headers[0][1] or b"")
        told = TickValue.parse(record.value) if size <= h.MAX_TICK_BYTES else None
        value = record.value if told is None else told._replace(job="", asked_ms=0)
        shape = (*limits, record.topic, record.partition, key, value, headers[1:], skew_ms)
    else:
        timeless = tuple((name, None if name == h.BORN_TIMESTAMP else value) for name, value in headers)
        may_be_taken = record.offset < config.taken_at.get(record.partition, 0)
        shape = (*limits, may_be_taken, record.topic, is_plain, None if is_plain else key, size, timeless)
    said = _answers.get(shape)
    if said is None:
        said = _answers[shape] = _ask(record, config)
    if told is not None and isinstance(said, Tick):
        return said._replace(asked_ms=told.asked_of(config.job))
    return said._replace(transaction_id=record.text_key) if is_plain else said  # type: ignore[no-any-return]


def _ask(record: Record, config: DecoderConfig) -> Said:
    decoded = decode(to_arrow([record], LOG_APPEND_TIME), config)
    if decoded.ticks:
        return decoded.ticks[0]
    halves: list[Half] = []
    ops: list[Op] = []
    lost: list[Lost] = []
    broken: list[Outcome] = []
    operator._sort_out(pa.Table.from_batches([decoded.events]), halves, ops, lost, broken)
    [said] = [*halves, *ops, *lost, *broken]
    return said
