"""Worlds to run the job in, topics for the client, and a broker of a file's own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
from pyspark.sql import SparkSession

from pipelines.broker import LocalBroker
from schemas.settings import KafkaSettings
from tests.conftest import MakeTopics
from tests.kafka.world import World

MakeWorld = Callable[..., World]

QUICK = {
    "state.buckets": 4,
    "state.shuffle_partitions": 1,
    "resolution.tick_interval": 0,
    "trigger.available_now": True,
}


@pytest.fixture
def world(spark: SparkSession, topics: MakeTopics, tmp_path: Path) -> MakeWorld:
    """`world(partitions=2, **{"resolution.transactionCheckMax": 2})`: a job whose time the test moves."""

    def make(partitions: int = 2, timestamps: Literal["LogAppendTime", "CreateTime"] = "CreateTime", **overrides: object) -> World:
        storage = {"storage.warehouse": str(tmp_path / "warehouse"), "storage.checkpoint": str(tmp_path / "checkpoint")}
        settings = topics(partitions=partitions, timestamps=timestamps, overrides={**QUICK, **storage, **overrides})
        return World(spark, settings)

    return make


@pytest.fixture
def kafka(topics: MakeTopics) -> KafkaSettings:
    return topics(partitions=2).kafka


@pytest.fixture(scope="module")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    """A broker that these tests may stop and freeze."""
    local = LocalBroker(tmp_path_factory.mktemp("own"))
    local.start()
    yield local
    local.stop()
