"""Turns outcomes and the records they point to into table rows (docs/tables.md) and check requests (docs/contract.md).

These are plain functions over Arrow. They run where the records are read, and take the headers of a half apart once, in
Python. As Spark expressions over maps this took longer than reading the records, because Spark 4.2 looks up a setting
for each entry of a map.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema

from halfway.schemas import headers as h
from halfway.schemas.bookmark import Bookmark
from halfway.schemas.events import StoredRecord
from halfway.schemas.headers import HeaderList
from halfway.schemas.outcomes import Reason
from halfway.schemas.signing import Keyring, Signable, sha256_of
from halfway.schemas.tables import DISCARDED_SCHEMA, MESSAGES_SCHEMA, QUARANTINE_SCHEMA

Records = Sequence[StoredRecord | None]
RowMaker = Callable[[pa.RecordBatch, Records], pa.RecordBatch]
"""Takes outcomes (OUTCOME_SCHEMA), and for each the record that it points to, or None if that record is gone."""

_MESSAGES = to_arrow_schema(MESSAGES_SCHEMA, timezone="UTC")
_DISCARDED = to_arrow_schema(DISCARDED_SCHEMA, timezone="UTC")
_QUARANTINE = to_arrow_schema(QUARANTINE_SCHEMA, timezone="UTC")


def messages_of(at: Bookmark) -> RowMaker:
    """Return the function that turns commits into MESSAGES_SCHEMA. It leaves out halves that are gone."""

    def rows(outcomes: pa.RecordBatch, records: Records) -> pa.RecordBatch:
        outcomes, found = _found(outcomes, records)
        decided = {"committed_at": _timestamps(outcomes["decided_ms"]), **{name: outcomes[name] for name in ("op_partition", "op_offset")}}
        return _batch(_message_columns(outcomes, found, at) | decided, _MESSAGES)

    return rows


def discarded_of(at: Bookmark) -> RowMaker:
    """Return the function that turns discards into DISCARDED_SCHEMA. It leaves out halves that are gone."""

    def rows(outcomes: pa.RecordBatch, records: Records) -> pa.RecordBatch:
        outcomes, found = _found(outcomes, records)
        decided = {"reason": outcomes["reason"], "discarded_at": _timestamps(outcomes["decided_ms"])}
        return _batch(_message_columns(outcomes, found, at) | decided, _DISCARDED)

    return rows


def quarantine_of(at: Bookmark, half_topic: str, op_topic: str) -> RowMaker:
    """Return the function that turns refused records into QUARANTINE_SCHEMA.

    A record that is gone from its topic keeps its pointer and its reason.
    """

    def rows(outcomes: pa.RecordBatch, records: Records) -> pa.RecordBatch:
        is_op = pc.equal(outcomes["source"], int(h.Source.OP))
        columns = {
            "source_topic": pc.if_else(is_op, op_topic, half_topic),
            "source_partition": outcomes["partition"],
            "source_offset": outcomes["offset"],
            "source_timestamp": _timestamps(outcomes["at_ms"]),
            "transaction_id": outcomes["transaction_id"],
            "key": pa.array([None if record is None else record.key for record in records], pa.binary()),
            "value": pa.array([None if record is None else record.value for record in records], pa.binary()),
            "headers": _header_lists([None if record is None else record.headers for record in records], _QUARANTINE.field("headers").type),
            "reason": outcomes["reason"],
            "detail": outcomes["detail"],
            **_bookmarks(at, len(records)),
        }
        return _batch(columns, _QUARANTINE)

    return rows


def check_requests(
    outcomes: pa.RecordBatch, records: Records, topic_of: Callable[[str], str], keyring: Keyring | None = None
) -> Iterator[tuple[str, bytes | None, bytes, HeaderList]]:
    """Yield topic, key, value and headers of each check: the half as it was, with number, `CHECK_ID` and signature.

    Halves that are gone are left out.

    Args:
        outcomes: OUTCOME_SCHEMA.
        records: their halves.
        topic_of: returns the topic of a producer group's checks. A signature covers it.
        keyring: signs the checks of groups that have a key.
    """
    outcomes, found = _found(outcomes, records)
    pointers = (outcomes[name].to_pylist() for name in ("transaction_id", "producer_group", "partition", "offset", "check_times"))
    for record, (transaction_id, group, partition, offset, check_times) in zip(found, zip(*pointers, strict=True), strict=True):
        topic = topic_of(group)
        own: HeaderList = [(name, value) for name, value in record.headers or () if name not in h.CHECK_HEADERS]
        own.append((h.TRANSACTION_CHECK_TIMES, str(check_times).encode()))
        own.append((h.CHECK_ID, h.check_id(transaction_id, partition, offset, check_times).encode()))
        if keyring and keyring.has(group):
            signable = Signable(topic, record.key, sha256_of(record.value), own, signature_header=h.CHECK_SIGNATURE)
            own.append((h.CHECK_SIGNATURE, (keyring.sign(group, signable) or "").encode()))
        yield topic, record.key, record.value or b"", own


def lost(outcomes: pa.RecordBatch, records: Records) -> pa.RecordBatch:
    """Return the outcomes whose records are gone (OUTCOME_SCHEMA)."""
    return outcomes.filter(pa.array([record is None for record in records], pa.bool_()))


HALF_IS_GONE = "the half is no longer in the half topic at this offset"
"""The `detail` of a half that could not be read when it was needed (R17)."""


def to_half_lost(outcomes: DataFrame, at: Bookmark, half_topic: str) -> DataFrame:
    """Return QUARANTINE_SCHEMA for halves that could not be read when they were needed (R17)."""
    nothing = F.lit(None)
    return outcomes.select(
        F.lit(half_topic).alias("source_topic"),
        F.col("partition").alias("source_partition"),
        F.col("offset").alias("source_offset"),
        F.timestamp_millis("at_ms").alias("source_timestamp"),
        "transaction_id",
        nothing.cast("binary").alias("key"),
        nothing.cast("binary").alias("value"),
        nothing.cast(QUARANTINE_SCHEMA["headers"].dataType).alias("headers"),
        F.lit(str(Reason.HALF_LOST)).alias("reason"),
        F.lit(HALF_IS_GONE).alias("detail"),
        F.lit(at.epoch).alias("epoch"),
        F.lit(at.batch_id).cast("bigint").alias("batch_id"),
    ).to(QUARANTINE_SCHEMA)


def _found(outcomes: pa.RecordBatch, records: Records) -> tuple[pa.RecordBatch, list[StoredRecord]]:
    found = [record for record in records if record is not None]
    if len(found) == len(records):
        return outcomes, found
    return outcomes.filter(pa.array([record is not None for record in records], pa.bool_())), found


def _message_columns(outcomes: pa.RecordBatch, records: Sequence[StoredRecord], at: Bookmark) -> dict[str, pa.Array]:
    queue_ids, tags, keys, born_ms = [], [], [], []
    offsets: list[int] = [0]
    names: list[str] = []
    values: list[bytes | None] = []
    for record, at_ms in zip(records, outcomes["at_ms"].to_pylist(), strict=True):
        # A dict keeps the last of two user properties with one name, as docs/contract.md says.
        headers = dict(record.headers or ())
        queue_ids.append(int(headers.pop(h.REAL_QID, None) or 0))
        tags.append(headers.pop(h.TAGS, None))
        keys.append(headers.pop(h.KEYS, None))
        born_ms.append(int(headers.pop(h.BORN_TIMESTAMP, None) or at_ms))
        for name in _NOT_SHOWN:
            headers.pop(name, None)
        names.extend(headers.keys())
        values.extend(headers.values())
        offsets.append(len(names))
    properties = pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(names, pa.string()), pa.array(values, pa.string()))
    return {
        "transaction_id": outcomes["transaction_id"],
        "topic": outcomes["topic"],
        "queue_id": pa.array(queue_ids, pa.int32()),
        "tags": pa.array(tags, pa.string()),
        "keys": pa.array(keys, pa.string()),
        "body": pa.array([record.value or b"" for record in records], pa.binary()),
        "properties": properties,
        "producer_group": outcomes["producer_group"],
        "born_at": _timestamps(pa.array(born_ms, pa.int64())),
        "half_at": _timestamps(outcomes["at_ms"]),
        "check_times": outcomes["check_times"],
        "incarnation": outcomes["incarnation"],
        "half_partition": outcomes["partition"],
        "half_offset": outcomes["offset"],
        **_bookmarks(at, len(records)),
    }


_NOT_SHOWN = tuple(set(h.HALF_HEADERS) - {h.REAL_QID, h.TAGS, h.KEYS, h.BORN_TIMESTAMP})


def _header_lists(lists: Iterable[HeaderList | None], kind: pa.ListType) -> pa.Array:
    offsets: list[int | None] = []
    names: list[str] = []
    values: list[bytes | None] = []
    for headers in lists:
        offsets.append(None if headers is None else len(names))
        for name, value in headers or ():
            names.append(name)
            values.append(value)
    pair = pa.StructArray.from_arrays([pa.array(names, pa.string()), pa.array(values, pa.binary())], fields=list(kind.value_type))
    return pa.ListArray.from_arrays(pa.array([*offsets, len(names)], pa.int32()), pair).cast(kind)


def _timestamps(ms: pa.Array) -> pa.Array:
    return pc.multiply(ms.cast(pa.int64()), 1000).cast(pa.timestamp("us", "UTC"))


def _bookmarks(at: Bookmark, rows: int) -> dict[str, pa.Array]:
    return {"epoch": pa.repeat(pa.scalar(at.epoch, pa.int32()), rows), "batch_id": pa.repeat(pa.scalar(at.batch_id, pa.int64()), rows)}


def _batch(columns: dict[str, Any], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [
        columns[name] if columns[name].type == kind else columns[name].cast(kind)
        for name, kind in zip(schema.names, schema.types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
