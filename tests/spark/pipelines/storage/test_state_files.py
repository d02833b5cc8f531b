"""What is read of a checkpoint without Spark is what Spark reads."""

import tarfile
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from halfway.pipelines.storage.state_files import stored_rows
from halfway.schemas.state_format import FORMAT_VERSION
from tests.support.older_formats import DATA


@pytest.mark.parametrize(("name", "batches"), [(f"format-{FORMAT_VERSION}", range(12)), ("snapshots", range(15, 19))])
def test_the_rows_are_those_of_spark(name: str, batches: range, spark: SparkSession, tmp_path: Path) -> None:
    with tarfile.open(DATA / f"{name}.tar.gz") as kept:
        kept.extractall(tmp_path, filter="data")
    checkpoint = tmp_path / "checkpoint"
    _ = spark.streams.active  # SPARK-58973: see `state_reader`
    for batch_id in batches:
        found = spark.read.format("statestore").option("batchId", batch_id).load(str(checkpoint)).select("value.groupState.*").collect()
        assert sorted(stored_rows(checkpoint, batch_id, buckets=4)) == sorted((number, bytes(payload)) for number, payload in found)
