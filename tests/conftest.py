"""What the tiers share: markers by folder, one real broker a session, topics of a test's own."""

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
from confluent_kafka.admin import NewTopic
from pyspark.sql import SparkSession

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.admin import admin
from halfway.pipelines.kafka.topic_setup import create_topics, new_topic_config
from halfway.pipelines.local.broker import LocalBroker
from halfway.pipelines.runtime.session import spark_session
from halfway.schemas.settings import ENV_PREFIX, Settings

_HERE = Path(__file__).parent
_TIME_LIMITS_S = {"spark": 300, "cluster": 600, "chaos": 600}

MakeTopics = Callable[..., Settings]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its folder's name, and give the slow tiers more time than the default."""
    for item in items:
        if not item.path.is_relative_to(_HERE) or item.path.parent == _HERE:
            continue
        tier = item.path.relative_to(_HERE).parts[0]
        item.add_marker(tier)
        if tier == "cluster":
            item.add_marker("slow")
        if tier in _TIME_LIMITS_S and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TIME_LIMITS_S[tier]))


@pytest.fixture(scope="session", autouse=True)
def _spark_starts_quickly() -> Iterator[None]:
    """Have every Spark that a test starts compile its code the quick way: most of them live for seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1")
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_settings_from_outside() -> Iterator[None]:
    """Keep the settings of the developer's own environment out of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.upper().startswith(ENV_PREFIX):
                patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    """A running Kafka for the whole session; a test that stops or kills one starts its own."""
    local = LocalBroker(tmp_path_factory.mktemp("broker"))
    local.start()
    yield local
    local.stop()


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One local Spark for the session."""
    session = spark_session(load_settings(environ={}, overrides={"state.shuffle_partitions": 1}))
    yield session
    session.stop()


@pytest.fixture
def topics(broker: LocalBroker) -> MakeTopics:
    """Make three topics that nobody else has, and return the settings that name them.

    `topics(partitions=2, timestamps="CreateTime", overrides={"resolution.tick_interval": 0})`: all are optional. With
    CreateTime a test sets the time of its records itself; they are kept however old they say they are.
    """

    def make(
        partitions: int = 2,
        timestamps: Literal["LogAppendTime", "CreateTime"] = "LogAppendTime",
        overrides: dict[str, object] | None = None,
    ) -> Settings:
        settings = load_settings(environ={}, overrides={**unique_topics(broker), **(overrides or {})})
        if timestamps == "CreateTime":
            make_create_time_topics(settings, partitions)
        create_topics(settings, partitions)
        return settings

    return make


def unique_topics(broker: LocalBroker) -> dict[str, object]:
    """Return settings for `broker` with names for the three topics that nobody else has."""
    unique = uuid.uuid4().hex[:8]
    return {
        "kafka.bootstrap_servers": broker.status()["bootstrap_servers"],
        "kafka.half_topic": f"half-{unique}",
        "kafka.op_topic": f"op-{unique}",
        "kafka.check_topic": f"check-{unique}",
    }


def make_create_time_topics(settings: Settings, partitions: int) -> None:
    """Make the three topics so that a test sets the time of its records itself; they are kept however old they say they are."""
    own = {"message.timestamp.type": "CreateTime", "retention.ms": "-1", "message.timestamp.after.max.ms": str(2**63 - 1)}
    names = (settings.kafka.half_topic, settings.kafka.op_topic, settings.kafka.check_topic)
    new = [NewTopic(name, num_partitions=partitions, config={**new_topic_config(settings, name), **own}) for name in names]
    client = admin(settings)
    for made in client.create_topics(new).values():
        made.result()
