"""The state of one bucket as Spark stores it: one row, `format_version INT, payload BINARY` (decision 2).

The payload is an Arrow IPC stream. The entries are its columns. Clock and counts of the bucket are JSON in the metadata
of its schema, so that an idle batch rewrites them without reading an entry. It is never pickle: tools read it too.
"""

import json
from typing import Any

import pyarrow as pa
from pyspark.sql.types import BinaryType, IntegerType, StructField, StructType

from halfway.schemas.errors import StateFormatError

FORMAT_VERSION = 7

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
        pa.field("binding", pa.int64(), nullable=False),
        pa.field("check_times", pa.int32(), nullable=False),
        pa.field("due_ms", pa.int64(), nullable=False),
        pa.field("checked_ms", pa.int64(), nullable=False),
        pa.field("late_put_offs", pa.int32(), nullable=False),
        pa.field("put_off_ms", pa.int64(), nullable=False),
    ]
)
"""`entry` is a `Phase`; WAITING_COMMIT or WAITING_ROLLBACK stand for a verdict that waits for its half.

`binding` ties signed halves and their ops together. `due_ms` is the first time at which something is due for the entry:
a horizon if it is pending, or else a read mark. `checked_ms` is the horizon of the last check, -1 before the first; R8
also has to know `late_put_offs`, and `put_off_ms`, the horizon of the last of these, -1 before the first.
"""

WAITING_COMMIT = 100
WAITING_ROLLBACK = 101

_METADATA_KEY = b"halfway"
# Each batch moves the whole payload from Python to the JVM, to disk and back. When lz4 was chosen, it took 50 bytes an
# entry instead of 81, and zstd 25, but 1.2 ms more for each bucket and batch, however small. Handing the work to
# threads takes longer than the work.
_WRITING = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
_READING = pa.ipc.IpcReadOptions(use_threads=False)


def other_format(checkpoint: str, format_version: object) -> str:
    """Return the message for a checkpoint of another format. It says what to do."""
    return (
        f"{checkpoint} has the state's format {format_version}, and this version of Halfway has {FORMAT_VERSION}: go on with the version "
        "that wrote it, or start a new checkpoint (another storage.checkpoint) with `halfway resolve --adopt`"
    )


def encode_payload(table: pa.Table, metadata: dict[str, Any]) -> bytes:
    """Encode a bucket's entries (ENTRY_SCHEMA) and its metadata as one payload."""
    schema = ENTRY_SCHEMA.with_metadata({_METADATA_KEY: json.dumps(metadata, sort_keys=True).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=_WRITING) as writer:
        writer.write_table(table.replace_schema_metadata(schema.metadata).cast(schema))
    return bytes(sink.getvalue())


def decode_payload(format_version: int, payload: bytes) -> tuple[pa.Table, dict[str, Any]]:
    """Decode a payload to the entries (ENTRY_SCHEMA), without copying them, and the metadata.

    Raises:
        StateFormatError: this version of Halfway does not know the format version, or the payload is damaged.
    """
    if format_version != FORMAT_VERSION:
        raise StateFormatError(other_format("the checkpoint", format_version))
    try:
        with pa.ipc.open_stream(payload, options=_READING) as reader:
            table = reader.read_all()
        metadata = json.loads(table.schema.metadata[_METADATA_KEY])
    except (pa.ArrowInvalid, KeyError, TypeError, ValueError) as error:
        remedy = "set storage.checkpoint to a new folder and start once with `halfway resolve --adopt`"
        raise StateFormatError(f"a state row of the checkpoint is damaged ({type(error).__name__}): {remedy}") from error
    if not table.schema.equals(ENTRY_SCHEMA):
        raise StateFormatError(other_format("the checkpoint", f"{format_version} with other fields"))
    return table, metadata
