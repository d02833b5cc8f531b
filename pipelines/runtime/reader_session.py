"""A small local Spark session for commands that read the checkpoint and the tables."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from halfway.pipelines.runtime.paths import home
from halfway.pipelines.runtime.session import running_session, spark_session
from halfway.schemas.errors import SetupError
from halfway.schemas.settings import Settings


def reader_log() -> Path:
    """Return the log file of the small Spark."""
    return home() / "reader-spark.log"


@contextmanager
def reader_session(settings: Settings, say: Callable[[str], None]) -> Iterator[SparkSession]:
    """Run a small Spark until the block ends; use the session that this process has, and leave it running.

    Args:
        settings: the job's settings.
        say: receives a sentence for the user.

    Raises:
        SetupError: Java or the JARs are missing, or Spark does not start.
    """
    running = running_session()
    if running is not None:
        yield running
        return
    say("starting a small Spark to read with ...")
    try:
        with _output_to(reader_log()):
            spark = spark_session(settings, small=True)
    except (PySparkException, OSError) as error:
        raise SetupError(f"Spark does not start: {str(error).partition(chr(10))[0]} (its log: {reader_log()})") from None
    try:
        yield spark
    finally:
        spark.stop()


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Let processes that start in this block write to a file. Spark's JVM inherits stdout and stderr when it starts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    before = [os.dup(number) for number in (1, 2)]
    try:
        with path.open("wb") as log:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
        yield
    finally:
        for number, kept in zip((1, 2), before, strict=True):
            os.dup2(kept, number)
            os.close(kept)
