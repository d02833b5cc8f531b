"""Fixtures of the tests with Kafka: worlds, job processes, topics for the client, and brokers of one test file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pyspark.sql import SparkSession

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.topic_setup import create_relay_topic, create_topics
from halfway.pipelines.local.broker import LocalBroker
from halfway.schemas.settings import KafkaSettings
from tests.support.job_process import JobProcess
from tests.support.job_world import SMALL_JOB, MakeWorld, World
from tests.support.kafka_topics import MakeTopics
from tests.support.secure_broker import Right, SecureBroker
from tests.support.secure_world import PASSWORD, USERS, Configure, TakeAway, rights_of


@pytest.fixture
def job_world(spark: SparkSession, topics: MakeTopics, tmp_path: Path) -> MakeWorld:
    """`job_world(partitions=2, **{"resolution.transactionCheckMax": 2})` makes a job whose time the test moves."""

    def make(partitions: int = 2, timestamps: Literal["LogAppendTime", "CreateTime"] = "CreateTime", **overrides: object) -> World:
        storage = {"storage.warehouse": str(tmp_path / "warehouse"), "storage.checkpoint": str(tmp_path / "checkpoint")}
        settings = topics(partitions=partitions, timestamps=timestamps, overrides={**SMALL_JOB, **storage, **overrides})
        return World(spark, settings)

    return make


@pytest.fixture
def world(job_world: MakeWorld) -> MakeWorld:
    """The world of a job, in the folders that have no other."""
    return job_world


@pytest.fixture
def job(topics: MakeTopics, tmp_path: Path) -> Iterator[JobProcess]:
    """A job in a process of its own, not started."""
    process = JobProcess(topics(), tmp_path)
    yield process
    process.kill()


@pytest.fixture
def kafka(topics: MakeTopics) -> KafkaSettings:
    """Settings that name three new topics."""
    return topics(partitions=2).kafka


@pytest.fixture(scope="module")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    """A broker that the tests of one file may stop and freeze."""
    local = LocalBroker(tmp_path_factory.mktemp("own"))
    local.start()
    yield local
    local.stop()


@pytest.fixture(scope="module")
def secure_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    """A broker with a user and rights for each part in docs/security.md."""
    running = SecureBroker(tmp_path_factory.mktemp("secure"))
    running.start()
    try:
        for part, user in USERS.items():
            running.add_user(user, PASSWORD)
            running.allow(user, rights_of(part))
        settings = load_settings(environ={}, overrides=running.login_settings(USERS["setup"]))
        create_topics(settings, 2)
        create_relay_topic(settings)
        yield running
    finally:
        running.stop()


@pytest.fixture
def configure(secure_broker: SecureBroker, tmp_path: Path) -> Configure:
    """`configure("job", **{"kafka.security.user": "nobody"})` writes a part's configuration file."""

    def write(part: str, **changed: object) -> Path:
        places = {"storage.warehouse": str(tmp_path / "warehouse"), "storage.checkpoint": str(tmp_path / "checkpoint")}
        rules = {"resolution.transactionTimeOut": 1, "resolution.transactionCheckInterval": 1, "resolution.transactionCheckMax": 1}
        own = {**SMALL_JOB, **places, **rules, "resolution.tick_interval": 100, **secure_broker.login_settings(USERS[part]), **changed}
        content: dict[str, Any] = {}
        for name, value in own.items():
            *groups, last = name.split(".")
            inner = content
            for group in groups:
                inner = inner.setdefault(group, {})
            inner[last] = value
        path = tmp_path / f"{part}.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


@pytest.fixture
def without(secure_broker: SecureBroker) -> Iterator[TakeAway]:
    """`without("job", right)` revokes a right of a part until the test ends."""
    taken: list[tuple[str, Right]] = []

    def take(part: str, right: Right) -> None:
        secure_broker.forbid(USERS[part], right)
        taken.append((USERS[part], right))

    yield take
    for user, right in taken:
        secure_broker.allow(user, [right])
