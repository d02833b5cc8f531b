"""Benchmark `reader`: what reading on from a bookmark costs as a table grows, and how many messages a reader reads."""

import json
import statistics
import uuid
from pathlib import Path

import pyarrow as pa
from deltalake import write_deltalake
from pyspark.sql.pandas.types import to_arrow_schema

from benchmarks.rig import Figures, Rig, timed
from halfway import Bookmark, MessageReader
from halfway.schemas.tables import MESSAGES_SCHEMA, SEARCHED_COLUMNS, Table

ROWS = 20
BATCHES = 5
LARGE_FILES = 200
LARGE_ROWS = 250_000
"""200 compacted files of 250,000 messages: 50 million."""
SMALL_FILES = 3_600
"""An hour of a batch a second that nobody has compacted."""
MEASURED = 20
_LAST = 10**6


def reader(rig: Rig) -> Figures:
    """Measure how long reading the last batch takes, from a bookmark, in tables of 120 messages and of 50 million.

    The files before the bookmark are in the log with their statistics, and do not exist: a reader that opened one would
    fail.
    """
    figures: Figures = {}
    for name, files, rows in (("small", 0, 0), ("large", LARGE_FILES, LARGE_ROWS), ("uncompacted", SMALL_FILES, ROWS)):
        folder = rig.folder / name
        _append(folder, 0)
        if files:
            _add(folder, files, rows)
        for number in range(BATCHES):
            _append(folder, _LAST + number)
        bookmark = Bookmark(0, _LAST + BATCHES - 2)
        tables = MessageReader(str(folder))
        figures[f"{name}_rows"] = ROWS * (BATCHES + 1) + files * rows
        figures[f"{name}_ms"] = round(1000 * statistics.median(timed(lambda: _read(tables, bookmark)) for _ in range(MEASURED)), 1)  # noqa: B023
    figures["large_to_small"] = round(figures["large_ms"] / figures["small_ms"], 2)
    folder = rig.folder / "scan"
    rows = max(ROWS, int(100_000 * rig.scale))
    write_deltalake(str(folder), _rows(0, rows), configuration=_STATISTICS)
    scanned_s = timed(lambda: _scan(folder, rows))
    return {**figures, "messages_per_s": round(rows / scanned_s)}


_STATISTICS = {"delta.dataSkippingStatsColumns": ",".join(SEARCHED_COLUMNS[Table.MESSAGES])}


def _read(tables: MessageReader, bookmark: Bookmark) -> None:
    [batch] = tables.read(bookmark)
    assert len(batch.messages) == ROWS


def _scan(folder: Path, rows: int) -> None:
    assert sum(len(batch.messages) for batch in MessageReader(str(folder)).read()) == rows


def _append(folder: Path, batch_id: int) -> None:
    write_deltalake(str(folder), _rows(batch_id, ROWS), mode="append", configuration=_STATISTICS)


def _rows(batch_id: int, rows: int) -> pa.Table:
    """Return a batch of messages of 1 KiB."""
    same = {"topic": "orders", "producer_group": "bench", "body": bytes(1024), "epoch": 0, "op_partition": 0, "properties": []}
    schema = to_arrow_schema(MESSAGES_SCHEMA, timezone="UTC")
    made = [{**same, "transaction_id": uuid.uuid4().hex, "op_offset": number, "batch_id": batch_id} for number in range(rows)]
    return pa.Table.from_pylist(made, schema=schema)


def _add(folder: Path, files: int, rows: int) -> None:
    """Write a commit that adds files before the bookmark."""
    adds = []
    for number in range(files):
        low, high = {"epoch": 0, "batch_id": 1 + 10 * number}, {"epoch": 0, "batch_id": 10 * number + 10}
        counted = {"numRecords": rows, "minValues": low, "maxValues": high, "nullCount": {"epoch": 0, "batch_id": 0}}
        file = {"path": f"{uuid.uuid4()}.parquet", "partitionValues": {}, "size": 2**28, "modificationTime": 0, "dataChange": True}
        adds.append({"add": {**file, "stats": json.dumps(counted)}})
    commit = folder / "_delta_log" / f"{1:020}.json"
    commit.write_text("\n".join(json.dumps(action) for action in [{"commitInfo": {"operation": "OPTIMIZE"}}, *adds]))
