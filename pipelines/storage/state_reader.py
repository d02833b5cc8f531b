"""Reads the job's state from its checkpoint, with Spark's `statestore` source, with or without a running job.

It locks and writes nothing: a committed batch does not change. Spark keeps a hundred of them.
"""

import json
import logging
from dataclasses import dataclass

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from halfway.pipelines.storage.file_systems import names_in, read_text
from halfway.pipelines.storage.manifest import checkpoint_file
from halfway.schemas.errors import HalfwayError
from halfway.schemas.settings import StorageSettings

log = logging.getLogger(__name__)

_TRIES = 5


@dataclass(frozen=True)
class StoredState:
    """The state after one batch. Before the first batch, `batch_id` is None and the rest is empty."""

    batch_id: int | None
    rows: list[tuple[int, bytes]]
    """One row a bucket (`STATE_SCHEMA`): format version and payload."""
    read_to: dict[str, dict[int, int]]
    """By topic and partition, the offset after the last record that was read."""


def read_state(spark: SparkSession, storage: StorageSettings, *, batches_ago: int = 0) -> StoredState:
    """Return the state after the last committed batch.

    Args:
        spark: the session.
        storage: the job's storage settings.
        batches_ago: go back this many batches, or to the oldest one that is kept.

    Raises:
        HalfwayError: the state cannot be read.
    """
    for left in reversed(range(_TRIES)):
        batch_id = _committed(spark, storage, batches_ago)
        if batch_id is None:
            return StoredState(None, [], {})
        try:
            return StoredState(batch_id, _rows(spark, storage, batch_id), _read_to(spark, storage, batch_id))
        except (PySparkException, Py4JJavaError, FileNotFoundError) as error:
            # A running job may have removed this batch meanwhile. Then a later one exists.
            if not left and _committed(spark, storage, batches_ago) == batch_id:
                first_line = str(error).strip().partition("\n")[0]
                raise HalfwayError(f"cannot read the state in {storage.checkpoint} after batch {batch_id}: {first_line}") from None
            log.info("event=state_read_again batch_id=%d", batch_id)
    raise HalfwayError(f"cannot read the state in {storage.checkpoint}: the job removes batches faster than they are read; try again")


def _committed(spark: SparkSession, storage: StorageSettings, batches_ago: int) -> int | None:
    """Return the id of a committed batch. Spark may have removed the state of the oldest ones."""
    names = names_in(spark, checkpoint_file(storage, "commits"))
    batches = sorted(int(name) for name in names if name.isdecimal())
    return batches[max(0, len(batches) - 1 - batches_ago)] if batches else None


def last_read(spark: SparkSession, storage: StorageSettings) -> dict[str, dict[int, int]]:
    """Return, by topic and partition, the offset after the last record that committed batches have read."""
    batch_id = _committed(spark, storage, 0)
    return {} if batch_id is None else _read_to(spark, storage, batch_id)


def stored_states(spark: SparkSession, storage: StorageSettings) -> DataFrame:
    """Return the state after the last committed batch as a frame: one row a bucket (`STATE_SCHEMA`).

    Persist it before using it twice: a running job may remove it in between.

    Raises:
        HalfwayError: the job has not finished a batch with this checkpoint.
    """
    batch_id = _committed(spark, storage, 0)
    if batch_id is None:
        raise HalfwayError(f"there is no state in {storage.checkpoint} yet: run `halfway resolve` with it, or set storage.checkpoint")
    return _states(spark, storage, batch_id)


def _rows(spark: SparkSession, storage: StorageSettings, batch_id: int) -> list[tuple[int, bytes]]:
    return [(format_version, bytes(payload)) for format_version, payload in _states(spark, storage, batch_id).collect()]


def _states(spark: SparkSession, storage: StorageSettings, batch_id: int) -> DataFrame:
    # Spark 4.2 cannot read a state in a session that has run no stream, unless its stream manager was accessed
    # (SPARK-58973).
    _ = spark.streams.active
    stored = spark.read.format("statestore").option("batchId", batch_id).load(storage.checkpoint)
    return stored.select("value.groupState.format_version", "value.groupState.payload")


def _read_to(spark: SparkSession, storage: StorageSettings, batch_id: int) -> dict[str, dict[int, int]]:
    text = read_text(spark, checkpoint_file(storage, f"offsets/{batch_id}"))
    if text is None:
        raise FileNotFoundError(f"offsets/{batch_id}")
    return ends_in(text)


def ends_in(offsets: str) -> dict[str, dict[int, int]]:
    """Return the end offsets of a batch from a file of Spark's offset log, where they are the third line."""
    topics: dict[str, dict[str, int]] = json.loads(offsets.splitlines()[2])
    return {topic: {int(partition): offset for partition, offset in places.items()} for topic, places in topics.items()}
