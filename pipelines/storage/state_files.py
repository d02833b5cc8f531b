"""Reads the files of Spark's HDFS-backed state store on a local disk, without Spark, whose start takes many seconds.

A batch writes `<version>.delta` for each of the store's partitions: the rows that it changed. Now and then Spark writes
`<version>.snapshot`, all rows. Both are LZ4 blocks of rows: a key and a value, each after its length, in Spark's
UnsafeRow format. Spark renames a file to its name once it is whole, and writes none twice.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

_KNOWN_FORMAT = {
    "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider",
    "spark.sql.streaming.stateStore.compression.codec": "lz4",
    "spark.sql.streaming.stateStore.encodingFormat": "unsaferow",
    "spark.sql.streaming.stateStore.rowChecksum.enabled": "false",
    "spark.sql.streaming.flatMapGroupsWithState.stateFormatVersion": "2",
}
_OPERATOR = "state/0"
_BLOCK = struct.Struct("<8sBiiI")
"""Magic, method, length as stored, length, checksum: lz4-java's `LZ4BlockOutputStream`."""
_MAGIC = b"LZ4Block"
_METHOD, _STORED, _LZ4 = 0xF0, 0x10, 0x20
_LENGTH = struct.Struct(">i")
_END, _REMOVED = -1, -1
_WORD = struct.Struct("<q")
_NUMBER = struct.Struct("<i")
_NULLS = 8
"""The bytes of the null flags, with which each UnsafeRow of up to 64 fields begins."""


def conf_of(offsets: str) -> dict[str, str]:
    """Return the configuration of a batch from its file in Spark's offset log, where it is in the second line."""
    conf: dict[str, str] = json.loads(offsets.splitlines()[1]).get("conf", {})
    return conf


def is_known_format(offsets: str) -> bool:
    """Return True if a batch, by its file in Spark's offset log, wrote its state in the format that is read here."""
    conf = conf_of(offsets)
    return all(conf.get(name) == value for name, value in _KNOWN_FORMAT.items())


def stored_rows(checkpoint: Path, batch_id: int, buckets: int) -> list[tuple[int, bytes]]:
    """Return the state after a batch: one row a bucket, format version and payload (`STATE_SCHEMA`).

    Reads back from the newest files until it has every bucket, or has come to a snapshot.

    Args:
        checkpoint: the job's.
        batch_id: a committed batch.
        buckets: how many the checkpoint has.

    Raises:
        FileNotFoundError: Spark has removed the state of this batch.
        ValueError: a file is damaged.
    """
    partitions = [folder for folder in (checkpoint / _OPERATOR).iterdir() if folder.name.isdecimal()]
    found: dict[bytes, bytes | None] = {}
    for version in range(batch_id + 1, 0, -1):
        for folder in list(partitions):
            snapshot = folder / f"{version}.snapshot"
            is_whole = snapshot.exists()
            data = (snapshot if is_whole else folder / f"{version}.delta").read_bytes()
            for key, value in _rows(_decompressed(data)):
                found.setdefault(key, value)
            if is_whole:
                partitions.remove(folder)
        if len(found) >= buckets:
            break
    return [_group_state(value) for value in found.values() if value is not None]


def _decompressed(data: bytes) -> bytes:
    """Return what the blocks of a file hold."""
    codec, parts, at = pa.Codec("lz4_raw"), [], 0
    while at < len(data):
        try:
            magic, method, stored, length, _ = _BLOCK.unpack_from(data, at)
        except struct.error as error:
            raise ValueError("a state file is cut off") from error
        at += _BLOCK.size
        block = data[at : at + stored]
        if magic != _MAGIC or len(block) != stored or method & _METHOD not in (_STORED, _LZ4):
            raise ValueError("a state file is damaged")
        if length:
            parts.append(block if method & _METHOD == _STORED else codec.decompress(block, length, asbytes=True))
        at += stored
    return b"".join(parts)


def _rows(data: bytes) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield keys and values. The value of a row that was removed is None."""
    at = 0

    def length() -> int:
        nonlocal at
        try:
            (number,) = _LENGTH.unpack_from(data, at)
        except struct.error as error:
            raise ValueError("a state file is cut off") from error
        at += _LENGTH.size
        return int(number)

    while (size := length()) != _END:
        key = data[at : at + size]
        at += size
        size = length()
        if size == _REMOVED:
            yield key, None
            continue
        yield key, data[at : at + size]
        at += size


def _group_state(value: bytes) -> tuple[int, bytes]:
    """Return format version and payload of a value: the UnsafeRow `(groupState (format_version, payload))`."""
    try:
        row = _bytes_at(value, 0)
        return _NUMBER.unpack_from(row, _NULLS)[0], _bytes_at(row, 1)
    except struct.error as error:
        raise ValueError("a state row is cut off") from error


def _bytes_at(row: bytes, field: int) -> bytes:
    """Return a field of variable length of an UnsafeRow. Its word holds where the field begins, and its length."""
    (word,) = _WORD.unpack_from(row, _NULLS + field * _WORD.size)
    start, length = word >> 32, word & 0xFFFF_FFFF
    return row[start : start + length]
