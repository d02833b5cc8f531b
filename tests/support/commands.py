"""Runs the commands of `halfway`, in this process or in one of their own, and reads what they left in Kafka."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from click.testing import Result
from confluent_kafka import ConsumerGroupState, Message
from confluent_kafka.admin import AdminClient
from typer.testing import CliRunner

from halfway.pipelines.cli.app import app
from halfway.pipelines.resolve.groups import producer_groups
from halfway.schemas.settings import Settings
from tests.support.kafka_topics import topic_settings
from tests.support.partition_records import headers_of, topic_records
from tests.support.paths import ROOT


def as_options(values: Mapping[str, object]) -> list[str]:
    """Return command-line options that set these settings."""
    return [part for name, value in values.items() for part in ("--set", f"{name}={value}")]


def options_of(settings: Settings) -> list[str]:
    """Return command-line options that give a command the settings of a test."""
    storage, rules = settings.storage, settings.resolution
    return as_options(
        {
            **topic_settings(settings.kafka),
            "storage.warehouse": storage.warehouse,
            "storage.checkpoint": storage.checkpoint,
            "resolution.transactionCheckMax": rules.transactionCheckMax,
            "state.buckets": settings.state.buckets,
            "state.shuffle_partitions": settings.state.shuffle_partitions,
        }
    )


def halfway_command(*arguments: str) -> list[str]:
    """Return the command line that runs `halfway` with this Python."""
    return [sys.executable, "-m", "halfway", *arguments]


def run_halfway(
    *arguments: str, limit_s: float = 120, cwd: Path = ROOT, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `halfway` in a process of its own; `environ` is added to this process's environment."""
    return subprocess.run(
        halfway_command(*arguments),
        cwd=cwd,
        env={**os.environ, **(environ or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s,
    )


def run(settings: Settings, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the settings of a test, in a process of its own."""
    return run_halfway(*arguments, *options_of(settings))


def facts(done: subprocess.CompletedProcess[str] | Result) -> Any:
    """Return what a command with --json printed. Fails if it failed, or printed anything else to stdout."""
    code = done.returncode if isinstance(done, subprocess.CompletedProcess) else done.exit_code
    assert code == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def invoke(settings: Settings, *arguments: str) -> Result:
    """Run a command in this process, which is quick because it uses the Spark session of the tests."""
    return CliRunner().invoke(app, [*arguments, *options_of(settings)])


def records(settings: Settings, topic: str) -> list[Message]:
    """Return all records of a topic except ticks, by partition and offset."""
    return [message for message in topic_records(settings.kafka.servers(), topic) if "TICK" not in headers_of(message)]


def groups_away(servers: str) -> list[str]:
    """Return the producer groups whose consumer group is known and empty. Earlier tests leave such groups behind."""
    kafka = AdminClient({"bootstrap.servers": servers})
    listed = kafka.list_consumer_groups(states={ConsumerGroupState.EMPTY}).result(30).valid or []
    return sorted(producer_groups(group.group_id for group in listed))
