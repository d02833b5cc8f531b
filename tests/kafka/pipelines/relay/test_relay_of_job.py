"""The relay beside the job: what the job commits reaches Kafka, also when another checkpoint takes the tables over."""

from pathlib import Path

import pytest
from confluent_kafka.admin import NewTopic

from halfway.pipelines.kafka.admin import partition_counts
from halfway.pipelines.kafka.topic_setup import create_relay_topic
from halfway.schemas.settings import Settings
from tests.support.commands import facts, invoke
from tests.support.job_world import MakeWorld, World
from tests.support.kafka_topics import patient_admin
from tests.support.relay_world import EARLIEST, RunningRelay, committed_records
from tests.support.waiting import until


def relayed(world: World) -> Settings:
    """Return settings of a relay that sends messages for `orders` to a topic of this test, and make its topics."""
    kafka = world.settings.kafka.model_copy(update={"relay_topic": f"{world.settings.kafka.half_topic}-relay"})
    topic = f"{kafka.half_topic}-real"
    relay = world.settings.relay.model_copy(update={"topics": {"orders": topic}, "name": kafka.half_topic, "retry_interval": 200})
    settings = world.settings.model_copy(update={"kafka": kafka, "relay": relay})
    create_relay_topic(settings, 1)
    client = patient_admin(kafka)
    client.create_topics([NewTopic(topic, 1, 1)])[topic].result()
    until(lambda: topic in partition_counts(client, [topic]), topic)
    return settings


@pytest.mark.long
@pytest.mark.timeout(580)
def test_adopt_under_a_relay_sends_nothing_twice(job_world: MakeWorld, tmp_path: Path) -> None:
    w = job_world()
    w.half("first")
    w.op("first", b"COMMIT", 1)
    w.half("open", 2)
    w.half("missing", 3, REAL_TOPIC=b"nowhere")
    w.op("missing", b"COMMIT", 4)
    w.tick(100)
    w.resolve()
    settings = relayed(w)
    topic = settings.relay.topics["orders"]

    def ids() -> list[str]:
        return [(record.key() or b"").decode() for record in committed_records(settings.kafka.servers(), topic)]

    with RunningRelay(settings, EARLIEST) as relay:
        until(lambda: ids() == ["first"], "the first message")
        storage = w.settings.storage.model_copy(update={"checkpoint": str(tmp_path / "new-checkpoint")})
        w.settings = w.settings.model_copy(update={"storage": storage})
        w.op("open", b"COMMIT", 200)
        w.tick(300)
        w.resolve(adopt=True)
        until(lambda: ids() == ["first", "open"], "the message of the next epoch")
        until(lambda: relay.report.positions is not None and relay.report.positions.after is not None, "the bookmark")
    w.settings = settings.model_copy(update={"storage": storage})
    options = ("--set", f"kafka.relay_topic={settings.kafka.relay_topic}")
    [shown] = facts(invoke(w.settings, "status", "--json", *options))["relays"]
    assert (shown["name"], shown["after"].split(".")[0], shown["instances"]) == (settings.relay.name, "1", 0)
    [stopped] = shown["stopped"]
    assert (stopped["topic"], stopped["transaction_id"], stopped["refusal"]) == ("nowhere", "missing", "no_topic")
    page = invoke(w.settings, "status", *options).stdout
    assert "there is no topic nowhere" in page
    assert "none: nothing is relayed" in page
