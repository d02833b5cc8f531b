"""The state of a checkpoint on the local disk, without Spark: files that Spark wrote, and files that are damaged."""

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from halfway.pipelines.storage.locks import job_lock
from halfway.pipelines.storage.manifest import MANIFEST_FILE
from halfway.pipelines.storage.state_files import is_known_format, stored_rows
from halfway.pipelines.storage.state_reader import read_state
from halfway.schemas.errors import HalfwayError
from halfway.schemas.settings import StorageSettings
from halfway.schemas.state_format import FORMAT_VERSION
from halfway.transforms.views.pending import view_pending
from tests.support.older_formats import DATA

LAST, BUCKETS = 18, 4
"""Of the kept checkpoint of a job that ran for more than a minute, so that Spark wrote snapshots."""


@pytest.fixture
def kept(tmp_path: Path) -> Callable[[str], Path]:
    """`kept("snapshots")`: a checkpoint that Spark wrote."""

    def make(name: str) -> Path:
        with tarfile.open(DATA / f"{name}.tar.gz") as file:
            file.extractall(tmp_path, filter="data")
        return tmp_path / "checkpoint"

    return make


@pytest.fixture
def checkpoint(kept: Callable[[str], Path]) -> Path:
    return kept("snapshots")


def no_spark() -> SparkSession:
    raise AssertionError("Spark was asked for")


def test_a_local_checkpoint_is_read_without_spark(kept: Callable[[str], Path]) -> None:
    storage = StorageSettings(checkpoint=str(kept(f"format-{FORMAT_VERSION}")))
    stored = read_state(no_spark, storage)
    view = view_pending(stored.rows)
    assert (stored.batch_id, len(stored.rows)) == (11, 4)
    assert view.transactions["transaction_id"].to_pylist() == ["pending", "checked"]
    assert view.horizon_ms == 1_700_000_041_015
    assert stored.last_batch is not None
    assert stored.last_batch.horizon_ms == view.horizon_ms
    before = view_pending(read_state(no_spark, storage, batches_ago=9).rows)
    assert before.transactions["transaction_id"].to_pylist() == ["discarded", "pending"]


def test_a_snapshot_holds_what_the_deltas_before_it_wrote(checkpoint: Path) -> None:
    from_snapshot = stored_rows(checkpoint, LAST, BUCKETS)
    for snapshot in checkpoint.rglob("*.snapshot"):
        snapshot.unlink()
    assert sorted(stored_rows(checkpoint, LAST, BUCKETS)) == sorted(from_snapshot)
    assert len(from_snapshot) == BUCKETS


def test_what_is_older_than_a_snapshot_is_not_read(checkpoint: Path) -> None:
    expected = sorted(stored_rows(checkpoint, LAST, BUCKETS))
    for delta in checkpoint.rglob("*.delta"):
        delta.unlink()
    assert sorted(stored_rows(checkpoint, LAST, buckets=BUCKETS + 1)) == expected


def test_before_the_first_batch_there_is_nothing(tmp_path: Path) -> None:
    storage = StorageSettings(checkpoint=str(tmp_path))
    with job_lock(storage):  # a job starts
        assert read_state(no_spark, storage).batch_id is None
    with pytest.raises(HalfwayError, match="there is no state in"):  # it has failed
        read_state(no_spark, storage)
    (tmp_path / MANIFEST_FILE).touch()
    assert read_state(no_spark, storage).batch_id is None


def test_another_store_is_left_to_spark(checkpoint: Path) -> None:
    offsets = (checkpoint / "offsets" / str(LAST)).read_text()
    assert is_known_format(offsets)
    assert not is_known_format(offsets.replace("HDFSBackedStateStoreProvider", "RocksDBStateStoreProvider"))
    assert not is_known_format(offsets.replace('codec":"lz4"', 'codec":"zstd"'))
    assert not is_known_format(offsets.replace('rowChecksum.enabled":"false"', 'rowChecksum.enabled":"true"'))


@pytest.mark.parametrize("cut", [1, 20, 22, 60, 700])
def test_a_damaged_file_is_refused_in_one_line(cut: int, checkpoint: Path) -> None:
    for file in [*checkpoint.rglob(f"{LAST + 1}.delta"), *checkpoint.rglob(f"{LAST + 1}.snapshot")]:
        file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(HalfwayError, match=f"after batch {LAST}: a state file is") as caught:
        read_state(no_spark, StorageSettings(checkpoint=str(checkpoint)))
    assert "\n" not in str(caught.value)


def test_a_batch_that_the_job_removes_meanwhile_is_read_again(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed = checkpoint / "state" / "0"
    shutil.copytree(removed, checkpoint / "kept")
    shutil.rmtree(removed)

    def put_back(*_: object) -> None:
        if not removed.exists():
            (checkpoint / "kept").rename(removed)

    monkeypatch.setattr("halfway.pipelines.storage.state_reader.log.info", put_back)
    assert read_state(no_spark, StorageSettings(checkpoint=str(checkpoint))).batch_id == LAST
