"""Kafka records as columns: what kind each record is, and its first header of each name of the contract."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from halfway.schemas import headers as h
from halfway.schemas.events import EventKind
from halfway.schemas.headers import Source
from halfway.schemas.signing import Signable

Mask = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]

_NAMES = (*dict.fromkeys((*h.HALF_HEADERS, *h.OP_HEADERS)), *h.DELAY_HEADERS, h.TICK, h.PARTITIONS, h.HALF_LOST)
# 1 to 19 digits. The first of 19 is 0, because a greater number is out of every range, and may need more than 64 bits.
# Not `$`, which also matches before a line end.
_NUMBER = r"^-?0?[0-9]{1,18}\z"

_INTEGERS = ("source", "partition", "offset", "at_ms", "timestamp_type", "value_bytes")


class RecordColumns:
    """A batch of records as masks, numbers and texts, with one value for each record.

    Attributes:
        raw: the records (RECORD_SCHEMA).
        columns: their columns of whole numbers, by name.
        kinds: the `EventKind` of each record. Whoever finds a record broken changes it.
        reasons: why each broken record is refused.
        details: what is wrong with each broken record.
        ids: the transaction ids; null for a key that is null, too long or not UTF-8.
        key_bytes: the lengths of the keys; 0 for a key that is null.
        headers_bytes: the lengths of names and values of all headers together.
        headers_count: how many headers there are.
        has_not_utf8: True where a header's name or value is not UTF-8.
        has_nul: True where a name that is not the contract's has a NUL.
        is_twice: by name, True where that header occurs more than once.
        valid_ms: until when the signature of a verified half is valid; 0 for other records.
        first: by name, the place of its first header in `lengths`, `is_null` and `is_not_utf8`, which describe the
            values of the headers of all records.
    """

    def __init__(self, records: pa.RecordBatch) -> None:
        """Look all headers up, and sort the records by their kinds."""
        self.raw = records
        self.key_bytes = _lengths_of(records["key"])
        # A key may have megabytes, and an id travels to the operator and to the driver.
        self.ids = _texts_of(pc.if_else(self.key_bytes <= h.MAX_KEY_BYTES, records["key"], None))
        self.columns = {name: _integers_of(records[name]) for name in _INTEGERS}
        self.reasons, self.details = np.full((2, len(records)), None, object)
        self.valid_ms: Integers = np.zeros(len(records), np.int64)

        names, values = records["headers"].flatten().flatten()
        parents = np.repeat(np.arange(len(records)), _integers_of(pc.list_value_length(records["headers"])))
        self.headers_bytes = np.bincount(parents, _lengths_of(names) + _lengths_of(values), len(records)).astype(np.int64)
        self.headers_count = np.bincount(parents, minlength=len(records))
        self._texts = _texts_of(values)
        # One entry more, for a header that a record does not have.
        self.lengths = np.append(_lengths_of(values), 0)
        self.is_null = np.append(mask_of(values.is_null()), False)
        self.is_not_utf8 = np.append(mask_of(self._texts.is_null()), False) & ~self.is_null

        codes = _integers_of(pc.index_in(names, pa.array(_NAMES)), null=-1)
        own, others = np.flatnonzero(codes >= 0), np.flatnonzero(codes < 0)
        cells = codes[own] * len(records) + parents[own]
        first = np.full(len(_NAMES) * len(records), len(values))
        np.minimum.at(first, cells, own)
        is_twice = np.zeros(len(first), bool)
        is_twice[cells[first[cells] < own]] = True
        self.first = dict(zip(_NAMES, first.reshape(len(_NAMES), -1), strict=True))
        self.is_twice = dict(zip(_NAMES, is_twice.reshape(len(_NAMES), -1), strict=True))

        other_names = names.take(pa.array(others))
        # Spark has replaced what is not UTF-8 in a name.
        misnamed = others[mask_of(pc.match_substring(other_names, "\N{REPLACEMENT CHARACTER}"))]
        self.has_not_utf8, self.has_nul = np.zeros((2, len(records)), bool)
        self.has_not_utf8[parents[np.append(np.flatnonzero(self.is_not_utf8), misnamed)]] = True
        self.has_nul[parents[others[mask_of(pc.match_substring(other_names, "\0"))]]] = True

        is_lost = self.has(h.HALF_LOST) & ~self.has(h.REAL_TOPIC)
        conditions = {EventKind.TICK: self.has(h.TICK), EventKind.OP: self.columns["source"] == Source.OP, EventKind.LOST: is_lost}
        self.kinds: npt.NDArray[np.int8] = np.select([*conditions.values()], [*conditions], EventKind.HALF).astype(np.int8)

    def are(self, kind: EventKind) -> Mask:
        """Return which records are of this kind."""
        return np.equal(self.kinds, kind, dtype=np.bool_)

    def has(self, name: str) -> Mask:
        """Return which records have this header."""
        return self.first[name] < len(self._texts)

    def texts(self, name: str, of: Mask) -> pa.StringArray:
        """Return a header's values of the records `of`; null for what is missing, null, or not UTF-8."""
        return self._texts.take(pa.array(self.first[name], mask=~(of & self.has(name))))

    def matches(self, name: str, pattern: str) -> Mask:
        """Return which records have this header with a value that matches."""
        return mask_of(pc.match_substring_regex(self.texts(name, self.has(name)), pattern).fill_null(False))

    def numbers(self, name: str, of: Mask) -> Integers:
        """Return a header's values of the records `of`, all of which are numbers or missing; 0 for what is missing."""
        return _integers_of(self.texts(name, of).cast(pa.int64()))

    def has_number(self, name: str, numbers: range) -> Mask:
        """Return which records have this header with one of these numbers as its value."""
        is_number = self.matches(name, _NUMBER)
        value = self.numbers(name, is_number)
        return is_number & (value >= numbers.start) & (value < numbers.stop)

    def actions(self) -> pa.StringArray:
        """Return what the ops say; null for what the contract does not know."""
        codes = pc.index_in(self.texts(h.ACTION, self.are(EventKind.OP)), pa.array(list(h.ACTIONS)))
        return pa.array([str(action) for action in h.ACTIONS.values()]).take(codes)

    def signables(self, of: Mask, topics: Mapping[Source, str]) -> list[Signable]:
        """Return what the signatures of the records `of` must cover. Only a tick's signature covers its partition."""
        chosen = self.raw.filter(pa.array(of))
        names, values = chosen["headers"].flatten().flatten()
        headers = list(zip(names.to_pylist(), values.to_pylist(), strict=True))
        ends = np.cumsum(_integers_of(pc.list_value_length(chosen["headers"]))).tolist()
        columns = (chosen[name].to_pylist() for name in ("source", "partition", "key", "value_sha256"))
        are_ticks = self.are(EventKind.TICK)[of].tolist()
        return [
            Signable(topics[Source(source)], key, digest or b"", headers[begin:end], partition if is_tick else None)
            for source, partition, key, digest, is_tick, begin, end in zip(*columns, are_ticks, [0, *ends][:-1], ends, strict=True)
        ]


def is_before(ends: Mapping[int, int] | None, partitions: Integers, offsets: Integers) -> Mask:
    """Return which places are before the ends that a topic's partitions had. One without an end was not there."""
    if not ends:
        return np.zeros(len(offsets), bool)
    return offsets < np.fromiter((ends.get(partition, 0) for partition in partitions.tolist()), np.int64)


def mask_of(values: pa.BooleanArray) -> Mask:
    """Return values without nulls as a mask."""
    mask: Mask = values.to_numpy(zero_copy_only=False)
    return mask


def _texts_of(values: pa.BinaryArray) -> pa.StringArray:
    """Return values as text; null for what is not UTF-8."""
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        texts = [None if value is None else value.decode(errors="ignore") for value in values.to_pylist()]
        # What was ignored is missing now.
        return pc.if_else(pc.equal(pc.binary_length(pa.array(texts, pa.string())), pc.binary_length(values)), texts, None)


def _lengths_of(values: pa.Array) -> Integers:
    return _integers_of(pc.binary_length(values))


def _integers_of(values: pa.Array, null: int = 0) -> Integers:
    numbers: Integers = values.fill_null(null).to_numpy().astype(np.int64)
    return numbers
