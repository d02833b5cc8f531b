"""The local Spark session: its class archive, and the Python workers that start before they are needed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from halfway.pipelines.resolve.warm_up import start_workers
from halfway.pipelines.runtime.jars import class_archive, use_archive
from halfway.pipelines.runtime.java import find_java


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_the_jvm_starts_from_the_class_archive(spark: SparkSession) -> None:
    archive = class_archive(find_java())
    assert archive.is_file(), "run `make jars`"
    jvm = spark.sparkContext._gateway.proc.pid
    assert archive.name in Path(f"/proc/{jvm}/maps").read_text()


def test_a_class_archive_that_does_not_fit_is_ignored_silently(tmp_path: Path) -> None:
    java = find_java()
    broken = tmp_path / "classes.jsa"
    broken.write_bytes(b"no archive")
    options = use_archive(broken)
    plain, with_archive = (
        subprocess.run([str(java), *more, "-version"], capture_output=True, text=True, timeout=60, check=True) for more in ([], options)
    )
    assert f"-XX:SharedArchiveFile={broken}" in options
    told = with_archive.stdout + with_archive.stderr
    assert re.sub(r", sharing\)", ")", told) == re.sub(r", sharing\)", ")", plain.stdout + plain.stderr)


def test_started_workers_have_imported_what_the_job_needs(spark: SparkSession) -> None:
    start_workers(spark)
    found = spark.range(0, 1, 1, 1).mapInArrow(_imported, "name string").collect()
    assert {row[0] for row in found} >= {"pandas", "halfway.pipelines.resolve.read_back", "halfway.transforms.operator"}


def _imported(batches):  # type: ignore[no-untyped-def]  # cloudpickled: an annotation would make the workers import its module
    import pyarrow as pa

    del batches
    names = [name for name in ("pandas", "halfway.pipelines.resolve.read_back", "halfway.transforms.operator") if name in sys.modules]
    yield pa.RecordBatch.from_arrays([pa.array(names)], names=["name"])
