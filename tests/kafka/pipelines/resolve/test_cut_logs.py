"""A broker whose disk was put back, and which has grown again since: the job would skip what is new there."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.pipelines.local.broker import LocalBroker
from halfway.pipelines.resolve.job import ResolveJob
from halfway.pipelines.storage.state_reader import read_state
from halfway.schemas.errors import RecordsLostError
from halfway.schemas.settings import Settings
from halfway.transforms.views.pending import view_pending
from tests.support.job_world import half_headers
from tests.support.kafka_topics import unique_topics


def send(settings: Settings, ids: Sequence[str]) -> None:
    producer = Producer({"bootstrap.servers": settings.kafka.servers()})
    for transaction_id in ids:
        producer.produce(settings.kafka.half_topic, b"", transaction_id, partition=0, headers=half_headers())
    assert producer.flush(60) == 0


def pending(settings: Settings, spark: SparkSession, *, adopt: bool = False) -> set[str]:
    """Run the job, and return what is pending after it."""
    ResolveJob(settings, adopt=adopt).run(lambda: spark)
    return set(view_pending(read_state(lambda: spark, settings.storage).rows).transactions["transaction_id"].to_pylist())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tick_interval", ["1s", 0])
def test_a_log_that_was_cut_and_has_grown_again_is_refused(
    own_broker: LocalBroker, spark: SparkSession, tmp_path: Path, tick_interval: str | int
) -> None:
    places = {"storage.warehouse": str(tmp_path / "tables"), "storage.checkpoint": str(tmp_path / "checkpoint")}
    own = {
        **unique_topics(own_broker),
        **places,
        "trigger.available_now": True,
        "resolution.transactionTimeOut": "1h",
        "resolution.tick_interval": tick_interval,
    }
    settings = load_settings(environ={}, overrides=own)
    create_topics(settings, 1)
    send(settings, ["kept"])
    assert pending(settings, spark) == {"kept"}
    own_broker.stop()
    shutil.copytree(own_broker.directory, tmp_path / "copy")
    own_broker.start()
    send(settings, ["lost-1", "lost-2"])
    assert pending(settings, spark) == {"kept", "lost-1", "lost-2"}, "a broker that has only been started again lacks nothing"
    own_broker.stop()
    shutil.rmtree(own_broker.directory)
    shutil.copytree(tmp_path / "copy", own_broker.directory)
    own_broker.start()
    new = [f"new-{number}" for number in range(20)]
    send(settings, new)
    with pytest.raises(RecordsLostError, match=r"partition 0 of half-\w+ has lost records that this job had read, and new ones are in"):
        pending(settings, spark)
    adopted = {**own, "storage.checkpoint": str(tmp_path / "adopted")}
    assert pending(load_settings(environ={}, overrides=adopted), spark, adopt=True) == {"kept", *new}
