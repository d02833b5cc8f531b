"""`halfway resolve`: run the job."""

import logging
import signal
from types import FrameType
from typing import Annotated

import typer
from pyspark.sql import SparkSession

from pipelines.cli_common import ConfigOption, SetOption, settings_of
from pipelines.job import ResolveJob
from pipelines.progress import ProgressLog
from pipelines.session import spark_session


def resolve(
    config: ConfigOption = None,
    overrides: SetOption = None,
    available_now: Annotated[bool, typer.Option("--available-now", help="Resolve what is waiting in Kafka now, then end.")] = False,
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Take over existing tables with a new checkpoint: nothing they hold is written again.")
    ] = False,
    ui: Annotated[bool, typer.Option("--ui", help="Serve Spark's own UI on loopback while the job runs.")] = False,
) -> None:
    """Run the job: commits to the tables, check requests to Kafka. SIGTERM and Ctrl-C end it between two batches."""
    settings = settings_of(config, overrides)
    if available_now:
        settings = settings.model_copy(update={"trigger": settings.trigger.model_copy(update={"available_now": True})})
    settings.kafka.servers()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s level=%(levelname)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    job = ResolveJob(settings, adopt=adopt, on_batch=ProgressLog())

    def stop(_signal: int, _frame: FrameType | None) -> None:
        job.stop()

    # Before Spark starts, so that a job which is still starting can be stopped; for SIGINT PySpark puts its own handler there.
    signal.signal(signal.SIGTERM, stop)

    def session() -> SparkSession:
        spark = spark_session(settings, ui=ui)
        signal.signal(signal.SIGINT, stop)
        return spark

    try:
        job.run(session)
    finally:
        active = SparkSession.getActiveSession()
        if active is not None:
            active.stop()
