"""`halfway resolve`: run the job."""

import logging
import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from halfway.pipelines.cli.options import ConfigOption, SetOption
from halfway.pipelines.cli.output import log_to_stderr
from halfway.pipelines.local.command_settings import command_settings
from halfway.pipelines.runtime.signals import exit_code, on_signals
from halfway.schemas.errors import KafkaUnavailableError
from halfway.schemas.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from halfway.pipelines.resolve.job import ResolveJob
    from halfway.pipelines.resolve.report import BatchReport

log = logging.getLogger(__name__)

_NOT_STARTED = "ended while it started: start it again at any time"
_AT_ONCE = "ending at once; the next start repeats the batch that was under way"
_STOPPING = "stopping after the batch that is under way; a second signal ends the job at once, and the next start repeats the batch"


def resolve(
    config: ConfigOption = None,
    overrides: SetOption = None,
    available_now: Annotated[bool, typer.Option("--available-now", help="Resolve what Kafka holds now, then end.")] = False,
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Take over existing tables with a new checkpoint. Writes no outcome that they already hold.")
    ] = False,
    ui: Annotated[bool, typer.Option("--ui", help="Serve Spark's UI on loopback while the job runs.")] = False,
) -> None:
    """Run the job, which writes outcomes to the tables and check requests to Kafka.

    SIGTERM and Ctrl-C end it between two batches, and a second one at once. Both are safe.
    """
    from halfway.pipelines.resolve.job import ResolveJob
    from halfway.pipelines.resolve.warm_up import start_workers
    from halfway.pipelines.runtime.session import own_session, running_session, spark_session

    settings = command_settings(config, overrides)
    if available_now:
        settings = settings.model_copy(update={"trigger": settings.trigger.model_copy(update={"available_now": True})})
    settings.kafka.servers()
    log_to_stderr()
    watchers, serving = _watchers(settings)

    def on_batch(report: "BatchReport") -> None:
        for watcher in watchers:
            watcher(report)

    job = ResolveJob(settings, adopt=adopt, on_batch=on_batch)

    def session() -> "SparkSession":
        is_new = running_session() is None
        if is_new:
            log.info("event=spark_starting")
        spark = spark_session(settings, ui=ui)
        if is_new:
            log.info("event=spark_started ui=%r", spark.sparkContext.uiWebUrl)
        threading.Thread(target=start_workers, args=(spark,), name="start-workers", daemon=True).start()
        return spark

    with on_signals(_stops(job)), own_session(), serving:
        try:
            job.run(session)
        except KafkaUnavailableError as error:
            if not job.is_stopping:
                raise
            log.warning("event=ended effect=the_next_start_repeats_the_batch_that_was_under_way cause=%r", str(error))
        else:
            log.info("event=ended")


def _stops(job: "ResolveJob") -> Callable[[int], None]:
    """Return the handler of signals: the first one stops the job between two batches, the second one at once.

    While the job starts, there is nothing to wait for: a start that was killed is done again.
    """

    def stop(number: int) -> None:
        if not job.is_running or job.is_stopping:
            _tell(_AT_ONCE if job.is_running else _NOT_STARTED)
            _end_now(number)
        job.stop()
        _tell(_STOPPING)

    return stop


def _tell(text: str) -> None:
    """Write a line to stderr, unless that is full or nobody reads it.

    Not by `print` or a logger, in the middle of which the signal may have come.
    """
    with suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"{text}\n".encode())


def _end_now(number: int) -> NoReturn:
    from halfway.pipelines.runtime.jvm import end_jvm_at_once

    # Another signal would come in the middle of the wait for the JVM, and wait for that wait.
    for another in (signal.SIGINT, signal.SIGTERM):
        signal.signal(another, signal.SIG_IGN)
    # PySpark's threads, which lose their connections, must not print that as an error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    end_jvm_at_once()
    os._exit(exit_code(number))


def _watchers(settings: Settings) -> "tuple[list[Callable[[BatchReport], None]], AbstractContextManager[None]]":
    """Return the functions to call after each batch, and a context that serves metrics if they are on."""
    from halfway.pipelines.resolve.progress import ProgressLog

    if not settings.metrics.port:
        return [ProgressLog()], nullcontext()
    from halfway.pipelines.resolve.metrics import JobMetrics
    from halfway.pipelines.runtime.metrics_server import served

    metrics = JobMetrics(settings.state.buckets)
    return [ProgressLog(), metrics], served(metrics, settings.metrics)
