"""Order and messages, both or neither, whenever an instance of the service is killed or stalled."""

from pathlib import Path

import pytest

from halfway.schemas.settings import KafkaSettings
from tests.kills.run import QUICK, kill_often
from tests.support.database_servers import mariadb_server, postgres_server
from tests.support.job_process import JobProcess
from tests.support.kafka_topics import MakeTopics


@pytest.mark.slow
@pytest.mark.timeout(560)
@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "mariadb"])
def test_both_or_neither_under_kill(kind: str, topics: MakeTopics, tmp_path: Path) -> None:
    settings = topics()
    kafka: KafkaSettings = settings.kafka
    job = JobProcess(settings, tmp_path)
    job.start(**QUICK)
    try:
        if kind == "sqlite":
            found = kill_often(kafka, job, kind, str(tmp_path / "shop.db"), tmp_path, kills=40, seed=1)
        else:
            with postgres_server() if kind == "postgresql" else mariadb_server() as server:
                found = kill_often(kafka, job, kind, str(server.port), tmp_path, kills=40, seed=1)
    finally:
        job.kill()
    assert found.faults() == [], found
    assert found.orders > 20, found
    assert found.by_check > 0, found
