"""Decodes Kafka records to events: each record is a half, an op, a tick, a lost notice, or broken (R14).

Works on columns: each check looks at all records of a batch at once. Only what is rare is looked at record by record:
ticks, broken records, and records whose signature is verified. `schemas/records.py` has the same limits for clients.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from halfway.schemas import headers as h
from halfway.schemas.events import EVENT_SCHEMA, EventKind
from halfway.schemas.headers import Source
from halfway.schemas.outcomes import MAX_DETAIL, Reason
from halfway.schemas.settings import KafkaSettings, ResolutionSettings
from halfway.schemas.signing import Keyring, Signable, binding_of
from halfway.schemas.tick_value import TickValue
from halfway.transforms.horizon import NO_TIME, SourcePartition, Tick
from halfway.transforms.record_columns import Integers, Mask, RecordColumns, is_before, mask_of

_Problem = tuple[Mask, Reason, str | Callable[[int], str]]
"""The broken records, why they are refused, and the detail, which may depend on the row."""


class _Header(NamedTuple):
    """A header of the contract: a number if it has `numbers`, a text that must not be empty if it has `max_bytes`."""

    name: str
    is_required: bool = False
    max_bytes: int | None = None
    numbers: range | None = None
    may_have_nul: bool = True


_POSITIVE = range(1, h.MAX_INT + 1)
_TIME_MS = range(h.MAX_TIMESTAMP_MS + 1)
_PGROUP = _Header(h.PGROUP, is_required=True, max_bytes=h.MAX_NAME_BYTES, may_have_nul=False)
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
    _Header(h.SIGNED_AT, numbers=_TIME_MS),
    _Header(h.SIGNATURE),
)
_OP = (
    _Header(h.ACTION, is_required=True),
    _PGROUP,
    _INCARNATION,
    _Header(h.FROM_CHECK),
    _Header(h.CHECK_TIMES, numbers=range(h.MAX_INT + 1)),
    _Header(h.REMARK),
    _Header(h.HALF_SIGNATURE),
)
_POINTER = r"^[0-9]{1,9}:[0-9]{1,18}\z"
_LOG_APPEND_TIME = 1


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What `decode` depends on: two limits, the keys that records must be signed with, if any, and the takeover."""

    max_body_bytes: int
    max_clock_skew_ms: int
    keyring: Keyring | None = None
    topics: Mapping[Source, str] = field(default_factory=dict)
    """The names of the half and op topics, which signatures cover."""
    taken_at: Mapping[int, int] = field(default_factory=dict)
    """Partition of the half topic → the offset before which a former checkpoint may have taken bodies (decision 6)."""
    job: str = ""
    """The checkpoint's query, which its ticks name."""

    @staticmethod
    def of(
        resolution: ResolutionSettings, kafka: KafkaSettings, taken_at: Mapping[int, int] | None = None, job: str = ""
    ) -> "DecoderConfig":
        """Return what the job decodes with."""
        topics = {Source.HALF: kafka.half_topic, Source.OP: kafka.op_topic}
        return DecoderConfig(resolution.max_body_bytes, resolution.max_clock_skew, kafka.signing.keyring(), topics, taken_at or {}, job)


class Decoded(NamedTuple):
    """What the records of a batch say."""

    events: pa.RecordBatch
    """EVENT_SCHEMA: one row for each record but the good ticks."""
    ticks: list[Tick]
    """The good ticks, as their partitions have them."""
    read_ms: dict[SourcePartition, int]
    """Partition → the last time that the broker gave to a record that keeps the contract (R10, R11)."""


def decode(batch: pa.RecordBatch, config: DecoderConfig) -> Decoded:
    """Turn Kafka records (RECORD_SCHEMA) into events and ticks, whatever is in the records.

    Those of a partition must come in the order of their offsets.
    """
    records = RecordColumns(batch)
    for kind, problems_of in _PROBLEMS.items():
        if not records.are(kind).any():
            continue
        # A broken record is of its kind no more when the next problem is looked for, so the first one counts.
        for broken, reason, detail in problems_of(records, config):
            for row in np.flatnonzero(broken & records.are(kind)).tolist():
                records.kinds[row], records.reasons[row] = EventKind.BROKEN, str(reason)
                records.details[row] = (detail if isinstance(detail, str) else detail(row))[:MAX_DETAIL]
    return Decoded(_events(records), _ticks(records, config.job), _read_ms(records))


def _half_problems(records: RecordColumns, config: DecoderConfig) -> Iterator[_Problem]:
    yield from _key_and_size_problems(records)
    yield from _header_problems(records, _HALF)
    yield records.has_not_utf8, Reason.BAD_HEADER, "a header is not UTF-8"
    # librdkafka's Python client, which reads the half back, ends a name there: `REAL_QID\0x` would become `REAL_QID`.
    yield records.has_nul, Reason.BAD_HEADER, "the name of a header has a NUL"
    yield _duplicates(records, h.HALF_HEADERS)
    for name in h.DELAY_HEADERS:
        yield records.has(name), Reason.DELAY_NOT_SUPPORTED, name
    body = records.columns["value_bytes"]
    # A former checkpoint may have taken it, whatever the limit is now: those that it refused are known.
    may_be_taken = is_before(config.taken_at, records.columns["partition"], records.columns["offset"])
    too_large = (body > config.max_body_bytes) & ~may_be_taken
    yield too_large, Reason.BODY_TOO_LARGE, lambda row: f"{body[row]} bytes, at most {config.max_body_bytes}"
    if config.keyring:
        yield from _half_signature_problems(records, config, config.keyring)


def _half_signature_problems(records: RecordColumns, config: DecoderConfig, keyring: Keyring) -> Iterator[_Problem]:
    bad, halves = Reason.BAD_SIGNATURE, records.are(EventKind.HALF)
    groups = np.array(records.texts(h.PGROUP, halves).to_pylist(), object)
    why = np.full(len(halves), None, object)
    topics = records.texts(h.REAL_TOPIC, halves).filter(pa.array(halves)).to_pylist()
    why[halves] = list(map(keyring.topic_problem, groups[halves].tolist(), topics))
    yield why.astype(bool), bad, why.__getitem__
    yield _signature_problem(records, EventKind.HALF, config, keyring.problem)
    has_key = np.fromiter(map(keyring.has, groups.tolist()), bool, len(groups))
    are_signed = records.are(EventKind.HALF) & has_key & records.has(h.SIGNATURE)
    signed_ms = records.numbers(h.SIGNED_AT, are_signed)
    skew_ms = np.abs(signed_ms - records.columns["at_ms"])
    yield are_signed & ~records.has(h.SIGNED_AT), bad, f"{h.SIGNED_AT} is missing"
    is_far = are_signed & (skew_ms > h.SIGNED_WINDOW_MS)
    yield is_far, bad, lambda row: f"{h.SIGNED_AT} is {skew_ms[row]} ms from the record's timestamp, at most {h.SIGNED_WINDOW_MS}"
    records.valid_ms = np.where(are_signed, signed_ms + h.SIGNED_WINDOW_MS, 0)


def _signature_problem(
    records: RecordColumns, kind: EventKind, config: DecoderConfig, problem: Callable[[str, Signable, str | None], str | None]
) -> _Problem:
    """Return which records of a kind have no valid signature."""
    of = records.are(kind)
    signables = records.signables(of, config.topics)
    said = (records.texts(name, of).filter(pa.array(of)).to_pylist() for name in (h.PGROUP, h.SIGNATURE))
    why = np.full(len(of), None, object)
    why[of] = [problem(group, signable, signature) for signable, group, signature in zip(signables, *said, strict=True)]
    return why.astype(bool), Reason.BAD_SIGNATURE, why.__getitem__


def _op_problems(records: RecordColumns, config: DecoderConfig) -> Iterator[_Problem]:
    yield from _key_and_size_problems(records)
    yield from _header_problems(records, _OP)
    yield _duplicates(records, (*h.OP_HEADERS, h.SIGNATURE) if config.keyring else h.OP_HEADERS)
    ops = records.are(EventKind.OP)
    said, actions = records.texts(h.ACTION, ops), records.actions()
    yield mask_of(actions.is_null()), Reason.UNKNOWN_ACTION, lambda row: f"ACTION is {said[row].as_py()[:100]}"
    if config.keyring:
        yield _signature_problem(records, EventKind.OP, config, config.keyring.problem)


def _tick_problems(records: RecordColumns, config: DecoderConfig) -> Iterator[_Problem]:
    bad, columns, most_ms = Reason.BAD_TICK, records.columns, config.max_clock_skew_ms
    yield mask_of(records.raw["key"].is_valid()), bad, "a tick has no key"
    yield records.headers_bytes > h.MAX_HEADERS_BYTES, bad, f"the headers are over {h.MAX_HEADERS_BYTES} bytes"
    yield ~records.has_number(h.TICK, _TIME_MS), bad, f"{h.TICK} is not a number"
    yield ~records.has_number(h.PARTITIONS, _POSITIVE), bad, f"{h.PARTITIONS} is not a positive number"
    yield _duplicates(records, (h.TICK, h.PARTITIONS))[0], bad, "a header occurs twice"
    ticks = records.are(EventKind.TICK)
    is_beyond = columns["partition"] >= records.numbers(h.PARTITIONS, ticks)
    yield is_beyond, bad, f"{h.PARTITIONS} is not above the tick's own partition"
    yield columns["value_bytes"] > h.MAX_TICK_BYTES, bad, f"the value is over {h.MAX_TICK_BYTES // 1024} KiB"
    is_other = ticks.copy()
    is_other[ticks] = [TickValue.parse(value.as_py()) is None for value in records.raw["tick_value"].filter(pa.array(ticks))]
    yield is_other, bad, 'the value is not {"absent_groups": [...], "job": "...", "asked_ms": number}'
    skew_ms = np.abs(records.numbers(h.TICK, ticks) - columns["at_ms"])
    yield skew_ms > most_ms, bad, lambda row: f"{h.TICK} is {skew_ms[row]} ms from the record's timestamp, at most {most_ms}"
    if config.keyring:
        yield _signature_problem(records, EventKind.TICK, config, _by_the_job(config.keyring))


def _by_the_job(keyring: Keyring) -> Callable[[str, Signable, str | None], str | None]:
    return lambda _, signable, signature: keyring.problem_of_job(signable, signature)


def _lost_problems(records: RecordColumns, config: DecoderConfig) -> Iterator[_Problem]:
    yield from _key_and_size_problems(records)
    yield ~records.matches(h.HALF_LOST, _POINTER), Reason.BAD_HEADER, h.HALF_LOST
    yield _duplicates(records, (h.HALF_LOST,))
    if config.keyring:
        yield _signature_problem(records, EventKind.LOST, config, _by_the_job(config.keyring))


_PROBLEMS = {
    EventKind.HALF: _half_problems,
    EventKind.OP: _op_problems,
    EventKind.TICK: _tick_problems,
    EventKind.LOST: _lost_problems,
}


def _key_and_size_problems(records: RecordColumns) -> Iterator[_Problem]:
    key, headers = records.key_bytes, records.headers_bytes
    yield key == 0, Reason.MISSING_KEY, "the record key is the transaction id"
    yield key > h.MAX_KEY_BYTES, Reason.KEY_TOO_LONG, lambda row: f"{key[row]} bytes, at most {h.MAX_KEY_BYTES}"
    yield mask_of(records.ids.is_null()), Reason.KEY_NOT_UTF8, "the record key is not UTF-8"
    yield headers > h.MAX_HEADERS_BYTES, Reason.HEADERS_TOO_LARGE, lambda row: f"{headers[row]} bytes, at most {h.MAX_HEADERS_BYTES}"
    # A header may have neither name nor value. librdkafka reads no headers at all if there are more than 100,000.
    count = records.headers_count
    yield count > h.MAX_HEADERS_BYTES, Reason.HEADERS_TOO_LARGE, lambda row: f"{count[row]} headers, at most {h.MAX_HEADERS_BYTES}"


def _header_problems(records: RecordColumns, headers: tuple[_Header, ...]) -> Iterator[_Problem]:
    bad = Reason.BAD_HEADER
    for header in headers:
        if header.is_required:
            yield ~records.has(header.name), Reason.MISSING_HEADER, header.name
    at_ms = records.columns["at_ms"]
    is_shown = (at_ms >= h.MIN_TIMESTAMP_MS) & (at_ms <= h.MAX_TIMESTAMP_MS)
    yield ~is_shown, bad, lambda row: f"the record's timestamp is {at_ms[row]} ms, which is not in the years 1 to 9999"
    for name, _, max_bytes, numbers, may_have_nul in headers:
        has, first = records.has(name), records.first[name]
        if numbers and has.any():
            yield has & ~records.has_number(name, numbers), bad, f"{name} is not a number from {numbers[0]} to {numbers[-1]}"
        elif has.any():
            if max_bytes:
                yield records.lengths[first] == 0, bad, f"{name} is empty or null"
                yield records.lengths[first] > max_bytes, bad, f"{name} has over {max_bytes} bytes"
            yield records.is_null[first], bad, f"{name} is null"
            yield records.is_not_utf8[first], bad, f"{name} is not UTF-8"
            if not may_have_nul:
                yield records.matches(name, "\0"), bad, f"{name} has a NUL"


def _duplicates(records: RecordColumns, names: tuple[str, ...]) -> _Problem:
    is_any = np.any([records.is_twice[name] for name in names], axis=0)
    return is_any, Reason.DUPLICATE_HEADER, lambda row: " ".join(name for name in names if records.is_twice[name][row])


def _events(records: RecordColumns) -> pa.RecordBatch:
    halves, ops, lost = (records.are(kind) for kind in (EventKind.HALF, EventKind.OP, EventKind.LOST))
    columns = {
        "event": pa.array(records.kinds),
        "source": records.raw["source"].cast(pa.int8()),
        **{name: records.raw[name] for name in ("partition", "offset", "at_ms")},
        "transaction_id": records.ids,
        "producer_group": records.texts(h.PGROUP, halves | ops),
        "topic": records.texts(h.REAL_TOPIC, halves),
        "incarnation": pa.array(records.numbers(h.INCARNATION, halves | ops).astype(np.int32)),
        "immunity_ms": pa.array(records.numbers(h.CHECK_IMMUNITY_TIME_IN_SECONDS, halves) * 1000),
        "discarded_ms": pa.array(np.zeros(len(halves), np.int64)),
        "binding": pa.array(_bindings(records.texts(h.SIGNATURE, halves)) + _bindings(records.texts(h.HALF_SIGNATURE, ops))),
        "valid_ms": pa.array(records.valid_ms * halves),
        "action": records.actions(),
        "half_pointer": records.texts(h.HALF_LOST, lost),
        "reason": pa.array(records.reasons, pa.string()),
        "detail": pa.array(records.details, pa.string()),
    }
    rows = pa.RecordBatch.from_arrays([columns[name] for name in EVENT_SCHEMA.names], schema=EVENT_SCHEMA)
    return rows.filter(pa.array(~records.are(EventKind.TICK)))


def _bindings(signatures: pa.StringArray) -> Integers:
    if signatures.null_count == len(signatures):
        return np.zeros(len(signatures), np.int64)
    return np.fromiter(map(binding_of, signatures.to_pylist()), np.int64, len(signatures))


def _ticks(records: RecordColumns, job: str) -> list[Tick]:
    ticks = records.are(EventKind.TICK)
    sources, partitions, times_ms = (records.columns[name][ticks].tolist() for name in ("source", "partition", "at_ms"))
    sizes = records.numbers(h.PARTITIONS, ticks)[ticks].tolist()
    said = [TickValue.parse(value.as_py()) or TickValue() for value in records.raw["tick_value"].filter(pa.array(ticks))]
    groups, asked_ms = [each.absent_groups for each in said], [each.asked_of(job) for each in said]
    return list(map(Tick, map(Source, sources), partitions, sizes, times_ms, groups, asked_ms))


def _read_ms(records: RecordColumns) -> dict[SourcePartition, int]:
    """Return partition → the last time that the broker gave a record there, or NO_TIME if all of them are broken."""
    is_by_broker = records.columns["timestamp_type"] == _LOG_APPEND_TIME

    def last(chosen: Mask) -> dict[SourcePartition, int]:
        read = pa.Table.from_batches([records.raw.select(["source", "partition", "at_ms"]).filter(pa.array(chosen))])
        found = read.group_by(["source", "partition"], use_threads=False).aggregate([("at_ms", "last")])
        return {(Source(row["source"]), row["partition"]): row["at_ms_last"] for row in found.to_pylist()}

    return {**dict.fromkeys(last(is_by_broker), NO_TIME), **last(is_by_broker & ~records.are(EventKind.BROKEN))}
