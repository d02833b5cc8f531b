"""The state of one bucket as Spark keeps it: one row, `format_version INT, payload BINARY` (design §1.2).

The payload is one Arrow IPC stream: the entries as columns, and what concerns the whole bucket (clock, counts) as JSON in
the schema's metadata, so that an idle batch rewrites it without looking at an entry. Never pickle: tools read it too.
"""

import json
from typing import Any

import pyarrow as pa
from pyspark.sql.types import BinaryType, IntegerType, StructField, StructType

from halfway.schemas.errors import StateFormatError

FORMAT_VERSION = 1

STATE_SCHEMA = StructType([StructField("format_version", IntegerType(), False), StructField("payload", BinaryType(), False)])

NAME_TYPE = pa.dictionary(pa.int32(), pa.string())
ENTRY_SCHEMA = pa.schema(
    [
        pa.field("transaction_id", pa.string(), nullable=False),
        pa.field("entry", pa.int8(), nullable=False),
        pa.field("producer_group", NAME_TYPE, nullable=False),
        pa.field("topic", NAME_TYPE, nullable=False),
        pa.field("incarnation", pa.int32(), nullable=False),
        pa.field("start_ms", pa.int64(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("check_times", pa.int32(), nullable=False),
        pa.field("due_ms", pa.int64(), nullable=False),
    ]
)
"""`entry` is a `Phase`, or WAITING_COMMIT or WAITING_ROLLBACK for a verdict that waits for its half; `due_ms` is the first
horizon at which something is to be done about the entry."""

WAITING_COMMIT = 100
WAITING_ROLLBACK = 101

_METADATA_KEY = b"halfway"
_WRITING = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
_READING = pa.ipc.IpcReadOptions(use_threads=False)
"""50 bytes an entry instead of 81, since all of it goes from Python to the JVM, to disk, and back, in every batch. zstd takes 25,
but 1.2 ms more a bucket and batch however little there is; and threads cost more to hand work to than there is work."""


def encode_payload(table: pa.Table, metadata: dict[str, Any]) -> bytes:
    """Write a bucket's entries (columns of ENTRY_SCHEMA) and its metadata as one payload."""
    schema = ENTRY_SCHEMA.with_metadata({_METADATA_KEY: json.dumps(metadata, sort_keys=True).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=_WRITING) as writer:
        writer.write_table(table.replace_schema_metadata(schema.metadata).cast(schema))
    return bytes(sink.getvalue())


def decode_payload(format_version: int, payload: bytes) -> tuple[pa.Table, dict[str, Any]]:
    """Read a payload back: the entries, without a copy, and the metadata.

    Raises:
        StateFormatError: for a version that this code does not know, or bytes that are no payload.
    """
    if format_version != FORMAT_VERSION:
        raise StateFormatError(
            f"the checkpoint's state has format {format_version}, and this version of Halfway reads {FORMAT_VERSION}: "
            "run the version that wrote it"
        )
    try:
        with pa.ipc.open_stream(payload, options=_READING) as reader:
            table = reader.read_all()
        return table, json.loads(table.schema.metadata[_METADATA_KEY])
    except (pa.ArrowInvalid, KeyError, TypeError, ValueError) as error:
        raise StateFormatError(f"a state row of the checkpoint is damaged: {type(error).__name__}") from error
