"""Runs a small local Spark for commands that read the checkpoint and the tables."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from halfway.pipelines.runtime.jvm import end_jvm
from halfway.pipelines.runtime.paths import home
from halfway.pipelines.runtime.session import redirected, running_session, spark_errors, spark_session
from halfway.schemas.errors import SetupError
from halfway.schemas.settings import Settings


@contextmanager
def reader_session(settings: Settings, say: Callable[[str], None]) -> Iterator[Callable[[], SparkSession]]:
    """Provide a small Spark, which runs until the block ends. If this process has a session, it is that one.

    Args:
        settings: the job's settings.
        say: called with a sentence for the user.

    Yields:
        What returns the session. The first call starts it, because much can be read without.

    Raises:
        SetupError: from that call: Java or the JARs are missing, or Spark does not start.
        SparkFailedError: as `spark_errors`.
    """
    with ExitStack() as stack, spark_errors():
        yield cache(lambda: running_session() or _started(settings, say, stack))


def _started(settings: Settings, say: Callable[[str], None], stack: ExitStack) -> SparkSession:
    say("starting a small Spark to read with ...")
    log_file = home() / "reader-spark.log"
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("wb") as log, redirected(log.fileno(), 1, 2):
            spark = spark_session(settings, small=True, beside_job=True)
    except (PySparkException, OSError) as error:
        raise SetupError(
            f"Spark does not start: {str(error).partition(chr(10))[0]} (its log: {log_file}; `halfway doctor` looks for Java and the JARs)"
        ) from None
    stack.callback(end_jvm)
    stack.callback(spark.stop)
    return spark
