"""Markers by folder, and the fixtures that several folders use: a Kafka broker, Spark, and topics for one test."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import hypothesis
import pytest
from pyspark.sql import SparkSession

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.pipelines.local.broker import LocalBroker
from halfway.pipelines.runtime.java import SHORT_LIVED_JVM
from halfway.pipelines.runtime.session import spark_session
from halfway.schemas.settings import ENV_PREFIX, Settings
from tests.support.kafka_topics import MakeTopics, make_create_time_topics, unique_topics
from tests.support.layers import FOLDERS

# A busy machine may take seconds for an example. A test that hangs has pytest's time limit.
hypothesis.settings.register_profile("halfway", deadline=None)
hypothesis.settings.load_profile("halfway")

_HERE = Path(__file__).parent
_TIME_LIMITS_S = {"spark": 300, "cluster": 600, "chaos": 600, "simulation": 600}
_SLOW_MACHINE = 2
"""A limit is given for a machine on which nothing else runs. It ends what hangs, and never what is slow."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the name of its folder, and give the slow folders a longer time limit.

    The files with the longest time limits come first, so that no worker is left alone with a long test at the end.
    """
    for item in items:
        if not item.path.is_relative_to(_HERE) or item.path.parent == _HERE:
            continue
        tier = item.path.relative_to(_HERE).parts[0]
        item.add_marker(tier)
        if tier == "cluster" and item.get_closest_marker("long") is None:
            item.add_marker("slow")
        if tier in _TIME_LIMITS_S and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TIME_LIMITS_S[tier]))
    limits_s: dict[Path, float] = {}
    for item in items:
        limit = item.get_closest_marker("timeout")
        if limit is not None:
            item.add_marker(pytest.mark.timeout(_SLOW_MACHINE * limit.args[0]), append=False)
        limits_s[item.path] = max(limits_s.get(item.path, 0), limit.args[0] if limit else 0)
    items.sort(key=lambda item: -limits_s[item.path])


@pytest.fixture(autouse=True)
def _commands_log_to_their_own_test() -> Iterator[None]:
    """Take away the log handler of a command that ran in this process: it writes to its test's stderr, closed by then.

    Whatever a later test logs would be a "Logging error" on that test's stderr.
    """
    root = logging.getLogger()
    level, handlers = root.level, set(root.handlers)
    yield
    root.setLevel(level)
    for handler in set(root.handlers) - handlers:
        if type(handler) is logging.StreamHandler:
            root.removeHandler(handler)


@pytest.fixture(scope="session", autouse=True)
def _jvms_start_quickly() -> Iterator[None]:
    """Make every JVM of a test use only its fast compiler, because most of them live for seconds.

    Spark keeps 100 compiled classes by default, and a job makes as many: the next test would compile them again.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_SUBMIT_OPTS", f"{SHORT_LIVED_JVM} -Dspark.sql.codegen.cache.maxEntries=2000")
        patch.setenv("SPARK_LAUNCHER_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        patch.setenv("KAFKA_HEAP_OPTS", "-Xms256m -Xmx1g -XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        yield


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_reaches_commands() -> None:
    """Undo what a shell does to a run in the background: it ignores SIGINT, and so would the commands of the tests."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _each_command_sets_its_own_umask() -> Iterator[None]:
    """Take back what a command that ran in this process has set: a PostgreSQL of another user could not start."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture(scope="session", autouse=True)
def _one_copy_of_each_module() -> Iterator[None]:
    """Fail if a folder was imported under its old name, which would be a second copy of its classes."""
    yield
    assert not {name.split(".")[0] for name in sys.modules} & set(FOLDERS)


@pytest.fixture(scope="session", autouse=True)
def _no_settings_from_outside() -> Iterator[None]:
    """Remove the settings in the developer's environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.upper().startswith(ENV_PREFIX):
                patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    """A Kafka broker that runs for the whole session. A test that stops or kills a broker starts its own."""
    local = LocalBroker(tmp_path_factory.mktemp("broker"))
    local.start()
    yield local
    local.stop()


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One local Spark session for all tests."""
    session = spark_session(load_settings(environ={}, overrides={"state.shuffle_partitions": 1}))
    yield session
    session.stop()


@pytest.fixture
def topics(broker: LocalBroker) -> MakeTopics:
    """Create three topics that no other test uses, and return settings that name them.

    `topics(partitions=2, timestamps="CreateTime", overrides={"resolution.tick_interval": 0})`: all arguments are
    optional. With CreateTime the test sets the time of its records, and no record expires, however old it is.
    """

    def make(
        partitions: int = 2,
        timestamps: Literal["LogAppendTime", "CreateTime"] = "LogAppendTime",
        overrides: dict[str, object] | None = None,
    ) -> Settings:
        own = {**unique_topics(broker), **(overrides or {})}
        if timestamps == "CreateTime":
            make_create_time_topics(load_settings(environ={}, overrides=own), partitions)
        # The topics begin empty, without first ticks.
        create_topics(load_settings(environ={}, overrides={**own, "resolution.tick_interval": 0}), partitions)
        return load_settings(environ={}, overrides=own)

    return make
