"""The rows between Kafka and the sinks: events into the operator, outcomes out of it, without bodies (decision 3)."""

from enum import IntEnum
from typing import NamedTuple

import pyarrow as pa

from halfway.schemas.headers import HEADER_OBJECTS_BYTES, HeaderList


class EventKind(IntEnum):
    """The kind of a record."""

    HALF = 1
    OP = 2
    LOST = 3
    TICK = 4
    BROKEN = 5
    COUNTED = 6
    """A record that the job only counts, because a former checkpoint has dealt with it (decision 6)."""


RECORD_SCHEMA = pa.schema(
    [
        pa.field("source", pa.int32()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("at_ms", pa.int64()),
        pa.field("timestamp_type", pa.int32()),
        pa.field("key", pa.binary()),
        pa.field("headers", pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))),
        pa.field("value_bytes", pa.int32()),
        pa.field("tick_value", pa.binary()),
        pa.field("value_sha256", pa.binary()),
    ]
)
"""A Kafka record of the half or op topic, without its body.

`timestamp_type` is Kafka's: 0 for CreateTime, 1 for LogAppendTime. `value_bytes` is 0 for a null value. `tick_value` is
the value of a record that may be a tick: without a key, and of at most `MAX_TICK_BYTES`. `value_sha256` is null unless
signatures are verified; a null value counts as empty.
"""

EVENT_SCHEMA = pa.schema(
    [
        pa.field("event", pa.int8(), nullable=False),
        pa.field("source", pa.int8(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("at_ms", pa.int64(), nullable=False),
        pa.field("transaction_id", pa.string()),
        pa.field("producer_group", pa.string()),
        pa.field("topic", pa.string()),
        pa.field("incarnation", pa.int32(), nullable=False),
        pa.field("immunity_ms", pa.int64(), nullable=False),
        pa.field("discarded_ms", pa.int64(), nullable=False),
        pa.field("binding", pa.int64(), nullable=False),
        pa.field("valid_ms", pa.int64(), nullable=False),
        pa.field("action", pa.string()),
        pa.field("half_pointer", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("detail", pa.string()),
    ]
)
"""One row for each record but the ticks, whose times travel beside the events.

`binding` ties an op to its half, and `valid_ms` is until when a half's signature is valid (`schemas/signing.py`).
`reason` is why a record is broken, or a `Count` for one that is only counted.
"""

FORMER_SCHEMA = pa.schema(
    [
        pa.field("source", pa.int32()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("at_ms", pa.int64()),
        pa.field("discarded_ms", pa.int64()),
    ]
)
"""A record that the tables hold: a half in `discarded`, or any record in `quarantine`, whose `discarded_ms` is 0."""

OUTCOME_SCHEMA = pa.schema(
    [
        pa.field("kind", pa.int32()),
        pa.field("transaction_id", pa.string()),
        pa.field("source", pa.int32()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("at_ms", pa.int64()),
        pa.field("decided_ms", pa.int64()),
        pa.field("producer_group", pa.string()),
        pa.field("topic", pa.string()),
        pa.field("incarnation", pa.int32()),
        pa.field("check_times", pa.int32()),
        pa.field("reason", pa.string()),
        pa.field("detail", pa.string()),
        pa.field("op_partition", pa.int32()),
        pa.field("op_offset", pa.int64()),
    ]
)
"""The columns of `halfway.transforms.protocol.Outcome`, in its order."""

PACKED_EVENTS_SCHEMA = pa.schema([pa.field("bucket", pa.int32()), pa.field("events", pa.binary()), pa.field("times", pa.binary())])
"""A bucket's share of a task's records.

`events` is a pack of EVENT_SCHEMA. `times` is JSON: what the task's records say of time. Either may be empty.
"""

PACKED_OUTCOMES_SCHEMA = pa.schema(
    [
        pa.field("kind", pa.int32()),
        pa.field("slot", pa.int32()),
        pa.field("may_be_held", pa.bool_()),
        pa.field("rows", pa.int32()),
        pa.field("outcomes", pa.binary()),
    ]
)
"""Outcomes of a bucket that are of one kind, and whose records one task reads back.

`slot` is that task, or `UNDIVIDED`. `may_be_held` is true for halves that adopted tables may hold. `outcomes` is a pack
of OUTCOME_SCHEMA with so many `rows`; for the kind REPORT, it is the bucket's report as JSON.
"""


class StoredRecord(NamedTuple):
    """The record that Kafka holds at an offset.

    `headers` is None if the name of a header is not UTF-8, because the client cannot return such headers.
    """

    key: bytes | None
    value: bytes | None
    headers: HeaderList | None

    def size(self) -> int:
        """Return about how much memory it takes. Python's objects for a header take more than the header itself."""
        headers = sum([HEADER_OBJECTS_BYTES + len(name) + len(value or b"") for name, value in self.headers or ()])
        return len(self.key or b"") + len(self.value or b"") + headers
