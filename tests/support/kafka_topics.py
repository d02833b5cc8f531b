"""Topics for tests: unique names, topics whose record times the test sets, and changes to a topic's configuration."""

import uuid
from collections.abc import Callable, Mapping

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.admin import Admin
from halfway.pipelines.kafka.topic_rules import new_topic_config
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.pipelines.local.broker import LocalBroker
from halfway.schemas.settings import KafkaSettings, Settings
from tests.support.waiting import until

MakeTopics = Callable[..., Settings]
"""What the fixture `topics` of tests/conftest.py returns."""


def patient_admin(kafka: KafkaSettings) -> Admin:
    """Return a client for what a test changes in Kafka. Tests load a machine: it waits for longer."""
    return Admin({**kafka.as_librdkafka_dict(), "socket.timeout.ms": 60_000})


def delete_records(kafka: KafkaSettings, topic: str, before: Mapping[int, int]) -> None:
    """Delete a topic's records before an offset of each partition, as retention does."""
    client = patient_admin(kafka)  # its requests end with it
    places = [TopicPartition(topic, partition, offset) for partition, offset in before.items()]
    for deleted in client.delete_records(places).values() if places else ():
        deleted.result()


def unique_topics(broker: LocalBroker) -> dict[str, object]:
    """Return overrides that name `broker` and three topics that no other test uses."""
    unique = uuid.uuid4().hex[:8]
    return {
        "kafka.bootstrap_servers": broker.status()["bootstrap_servers"],
        "kafka.half_topic": f"half-{unique}",
        "kafka.op_topic": f"op-{unique}",
        "kafka.check_topic": f"check-{unique}",
    }


def unique_kafka_settings(broker: LocalBroker) -> KafkaSettings:
    """Return settings for `broker` with three topic names that no other test uses."""
    return load_settings(environ={}, overrides=unique_topics(broker)).kafka


def topic_settings(kafka: KafkaSettings) -> dict[str, object]:
    """Return the overrides that name Kafka and the three topics."""
    names = ("bootstrap_servers", "half_topic", "op_topic", "check_topic")
    return {f"kafka.{name}": getattr(kafka, name) for name in names}


def make_create_time_topics(settings: Settings, partitions: int) -> None:
    """Create the three topics with CreateTime, so that the test sets the time of its records.

    No record expires, however old it is.
    """
    own = {"message.timestamp.type": "CreateTime", "retention.ms": "-1", "message.timestamp.after.max.ms": str(2**63 - 1)}
    names = settings.kafka.job_topics()
    new = [NewTopic(name, num_partitions=partitions, config={**new_topic_config(settings, name), **own}) for name in names]
    client = patient_admin(settings.kafka)
    for made in client.create_topics(new).values():
        made.result()


def make_topics_anew(settings: Settings) -> None:
    """Delete the half and op topics, and make them anew."""
    client, kafka = patient_admin(settings.kafka), settings.kafka
    for deleted in client.delete_topics([kafka.half_topic, kafka.op_topic]).values():
        deleted.result(30)
    create_topics(settings, 1)


def set_topic_config(settings: Settings, topic: str, name: str, value: object) -> None:
    """Change one configuration entry of a topic, and wait until the broker knows it: the answer is the controller's."""
    entry = ConfigEntry(name, str(value), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    client = patient_admin(settings.kafka)
    for done in client.incremental_alter_configs([resource]).values():
        done.result()
    described = ConfigResource(ResourceType.TOPIC, topic)
    until(lambda: client.describe_configs([described])[described].result()[name].value == str(value), f"{name} of {topic}", 30)
