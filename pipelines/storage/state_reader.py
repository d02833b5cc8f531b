"""Reads the job's state from its checkpoint, with or without a running job.

A local checkpoint is read by `state_files`, any other with Spark's `statestore` source. Neither locks or
writes anything: a committed batch does not change. Spark keeps a hundred of them.
"""

import json
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from halfway.pipelines.storage.file_systems import first_line_of, local_path, names_in, read_text
from halfway.pipelines.storage.locks import is_in_use
from halfway.pipelines.storage.manifest import MANIFEST_FILE, METADATA_FILE, STATUS_FILE, checkpoint_file
from halfway.pipelines.storage.missing_tables import OFFSETS
from halfway.pipelines.storage.state_files import conf_of, is_known_format, stored_rows
from halfway.schemas.batch_status import BatchStatus
from halfway.schemas.errors import HalfwayError
from halfway.schemas.settings import StorageSettings

log = logging.getLogger(__name__)

COMMITS = "commits"
"""Spark's folder with a file for each batch that has run."""
_TRIES = 5


@dataclass(frozen=True)
class StoredState:
    """The state after one batch. Before the first batch, `batch_id` is None and the rest is empty."""

    batch_id: int | None
    rows: list[tuple[int, bytes]]
    """One row a bucket (`STATE_SCHEMA`): format version and payload."""
    read_to: dict[str, dict[int, int]]
    """By topic and partition, the offset after the last record that was read."""
    last_batch: BatchStatus | None = None
    """What the job wrote after its last batch (`STATUS_FILE`)."""


def read_state(session: Callable[[], SparkSession], storage: StorageSettings, *, batches_ago: int = 0) -> StoredState:
    """Return the state after the last committed batch.

    Args:
        session: returns the session. Called only if the checkpoint is not on the local disk, or Spark has written it in
            an unknown format.
        storage: the job's storage settings.
        batches_ago: go back this many batches, or to the oldest one that is kept.

    Raises:
        HalfwayError: no job has started with this checkpoint, or the state cannot be read.
    """
    files = _files_of(session, storage)
    try:
        exists = files.exist() or is_in_use(storage)  # a job that starts has not made it yet
    except (PySparkException, Py4JJavaError) as error:
        cause = first_line_of(error)
        if "ClassNotFoundException" in cause:
            cause += ": this Spark has no JARs for that store: run the command by spark-submit with them (docs/cluster.md, Object stores)"
        raise HalfwayError(f"cannot read storage.checkpoint, {storage.checkpoint}: {cause}") from None
    if not exists:
        raise _no_state(storage)
    for left in reversed(range(_TRIES)):
        batch_id = _chosen(files.batches(COMMITS), batches_ago)
        if batch_id is None:
            return StoredState(None, [], {})
        try:
            return _read(files, session, storage, batch_id)
        except (PySparkException, Py4JJavaError, FileNotFoundError, LookupError, ValueError) as error:
            # A running job may have removed this batch meanwhile. Then a later one exists.
            if not left and _chosen(files.batches(COMMITS), batches_ago) == batch_id:
                raise HalfwayError(
                    f"cannot read the state in {storage.checkpoint} after batch {batch_id}: {first_line_of(error)}; if it is so each time, "
                    "set storage.checkpoint to a new folder and start once with `halfway resolve --adopt`"
                ) from None
            log.info("event=state_read_again batch_id=%d", batch_id)
    raise HalfwayError(f"cannot read the state in {storage.checkpoint}: the job removes batches faster than they are read; try again")


def no_batch_yet(storage: StorageSettings) -> str:
    """Return what to say where the state is empty because no batch has run."""
    return f"the checkpoint {storage.checkpoint} has no batch yet; check that storage.checkpoint is the job's"


def _no_state(storage: StorageSettings) -> HalfwayError:
    advice = "run `halfway resolve`, which makes it; if the job runs in another folder, go there, or set storage.checkpoint; if it "
    advice += "was lost, `halfway resolve --adopt` takes its tables over"
    return HalfwayError(f"there is no state in {storage.checkpoint} yet: {advice}")


@dataclass(frozen=True)
class LocalFiles:
    """The files of a checkpoint on the local disk."""

    folder: Path

    def exist(self) -> bool:
        """Return True if there is a checkpoint."""
        return self.folder.is_dir() and _is_checkpoint(path.name for path in self.folder.iterdir())

    def batches(self, of: str) -> list[int]:
        """Return the ids of the batches in a folder, OFFSETS or COMMITS, in order."""
        folder = self.folder / of
        return batch_ids(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def text(self, name: str) -> str | None:
        """Return what a file holds; None if it does not exist."""
        file = self.folder / name
        return file.read_text(errors="replace") if file.exists() else None


@dataclass(frozen=True)
class HadoopFiles:
    """The same files, wherever Spark can reach them."""

    spark: SparkSession
    storage: StorageSettings

    def exist(self) -> bool:
        """Return True if there is a checkpoint."""
        return _is_checkpoint(names_in(self.spark, self.storage.checkpoint))

    def batches(self, of: str) -> list[int]:
        """Return the ids of the batches in a folder, OFFSETS or COMMITS, in order."""
        return batch_ids(names_in(self.spark, checkpoint_file(self.storage, of)))

    def text(self, name: str) -> str | None:
        """Return what a file holds; None if it does not exist."""
        return read_text(self.spark, checkpoint_file(self.storage, name))


CheckpointFiles = LocalFiles | HadoopFiles


def _files_of(session: Callable[[], SparkSession], storage: StorageSettings) -> CheckpointFiles:
    folder = local_path(storage.checkpoint)
    # Where Hadoop is configured, a path without a scheme may be on another file system.
    if folder is not None and (folder.is_dir() or "HADOOP_CONF_DIR" not in os.environ):
        return LocalFiles(folder)
    return HadoopFiles(session(), storage)


def _is_checkpoint(names: Iterable[str]) -> bool:
    """Return True if a folder has what the first start of a job makes, not only the lock of one that failed."""
    return not {MANIFEST_FILE, METADATA_FILE, COMMITS}.isdisjoint(names)


def damaged_log(files: CheckpointFiles) -> str | None:
    """Return the newest file of Spark's offset log or commit log, if it is damaged; else None.

    Spark does not flush these files to the disk, so that a power cut may leave a part of the newest.
    """
    for log_name, line in ((OFFSETS, 2), (COMMITS, 1)):
        for batch_id in files.batches(log_name)[-1:]:
            text = files.text(f"{log_name}/{batch_id}")
            try:
                if text is not None:  # a running job has not removed it since
                    json.loads(text.splitlines()[line])
            except (LookupError, ValueError):
                return f"{log_name}/{batch_id}"
    return None


def _read(
    files: CheckpointFiles, session: Callable[[], SparkSession], storage: StorageSettings, batch_id: int, *, is_one_enough: bool = False
) -> StoredState:
    offsets, manifest, status = _offsets_of(files, batch_id), files.text(MANIFEST_FILE), files.text(STATUS_FILE)
    if isinstance(files, LocalFiles) and manifest is not None and is_known_format(offsets):
        rows = stored_rows(files.folder, batch_id, json.loads(manifest)["buckets"])
    else:
        states = _states(session(), storage, batch_id)
        found = (states.limit(1) if is_one_enough else states).collect()
        rows = [(format_version, bytes(payload)) for format_version, payload in found]
    return StoredState(batch_id, rows, ends_in(offsets), BatchStatus.parse(status))


def _chosen(batches: list[int], batches_ago: int) -> int | None:
    """Return the id of a committed batch. Spark may have removed the state of the oldest ones."""
    return batches[max(0, len(batches) - 1 - batches_ago)] if batches else None


def batch_ids(names: Iterable[str]) -> list[int]:
    """Return the ids of batches, in order, from the names in one of Spark's folders: a file is called by its batch."""
    return sorted(int(name) for name in names if name.isdecimal())


def last_read(spark: SparkSession, storage: StorageSettings) -> dict[str, dict[int, int]]:
    """Return, by topic and partition, the offset after the last record that committed batches have read."""
    files = HadoopFiles(spark, storage)
    batch_id = _chosen(files.batches(COMMITS), 0)
    return {} if batch_id is None else ends_in(_offsets_of(files, batch_id))


def partitions_of_state(spark: SparkSession, storage: StorageSettings) -> int | None:
    """Return the number of partitions that Spark divided the state into in the first batch; None before that."""
    files = HadoopFiles(spark, storage)
    batch_id = _chosen(files.batches(OFFSETS), 0)
    if batch_id is None:
        return None
    return int(conf_of(_offsets_of(files, batch_id))["spark.sql.shuffle.partitions"])


def bucket_state(spark: SparkSession, storage: StorageSettings) -> StoredState | None:
    """Return the state after the last committed batch, of one bucket at least; None if there is none, or it is damaged.

    The times that the job had read are in each.
    """
    try:
        files = _files_of(lambda: spark, storage)
        batch_id = _chosen(files.batches(COMMITS), 0)
        return None if batch_id is None else _read(files, lambda: spark, storage, batch_id, is_one_enough=True)
    except (PySparkException, Py4JJavaError, OSError, LookupError, ValueError) as error:  # the query names what is damaged
        log.info("event=state_not_read cause=%s", type(error).__name__)
        return None


def stored_states(spark: SparkSession, storage: StorageSettings) -> DataFrame:
    """Return the state after the last committed batch as a frame: one row a bucket (`STATE_SCHEMA`).

    Persist it before using it twice: a running job may remove it in between.

    Raises:
        HalfwayError: the job has not finished a batch with this checkpoint.
    """
    batch_id = _chosen(HadoopFiles(spark, storage).batches(COMMITS), 0)
    if batch_id is None:
        raise HalfwayError(no_batch_yet(storage))
    return _states(spark, storage, batch_id)


def _states(spark: SparkSession, storage: StorageSettings, batch_id: int) -> DataFrame:
    # Spark 4.2 cannot read a state in a session that has run no stream, unless its stream manager was accessed
    # (SPARK-58973).
    _ = spark.streams.active
    stored = spark.read.format("statestore").option("batchId", batch_id).load(storage.checkpoint)
    return stored.select("value.groupState.format_version", "value.groupState.payload")


def _offsets_of(files: CheckpointFiles, batch_id: int) -> str:
    """Return a batch's file in Spark's offset log."""
    text = files.text(f"{OFFSETS}/{batch_id}")
    if text is None:
        raise FileNotFoundError(f"{OFFSETS}/{batch_id}")
    return text


def ends_in(offsets: str) -> dict[str, dict[int, int]]:
    """Return the end offsets of a batch from a file of Spark's offset log, where they are the third line."""
    topics: dict[str, dict[str, int]] = json.loads(offsets.splitlines()[2])
    return {topic: {int(partition): offset for partition, offset in places.items()} for topic, places in topics.items()}
