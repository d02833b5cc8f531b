"""Decodes Kafka records to events: each record is a half, an op, a tick, a lost notice, or broken (R14).

Works on columns: each check looks at all records of a batch at once. Only what is rare is looked at record by record:
ticks, broken records, and ops whose signature is verified.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from halfway.schemas import headers as h
from halfway.schemas.events import EVENT_SCHEMA, EventKind
from halfway.schemas.headers import Source
from halfway.schemas.outcomes import Reason
from halfway.schemas.settings import Settings
from halfway.schemas.signing import Keyring
from halfway.transforms.horizon import Tick

_Mask = npt.NDArray[np.bool_]
_Integers = npt.NDArray[np.int64]
_Problem = tuple[_Mask, Reason, str | Callable[[int], str]]
"""The broken records, why they are refused, and the detail, which may depend on the row."""


class _Header(NamedTuple):
    """A header of the contract: a number if it has `numbers`, a text that must not be empty if it has `max_bytes`."""

    name: str
    is_required: bool = False
    max_bytes: int | None = None
    numbers: range | None = None


_POSITIVE = range(1, h.MAX_INT + 1)
_TIME_MS = range(h.MAX_TIMESTAMP_MS + 1)
_PGROUP = _Header(h.PGROUP, is_required=True, max_bytes=h.MAX_NAME_BYTES)
_INCARNATION = _Header(h.INCARNATION, numbers=range(h.MAX_INCARNATION + 1))
_HALF = (
    _Header(h.REAL_TOPIC, is_required=True, max_bytes=h.MAX_NAME_BYTES),
    _PGROUP,
    _Header(h.REAL_QID, numbers=range(-h.MAX_INT - 1, h.MAX_INT + 1)),
    _Header(h.TAGS),
    _Header(h.KEYS),
    _Header(h.CHECK_IMMUNITY_TIME_IN_SECONDS, numbers=_POSITIVE),
    _Header(h.BORN_TIMESTAMP, numbers=_TIME_MS),
    _INCARNATION,
)
_OP = (
    _Header(h.ACTION, is_required=True),
    _PGROUP,
    _INCARNATION,
    _Header(h.FROM_CHECK),
    _Header(h.CHECK_TIMES, numbers=range(h.MAX_INT + 1)),
    _Header(h.REMARK),
)
_NAMES = (*dict.fromkeys((*h.HALF_HEADERS, *h.OP_HEADERS)), h.SIGNATURE, *h.DELAY_HEADERS, h.TICK, h.PARTITIONS, h.HALF_LOST)
# 1 to 19 digits. The first of 19 is 0, because a greater number is out of every range, and may need more than 64 bits.
# Not `$`, which also matches before a line end.
_NUMBER = r"^-?0?[0-9]{1,18}\z"
_POINTER = r"^[0-9]{1,9}:[0-9]{1,18}\z"
_MAX_DETAIL = 500
_LOG_APPEND_TIME = 1


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What `decode` depends on: two limits, and the keys that ops must be signed with, if any."""

    max_body_bytes: int
    max_clock_skew_ms: int
    keyring: Keyring | None = None

    @staticmethod
    def of(settings: Settings) -> "DecoderConfig":
        """Return what the job decodes with."""
        resolution = settings.resolution
        return DecoderConfig(resolution.max_body_bytes, resolution.max_clock_skew, settings.kafka.signing.keyring())


class Decoded(NamedTuple):
    """What the records of a batch say."""

    events: pa.RecordBatch
    """EVENT_SCHEMA: one row for each record but the good ticks."""
    ticks: list[Tick]
    """The good ticks."""
    read_ms: dict[tuple[Source, int], int]
    """Topic and partition → the newest time that the broker gave to a record that keeps the contract (R10, R11)."""


def decode(records: pa.RecordBatch, config: DecoderConfig) -> Decoded:
    """Turn Kafka records (RECORD_SCHEMA) into events and ticks, whatever is in the records."""
    batch = _Batch(records)
    for kind, problems_of in _PROBLEMS.items():
        if not batch.are(kind).any():
            continue
        # A broken record is of its kind no more when the next problem is looked for, so the first one counts.
        for broken, reason, detail in problems_of(batch, config):
            for row in np.flatnonzero(broken & batch.are(kind)).tolist():
                batch.kinds[row], batch.reasons[row] = EventKind.BROKEN, str(reason)
                batch.details[row] = (detail if isinstance(detail, str) else detail(row))[:_MAX_DETAIL]
    return Decoded(_events(batch), _ticks(batch), _read_ms(batch))


class _Batch:
    """Records, and where each has its first header of each name of the contract."""

    def __init__(self, records: pa.RecordBatch) -> None:
        self.records = records
        self.ids = _texts(records["key"])
        self.columns = {name: _integers(records[name]) for name in ("source", "partition", "at_ms", "timestamp_type", "value_bytes")}
        self.reasons, self.details = np.full((2, len(records)), None, object)

        names, values = records["headers"].flatten().flatten()
        parents = np.repeat(np.arange(len(records)), _integers(pc.list_value_length(records["headers"])))
        self.headers_bytes = np.bincount(parents, _lengths(names) + _lengths(values), len(records)).astype(np.int64)
        # All headers of all records, and one entry more: for a header that a record does not have.
        self._texts = _texts(values)
        self.lengths = np.append(_lengths(values), 0)
        self.is_null = np.append(_mask(values.is_null()), False)
        self.is_not_utf8 = np.append(_mask(self._texts.is_null()), False) & ~self.is_null

        codes = _integers(pc.index_in(names, pa.array(_NAMES)), null=-1)
        own, others = np.flatnonzero(codes >= 0), np.flatnonzero(codes < 0)
        cells = codes[own] * len(records) + parents[own]
        first = np.full(len(_NAMES) * len(records), len(values))
        np.minimum.at(first, cells, own)
        is_twice = np.zeros(len(first), bool)
        is_twice[cells[first[cells] < own]] = True
        self.first = dict(zip(_NAMES, first.reshape(len(_NAMES), -1), strict=True))
        self.is_twice = dict(zip(_NAMES, is_twice.reshape(len(_NAMES), -1), strict=True))

        # Spark has replaced what is not UTF-8 in a name.
        misnamed = others[_mask(pc.match_substring(names.take(pa.array(others)), "\N{REPLACEMENT CHARACTER}"))]
        self.has_not_utf8 = np.zeros(len(records), bool)
        self.has_not_utf8[parents[np.append(np.flatnonzero(self.is_not_utf8), misnamed)]] = True

        is_lost = self.has(h.HALF_LOST) & ~self.has(h.REAL_TOPIC)
        conditions = {EventKind.TICK: self.has(h.TICK), EventKind.OP: self.columns["source"] == Source.OP, EventKind.LOST: is_lost}
        self.kinds: npt.NDArray[np.int8] = np.select([*conditions.values()], [*conditions], EventKind.HALF).astype(np.int8)

    def are(self, kind: EventKind) -> _Mask:
        return np.equal(self.kinds, kind, dtype=np.bool_)

    def has(self, name: str) -> _Mask:
        return self.first[name] < len(self._texts)

    def texts(self, name: str, of: _Mask) -> pa.StringArray:
        """Return a header's values of the records `of`; null for what is missing, null, or not UTF-8."""
        return self._texts.take(pa.array(self.first[name], mask=~(of & self.has(name))))

    def matches(self, name: str, pattern: str) -> _Mask:
        return _mask(pc.match_substring_regex(self.texts(name, self.has(name)), pattern).fill_null(False))

    def numbers(self, name: str, of: _Mask) -> _Integers:
        """Return a header's values of the records `of`, all of which are numbers or missing; 0 for what is missing."""
        return _integers(self.texts(name, of).cast(pa.int64()))

    def has_number(self, name: str, numbers: range) -> _Mask:
        is_number = self.matches(name, _NUMBER)
        value = self.numbers(name, is_number)
        return is_number & (value >= numbers.start) & (value < numbers.stop)

    def actions(self) -> pa.StringArray:
        """Return what the ops say; null for what the contract does not know."""
        codes = pc.index_in(self.texts(h.ACTION, self.are(EventKind.OP)), pa.array(list(h.ACTIONS)))
        return pa.array([str(action) for action in h.ACTIONS.values()]).take(codes)


def _half_problems(batch: _Batch, config: DecoderConfig) -> Iterator[_Problem]:
    yield from _key_and_size_problems(batch)
    yield from _header_problems(batch, _HALF)
    yield batch.has_not_utf8, Reason.BAD_HEADER, "a header is not UTF-8"
    yield _duplicates(batch, h.HALF_HEADERS)
    for name in h.DELAY_HEADERS:
        yield batch.has(name), Reason.DELAY_NOT_SUPPORTED, name
    body = batch.columns["value_bytes"]
    yield body > config.max_body_bytes, Reason.BODY_TOO_LARGE, lambda row: f"{body[row]} bytes, at most {config.max_body_bytes}"


def _op_problems(batch: _Batch, config: DecoderConfig) -> Iterator[_Problem]:
    yield from _key_and_size_problems(batch)
    yield from _header_problems(batch, _OP)
    yield _duplicates(batch, (*h.OP_HEADERS, h.SIGNATURE) if config.keyring else h.OP_HEADERS)
    ops = batch.are(EventKind.OP)
    said, actions = batch.texts(h.ACTION, ops), batch.actions()
    yield _mask(actions.is_null()), Reason.UNKNOWN_ACTION, lambda row: f"ACTION is {said[row].as_py()[:100]}"
    if config.keyring:
        ops = batch.are(EventKind.OP)
        incarnations = pa.array(batch.numbers(h.INCARNATION, ops))
        signed = (batch.ids, actions, batch.texts(h.PGROUP, ops), incarnations, batch.texts(h.SIGNATURE, ops))
        fields = zip(*(column.filter(pa.array(ops)).to_pylist() for column in signed), strict=True)
        why = np.full(len(ops), None, object)
        why[ops] = [config.keyring.problem(*each) for each in fields]
        yield why.astype(bool), Reason.BAD_SIGNATURE, why.__getitem__


def _tick_problems(batch: _Batch, config: DecoderConfig) -> Iterator[_Problem]:
    bad, columns, most = Reason.BAD_TICK, batch.columns, config.max_clock_skew_ms
    yield _mask(batch.records["key"].is_valid()), bad, "a tick has no key"
    yield batch.headers_bytes > h.MAX_HEADERS_BYTES, bad, f"the headers are over {h.MAX_HEADERS_BYTES} bytes"
    yield ~batch.has_number(h.TICK, _TIME_MS), bad, f"{h.TICK} is not a number"
    yield ~batch.has_number(h.PARTITIONS, _POSITIVE), bad, f"{h.PARTITIONS} is not a positive number"
    yield _duplicates(batch, (h.TICK, h.PARTITIONS))[0], bad, "a header occurs twice"
    ticks = batch.are(EventKind.TICK)
    is_beyond = columns["partition"] >= batch.numbers(h.PARTITIONS, ticks)
    yield is_beyond, bad, f"{h.PARTITIONS} is not above the tick's own partition"
    yield columns["value_bytes"] > h.MAX_TICK_BYTES, bad, f"the value is over {h.MAX_TICK_BYTES // 1024} KiB"
    is_other = ticks.copy()
    is_other[ticks] = [_absent_groups(value.as_py()) is None for value in batch.records["tick_value"].filter(pa.array(ticks))]
    yield is_other, bad, 'the value is not {"absent_groups": [...]}'
    skew = np.abs(batch.numbers(h.TICK, ticks) - columns["at_ms"])
    yield skew > most, bad, lambda row: f"{h.TICK} is {skew[row]} ms from the record's timestamp, at most {most}"


def _lost_problems(batch: _Batch, _: DecoderConfig) -> Iterator[_Problem]:
    yield from _key_and_size_problems(batch)
    yield ~batch.matches(h.HALF_LOST, _POINTER), Reason.BAD_HEADER, h.HALF_LOST
    yield _duplicates(batch, (h.HALF_LOST,))


_PROBLEMS = {
    EventKind.HALF: _half_problems,
    EventKind.OP: _op_problems,
    EventKind.TICK: _tick_problems,
    EventKind.LOST: _lost_problems,
}


def _key_and_size_problems(batch: _Batch) -> Iterator[_Problem]:
    key, headers = _lengths(batch.records["key"]), batch.headers_bytes
    yield key == 0, Reason.MISSING_KEY, "the record key is the transaction id"
    yield key > h.MAX_KEY_BYTES, Reason.KEY_TOO_LONG, lambda row: f"{key[row]} bytes, at most {h.MAX_KEY_BYTES}"
    yield _mask(batch.ids.is_null()), Reason.KEY_NOT_UTF8, "the record key is not UTF-8"
    yield headers > h.MAX_HEADERS_BYTES, Reason.HEADERS_TOO_LARGE, lambda row: f"{headers[row]} bytes, at most {h.MAX_HEADERS_BYTES}"


def _header_problems(batch: _Batch, headers: tuple[_Header, ...]) -> Iterator[_Problem]:
    bad = Reason.BAD_HEADER
    for header in headers:
        if header.is_required:
            yield ~batch.has(header.name), Reason.MISSING_HEADER, header.name
    for name, _, max_bytes, numbers in headers:
        has, first = batch.has(name), batch.first[name]
        if numbers and has.any():
            yield has & ~batch.has_number(name, numbers), bad, f"{name} is not a number from {numbers[0]} to {numbers[-1]}"
        elif has.any():
            if max_bytes:
                yield batch.lengths[first] == 0, bad, f"{name} is empty or null"
                yield batch.lengths[first] > max_bytes, bad, f"{name} has over {max_bytes} bytes"
            yield batch.is_null[first], bad, f"{name} is null"
            yield batch.is_not_utf8[first], bad, f"{name} is not UTF-8"


def _duplicates(batch: _Batch, names: tuple[str, ...]) -> _Problem:
    is_any = np.any([batch.is_twice[name] for name in names], axis=0)
    return is_any, Reason.DUPLICATE_HEADER, lambda row: " ".join(name for name in names if batch.is_twice[name][row])


def _events(batch: _Batch) -> pa.RecordBatch:
    halves, ops, lost = (batch.are(kind) for kind in (EventKind.HALF, EventKind.OP, EventKind.LOST))
    columns = {
        "event": pa.array(batch.kinds),
        "source": batch.records["source"].cast(pa.int8()),
        **{name: batch.records[name] for name in ("partition", "offset", "at_ms")},
        "transaction_id": batch.ids,
        "producer_group": batch.texts(h.PGROUP, halves | ops),
        "topic": batch.texts(h.REAL_TOPIC, halves),
        "incarnation": pa.array(batch.numbers(h.INCARNATION, halves | ops).astype(np.int32)),
        "immunity_ms": pa.array(batch.numbers(h.CHECK_IMMUNITY_TIME_IN_SECONDS, halves) * 1000),
        "action": batch.actions(),
        "half_pointer": batch.texts(h.HALF_LOST, lost),
        "reason": pa.array(batch.reasons, pa.string()),
        "detail": pa.array(batch.details, pa.string()),
    }
    rows = pa.RecordBatch.from_arrays([columns[name] for name in EVENT_SCHEMA.names], schema=EVENT_SCHEMA)
    return rows.filter(pa.array(~batch.are(EventKind.TICK)))


def _ticks(batch: _Batch) -> list[Tick]:
    ticks = batch.are(EventKind.TICK)
    sources, partitions, times_ms = (batch.columns[name][ticks].tolist() for name in ("source", "partition", "at_ms"))
    sizes = batch.numbers(h.PARTITIONS, ticks)[ticks].tolist()
    absent_groups = [_absent_groups(value.as_py()) or () for value in batch.records["tick_value"].filter(pa.array(ticks))]
    return list(map(Tick, map(Source, sources), partitions, sizes, times_ms, absent_groups))


def _absent_groups(value: bytes | None) -> tuple[str, ...] | None:
    """Return the groups that a tick names as away (R15); None if its value is neither empty nor as documented."""
    try:
        said = json.loads((value or b"{}").decode())
        groups = said.get("absent_groups", []) if isinstance(said, dict) else ()
        # Fails for other things than text, and for half a character (`"\ud800"`), which no column can hold.
        "".join(groups).encode()
    except (ValueError, TypeError, RecursionError):
        return None
    return tuple(filter(None, groups)) if isinstance(groups, list) else None


def _read_ms(batch: _Batch) -> dict[tuple[Source, int], int]:
    is_read = ~batch.are(EventKind.BROKEN) & (batch.columns["timestamp_type"] == _LOG_APPEND_TIME)
    read = pa.Table.from_batches([batch.records.select(["source", "partition", "at_ms"]).filter(pa.array(is_read))])
    newest = read.group_by(["source", "partition"], use_threads=False).aggregate([("at_ms", "max")])
    return {(Source(row["source"]), row["partition"]): row["at_ms_max"] for row in newest.to_pylist()}


def _texts(values: pa.BinaryArray) -> pa.StringArray:
    """Return values as text; null for what is not UTF-8."""
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        texts = [None if value is None else value.decode(errors="ignore") for value in values.to_pylist()]
        # What was ignored is missing now.
        return pc.if_else(pc.equal(pc.binary_length(pa.array(texts, pa.string())), pc.binary_length(values)), texts, None)


def _lengths(values: pa.Array) -> _Integers:
    return _integers(pc.binary_length(values))


def _integers(values: pa.Array, null: int = 0) -> _Integers:
    numbers: _Integers = values.fill_null(null).to_numpy().astype(np.int64)
    return numbers


def _mask(values: pa.BooleanArray) -> _Mask:
    mask: _Mask = values.to_numpy(zero_copy_only=False)
    return mask
