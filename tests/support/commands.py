"""An operator's hands: commands with a job's settings, in this process or as one of their own."""

import json
import os
import subprocess
import sys
from typing import Any

from click.testing import Result
from confluent_kafka import Consumer, ConsumerGroupState, Message, TopicPartition
from confluent_kafka.admin import AdminClient
from typer.testing import CliRunner

from halfway.pipelines.cli.app import app
from halfway.pipelines.resolve.groups import producer_groups
from halfway.schemas.settings import Settings
from tests.support.paths import ROOT

_WIDE = {"COLUMNS": "160"}


def options_of(settings: Settings) -> list[str]:
    """The command-line options that make a command's settings those of a test."""
    kafka, storage, rules = settings.kafka, settings.storage, settings.resolution
    values = {
        "kafka.bootstrap_servers": kafka.bootstrap_servers,
        "kafka.half_topic": kafka.half_topic,
        "kafka.op_topic": kafka.op_topic,
        "kafka.check_topic": kafka.check_topic,
        "storage.warehouse": storage.warehouse,
        "storage.checkpoint": storage.checkpoint,
        "resolution.transactionCheckMax": rules.transactionCheckMax,
        "state.buckets": settings.state.buckets,
        "state.shuffle_partitions": settings.state.shuffle_partitions,
    }
    return [part for name, value in values.items() for part in ("--set", f"{name}={value}")]


def command_line(settings: Settings, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "halfway", *arguments, *options_of(settings)]


def run(settings: Settings, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user does."""
    return subprocess.run(
        command_line(settings, *arguments),
        cwd=ROOT,
        env=os.environ | _WIDE,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


def facts(done: subprocess.CompletedProcess[str] | Result) -> Any:
    """What a command with --json told, and nothing else is on stdout."""
    code = done.returncode if isinstance(done, subprocess.CompletedProcess) else done.exit_code
    assert code == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def invoke(settings: Settings, *arguments: str) -> Result:
    """Run a command in this process, with the Spark that is here: quick."""
    return CliRunner(env=_WIDE).invoke(app, [*arguments, *options_of(settings)])


def records(settings: Settings, topic: str) -> list[Message]:
    """All records of a topic but ticks."""
    consumer = Consumer({"bootstrap.servers": settings.kafka.servers(), "group.id": "reader", "enable.auto.commit": "false"})
    found = []
    try:
        for partition in range(len(consumer.list_topics(topic, timeout=10).topics[topic].partitions)):
            low, end = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=10)
            consumer.assign([TopicPartition(topic, partition, low)])
            while low < end:
                message = consumer.poll(10)
                assert message is not None, f"{topic} does not answer"
                assert message.error() is None, message.error()
                low = message.offset() + 1
                if "TICK" not in dict(message.headers() or ()):
                    found.append(message)
    finally:
        consumer.close()
    return found


def groups_away(servers: str) -> list[str]:
    """Return the producer groups whose consumer group Kafka knows and finds empty: those that earlier tests left behind."""
    kafka = AdminClient({"bootstrap.servers": servers})
    listed = kafka.list_consumer_groups(states={ConsumerGroupState.EMPTY}).result(30).valid or []
    return sorted(producer_groups(group.group_id for group in listed))
