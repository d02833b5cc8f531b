"""What `halfway optimize` deletes of a table's log on a local disk."""

import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from halfway.conf.loader import load_settings
from halfway.pipelines.storage import compaction
from halfway.schemas.tables import Table

KEPT_S = 6 * 3600


@pytest.mark.parametrize(("left", "deleted"), [(1.0, 12), (0.5, 0), (0.0, 0)])
def test_commits_are_deleted_before_a_checkpoint_that_can_be_read(
    left: float, deleted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may have torn the newest one, and what says which it is."""
    nothing: Any = None
    folder, log = tmp_path / Table.DISCARDED, tmp_path / Table.DISCARDED / "_delta_log"
    for number in range(13):
        write_deltalake(str(folder), pa.table({"id": [number]}), mode="append")
    DeltaTable(str(folder)).create_checkpoint()
    write_deltalake(str(folder), pa.table({"id": [13]}), mode="append")
    [checkpoint] = log.glob("*.checkpoint.parquet")
    whole = checkpoint.read_bytes()
    if left < 1:
        checkpoint.write_bytes(whole[: int(len(whole) * left)])
        (log / "_last_checkpoint").unlink()
    for file in log.iterdir():
        os.utime(file, (time.time() - KEPT_S - 60,) * 2)
    monkeypatch.setattr(compaction, "local_warehouse", lambda *_: tmp_path)
    monkeypatch.setattr(compaction, "property_ms", lambda *_: KEPT_S * 1000)
    storage = load_settings(environ={}, overrides={"storage.warehouse": str(tmp_path)}).storage
    assert compaction._clean_log(nothing, storage, Table.DISCARDED) == deleted
    if left < 1:
        checkpoint.unlink()  # as its owner would, who finds it torn
    assert DeltaTable(str(folder)).to_pyarrow_table().num_rows == 14
