"""Helpers of the tests with TLS, passwords and ACLs: the parts in docs/security.md, and commands run as a part."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import Result
from confluent_kafka.admin import AclOperation, ResourceType
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from halfway.conf.loader import load_settings
from halfway.pipelines.cli.app import app
from halfway.schemas.settings import Settings
from tests.support.paths import ROOT
from tests.support.secure_broker import Right

PAGE = (ROOT / "docs" / "security.md").read_text()
PASSWORD = 'p"a\\ss;word='
SECRET = "ss;word="
"""A part of it that neither JSON nor `repr` changes."""
USERS = {"job": 'job "7"; \\', "client": "client", "operator": "operator", "setup": "setup", "doctor": "doctor", "relay": "relay"}
LIMIT_S = 60.0
_RESOURCES = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "groups": ResourceType.GROUP,
    "transactional-id": ResourceType.TRANSACTIONAL_ID,
}
_OPERATIONS = {operation.name.title().replace("_", ""): operation for operation in AclOperation}
HALF, OP, CHECK = "transactions.half", "transactions.op", "transactions.check"


def redacted(spark: SparkSession, options: dict[str, str]) -> dict[str, str]:
    """Return options as Spark displays them."""
    jvm = spark._jvm
    assert jvm is not None
    as_scala = jvm.org.apache.spark.api.python.PythonUtils.toScalaMap(options)
    shown = jvm.org.apache.spark.sql.internal.SQLConf.get().redactOptions(as_scala)
    return {name: shown.apply(name) for name in options}


def rights_of(part: str) -> list[Right]:
    """Return the rights of one part, read from docs/security.md."""
    rows = re.findall(rf"^\| {part} \| (topic|groups?|transactional-id) `([^`]+)` \| ([A-Za-z, ]+) \|", PAGE, re.MULTILINE)
    return [
        Right(_RESOURCES[kind], name.removesuffix("*"), _OPERATIONS[operation], name.endswith("*"))
        for kind, name, operations in rows
        for operation in operations.split(", ")
    ]


Configure = Callable[..., Path]
"""What the fixture `configure` of tests/kafka/conftest.py returns."""
TakeAway = Callable[[str, Right], None]
"""What the fixture `without` of tests/kafka/conftest.py returns."""


def run(config: Path, *command: str) -> Result:
    """Run a command in this process, with the Spark session of the tests."""
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, [*command, "--config", str(config)])


def refused(config: Path, *command: str) -> str:
    """Run a command that must fail in time with one line, after that of a start, and return the line."""
    started = time.monotonic()
    done = run(config, *command)
    assert time.monotonic() - started < LIMIT_S
    assert done.exit_code == 1, done.output
    assert isinstance(done.exception, SystemExit), done.exception
    *start, line = done.stderr.strip().splitlines()
    assert all("event=start" in told for told in start), start
    assert line.startswith("error: ")
    assert SECRET not in done.stderr
    return line


def facts(done: Result) -> Any:
    """Return what a command with --json printed."""
    assert done.exit_code == 0, done.output
    assert SECRET not in done.output
    return json.loads(done.stdout)


def settings_in(config: Path) -> Settings:
    return load_settings(config, environ={})


def named(right: Right) -> str:
    """Return how an error names a missing right."""
    kind = {ResourceType.TOPIC: "topic", ResourceType.TRANSACTIONAL_ID: "transactional-id"}.get(right.kind, "group")
    operation = {value: name for name, value in _OPERATIONS.items()}[right.operation]
    return f"may not {operation} {kind} {right.name}"
