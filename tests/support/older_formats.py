"""Checkpoints and tables of older formats, kept in `tests/data`, and the records that they were made from.

`python -m tests.support.older_formats` makes the file of the current format. Run it once when `FORMAT_VERSION` has
grown, and keep the older files: every later version must open them, or refuse them by name (`test_upgrade.py`).
"""

import tarfile
import tempfile
from pathlib import Path

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.pipelines.local.broker import LocalBroker
from halfway.pipelines.runtime.session import spark_session
from halfway.schemas.settings import Settings
from halfway.schemas.state_format import FORMAT_VERSION
from tests.support.job_world import SMALL_JOB, World
from tests.support.kafka_topics import make_create_time_topics
from tests.support.signals import end_at_sigterm

DATA = Path(__file__).parents[1] / "data"
RUNS = 12
"""Spark writes a snapshot of the state after ten deltas, so that the file has a snapshot and deltas after it."""


def settings_for(version: int, folder: Path, servers: str) -> dict[str, object]:
    """Return the settings that a checkpoint was made with. It records the names of its topics."""
    return {
        **SMALL_JOB,
        "kafka.bootstrap_servers": servers,
        "kafka.half_topic": f"format{version}.half",
        "kafka.op_topic": f"format{version}.op",
        "kafka.check_topic": f"format{version}.check",
        "storage.warehouse": str(folder / "warehouse"),
        "storage.checkpoint": str(folder / "checkpoint"),
        "resolution.transactionTimeOut": "10s",
        "resolution.transactionCheckInterval": "10s",
        "resolution.transactionCheckMax": 2,
        "resolution.resolved_retention": "1h",
    }


def make_topics(settings: Settings) -> None:
    """Create the topics with one partition each."""
    make_create_time_topics(settings, 1)
    create_topics(settings, 1)


def first_part(world: World, run: int) -> None:
    """Send what the kept job read in its `run`th run: something of every kind that the state holds."""
    if run == 0:
        for transaction_id in ("committed", "rolled back", "discarded"):
            world.half(transaction_id, TAGS=b"t", own=b"x")
        world.half("pending", CHECK_IMMUNITY_TIME_IN_SECONDS=b"3600")
        world.op("committed", b"COMMIT", 100)
        world.op("rolled back", b"ROLLBACK", 100)
        world.op("early", b"COMMIT", 100_000)
        world.half("broken", PGROUP=None)
    elif run == 1:
        world.half("discarded", 9_000, INCARNATION=b"1")
    elif run == 3:
        world.half("checked", 30_500)
    world.tick(1_000 + 10_001 * min(run, 4) + run)


def main() -> None:
    """Make the file of the current format."""
    end_at_sigterm()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        broker = LocalBroker(folder / "broker")
        broker.start()
        try:
            servers = str(broker.status()["bootstrap_servers"])
            settings = load_settings(environ={}, overrides=settings_for(FORMAT_VERSION, folder, servers))
            make_topics(settings)
            spark = spark_session(settings)
            world = World(spark, settings)
            for run in range(RUNS):
                first_part(world, run)
                world.resolve()
            spark.stop()
        finally:
            broker.stop()
        DATA.mkdir(exist_ok=True)
        with tarfile.open(DATA / f"format-{FORMAT_VERSION}.tar.gz", "w:gz") as kept:
            for part in ("checkpoint", "warehouse"):
                kept.add(folder / part, part)


if __name__ == "__main__":
    main()
