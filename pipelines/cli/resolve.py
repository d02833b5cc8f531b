"""`halfway resolve`: run the job."""

import logging
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Annotated

import typer
from pyspark.sql import SparkSession

from halfway.pipelines.cli.options import ConfigOption, SetOption
from halfway.pipelines.local.command_settings import command_settings
from halfway.pipelines.resolve.job import ResolveJob
from halfway.pipelines.resolve.progress import ProgressLog
from halfway.pipelines.resolve.report import BatchReport
from halfway.pipelines.resolve.warm_up import start_workers
from halfway.pipelines.runtime.session import own_session, spark_session
from halfway.schemas.errors import SetupError
from halfway.schemas.settings import Settings


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

    SIGTERM and Ctrl-C end it between two batches.
    """
    settings = command_settings(config, overrides)
    if available_now:
        settings = settings.model_copy(update={"trigger": settings.trigger.model_copy(update={"available_now": True})})
    settings.kafka.servers()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s level=%(levelname)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    watchers, serving = _watchers(settings)

    def on_batch(report: BatchReport) -> None:
        for watcher in watchers:
            watcher(report)

    job = ResolveJob(settings, adopt=adopt, on_batch=on_batch)

    def stop(_signal: int, _frame: FrameType | None) -> None:
        job.stop()

    def end_by(number: signal.Signals) -> None:
        # A notebook server, in which a Databricks task runs, may call from another thread, and handles signals itself.
        if threading.current_thread() is threading.main_thread():
            signal.signal(number, stop)

    # Set before Spark starts, so that a starting job can be stopped. SIGINT is set afterwards, because PySpark sets
    # its own handler.
    end_by(signal.SIGTERM)

    def session() -> SparkSession:
        spark = spark_session(settings, ui=ui)
        end_by(signal.SIGINT)
        threading.Thread(target=start_workers, args=(spark,), name="start-workers", daemon=True).start()
        return spark

    with own_session(), serving:
        job.run(session)


def _watchers(settings: Settings) -> tuple[list[Callable[[BatchReport], None]], AbstractContextManager[None]]:
    """Return the functions to call after each batch, and a context that serves metrics if they are on.

    Raises:
        SetupError: metrics are on, and prometheus-client is not installed.
    """
    if not settings.metrics.port:
        return [ProgressLog()], nullcontext()
    try:
        from halfway.pipelines.resolve.metrics import JobMetrics, served  # noqa: PLC0415  # prometheus-client is an extra
    except ModuleNotFoundError as error:
        raise SetupError(f"metrics.port is set, but {error.name} is not installed: pip install 'halfway[metrics]'") from None
    metrics = JobMetrics(settings.state.buckets)
    return [ProgressLog(), metrics], served(metrics, settings.metrics)
