"""A small local Spark for the commands that look on: they read the checkpoint and the tables, beside a running job or with none."""

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
    """Return where the small Spark logs to."""
    return home() / "reader-spark.log"


@contextmanager
def reader_session(settings: Settings, say: Callable[[str], None]) -> Iterator[SparkSession]:
    """Run a small Spark until the block is left; one that this process has already is used, and left running.

    Args:
        settings: the job's.
        say: is told, in a sentence, that it takes some seconds.

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
    """Let processes that start in this block write to a file: Spark's JVM talks on stderr, and keeps what it has got at its start."""
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
