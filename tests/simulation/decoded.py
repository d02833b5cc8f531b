"""The product's decoder over simulated records, fast enough for a thousand histories a minute.

A call of the decoder takes milliseconds, however few records it gets. What it says of a record depends on that record
alone, so it is asked once for each shape of a record, and its answer is used again with another place and time. Every
`FULL`th history goes the whole way instead, through packs, buckets and the operator, so that this is tested too.
"""

import re
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa

from halfway.schemas import headers as h
from halfway.schemas.events import RECORD_SCHEMA
from halfway.schemas.headers import Source
from halfway.transforms import operator
from halfway.transforms.by_batch import ByBatch
from halfway.transforms.decoding import DecoderConfig, decode
from halfway.transforms.horizon import Place, Tick
from halfway.transforms.packing import pack_events
from halfway.transforms.protocol import Batch, Half, Lost, Op, Outcome
from tests.simulation.history import OP, Record

_LOG_APPEND_TIME = 1
_PLAIN_ID = re.compile(rb"t[0-9]+")
_TIMES = (h.TICK, h.BORN_TIMESTAMP)
"""Headers that differ from record to record, and of which the answer holds nothing."""
_answers: dict[Hashable, Any] = {}


def to_arrow(records: Iterable[Record]) -> pa.RecordBatch:
    """Return RECORD_SCHEMA, as Spark's Kafka source gives it."""
    rows = [
        {
            "source": int(record.topic == OP),
            "partition": record.partition,
            "offset": record.offset,
            "at_ms": record.at_ms,
            "timestamp_type": _LOG_APPEND_TIME,
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
    pack = pack_events(ByBatch([(0, config)]), bucket_keys, former)
    return pd.concat([batch.to_pandas() for batch in pack([records])])


def to_batch(records: Sequence[Record], config: DecoderConfig, former: Any) -> Batch:
    """Return what the records say, in the words of the protocol.

    Args:
        records: the records.
        config: what decoding depends on.
        former: what former checkpoints have dealt with, if they may have dealt with one of these.
    """
    if former is not None:
        return operator.to_batch([to_packs(to_arrow(records), config, (0,), former)])
    halves: list[Half] = []
    ops: list[Op] = []
    lost: list[Lost] = []
    broken: list[Outcome] = []
    ticks: dict[Place, Tick] = {}
    read_ms: dict[Place, int] = {}
    for record in records:
        place = (Source(int(record.topic == OP)), record.partition)
        said = _said(record, config)
        if isinstance(said, Tick):
            tick = said._replace(at_ms=record.at_ms)
            ticks[place] = max(ticks.get(place, tick), tick)
        elif isinstance(said, Half):
            halves.append(said._replace(at_ms=record.at_ms, partition=record.partition, offset=record.offset))
        elif isinstance(said, Op):
            ops.append(said._replace(at_ms=record.at_ms, partition=record.partition, offset=record.offset))
        elif isinstance(said, Lost):
            lost.append(said._replace(at_ms=record.at_ms))
        else:
            broken.append(said._replace(at_ms=record.at_ms, partition=record.partition, offset=record.offset))
            continue
        read_ms[place] = max(read_ms.get(place, record.at_ms), record.at_ms)
    return Batch(halves, ops, lost, list(ticks.values()), broken, read_ms)


def forget_answers() -> None:
    """Forget what the decoder said: it was replaced."""
    _answers.clear()


def _said(record: Record, config: DecoderConfig) -> Tick | Half | Op | Lost | Outcome:
    tick = _tick_ms(record)
    skew_ms = None if tick is None else record.at_ms - tick
    headers = tuple((name, None if value and name in _TIMES and value.isdigit() else value) for name, value in record.headers)
    is_plain = _PLAIN_ID.fullmatch(record.key or b"") is not None
    place = () if tick is None else (record.partition, record.value)
    key = (config, record.topic, None if is_plain else record.key, headers, len(record.value or b""), skew_ms, is_plain, *place)
    if key not in _answers:
        _answers[key] = _ask(record, config)
    said = _answers[key]
    return said._replace(transaction_id=record.text_key) if is_plain else said  # type: ignore[no-any-return]


def _tick_ms(record: Record) -> int | None:
    text = dict(record.headers).get(h.TICK)
    return int(text) if text is not None and text.isdigit() else None


def _ask(record: Record, config: DecoderConfig) -> Tick | Half | Op | Lost | Outcome:
    decoded = decode(to_arrow([record]), config)
    if decoded.ticks:
        return decoded.ticks[0]
    halves: list[Half] = []
    ops: list[Op] = []
    lost: list[Lost] = []
    broken: list[Outcome] = []
    operator._sort_out(pa.Table.from_batches([decoded.events]), halves, ops, lost, broken)
    [said] = [*halves, *ops, *lost, *broken]
    return said
