"""`make kills N=1000`: kill -9 at random moments on each database, with a real Kafka and the real job."""

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.pipelines.local.broker import LocalBroker
from tests.kills.consumer import Killed, kill_consumers
from tests.kills.run import QUICK, Findings, kill_often
from tests.support.database_servers import mariadb_server, postgres_server
from tests.support.job_process import JobProcess
from tests.support.kafka_topics import unique_topics
from tests.support.signals import end_at_sigterm


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--databases", default="consumer,sqlite,postgresql,mariadb")
    options = parser.parse_args()
    end_at_sigterm()
    faults = 0
    with tempfile.TemporaryDirectory(prefix="halfway-kills-") as name:
        broker = LocalBroker(Path(name) / "broker")
        broker.start()
        try:
            for kind in options.databases.split(","):
                folder = Path(name) / kind
                folder.mkdir()
                if kind == "consumer":
                    faults += told(kind, kill_consumers(folder, options.kills, options.seed))
                    continue
                settings = load_settings(environ={}, overrides=unique_topics(broker))
                create_topics(settings, 2)
                job = JobProcess(settings, folder)
                with ExitStack() as stack:
                    stack.callback(job.kill)
                    where = str(folder / "shop.db")
                    if kind == "postgresql":
                        where = str(stack.enter_context(postgres_server()).port)
                    elif kind == "mariadb":
                        where = str(stack.enter_context(mariadb_server()).port)
                    job.start(**QUICK)
                    found = kill_often(settings.kafka, job, kind, where, folder, kills=options.kills, seed=options.seed)
                faults += told(kind, found)
        finally:
            broker.stop()
    return min(1, faults)


def told(kind: str, found: Killed | Findings) -> int:
    """Print what a run found, and return the number of its faults. What it has not done is one too."""
    print(kind, found, flush=True)  # noqa: T201
    undone = found.undone()
    for what in undone:
        print(f"{kind} failed: {what}", flush=True)  # noqa: T201
    return len(found.faults()) + len(undone)


if __name__ == "__main__":
    raise SystemExit(main())
