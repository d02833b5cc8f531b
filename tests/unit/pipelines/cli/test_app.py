"""The command line: help, exit codes, and errors in one line."""

import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from confluent_kafka import KafkaError, KafkaException
from typer.testing import CliRunner

from halfway.pipelines.cli.app import app
from halfway.pipelines.cli.options import HalfwayGroup
from halfway.schemas.errors import SetupError
from tests.support.commands import run_halfway
from tests.support.paths import ROOT

pytestmark = pytest.mark.usefixtures("empty_directory")

UNREACHABLE = "127.0.0.1:1"
COMMANDS = [
    [],
    ["broker"],
    ["broker", "start"],
    ["broker", "stop"],
    ["broker", "status"],
    ["topics"],
    ["topics", "create"],
    ["transactions"],
    ["transactions", "ddl"],
    ["resolve"],
    ["demo"],
    *([name] for name in ("status", "messages", "pending", "commit", "rollback", "replay", "quarantine", "erase")),
    ["relay"],
    ["doctor"],
    ["optimize"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage: halfway" in result.output.replace("Usage: root", "Usage: halfway")


@pytest.mark.parametrize("command", [[], ["broker"], ["topics"], ["transactions"]], ids=" ".join)
def test_a_group_alone_shows_its_help(command: list[str]) -> None:
    assert "Commands" in CliRunner().invoke(app, command).output


def test_the_version_is_that_of_the_package() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"halfway {version('halfway')}\n")


@pytest.mark.parametrize(("tree", "is_warned"), [("another", True), ("its own", False), ("none", False)])
def test_the_code_of_another_source_tree_is_named(tree: str, is_warned: bool) -> None:
    """A copy of a folder, with its .venv, runs the code of the original on its own data."""
    if tree == "another":
        Path("src", "halfway").mkdir(parents=True)
        Path("src", "halfway", "__init__.py").touch()
    elif tree == "its own":
        Path("src").symlink_to(ROOT / "src")
    result = CliRunner().invoke(app, ["broker", "status", "--json"])
    assert json.loads(result.stdout)["running"] is False
    warning = (
        f"warning: this command is the code in {ROOT}/src/halfway, not that of this source tree: `make setup` installs that one in .venv\n"
    )
    assert result.stderr == (warning if is_warned else "")


def test_the_command_runs_from_a_zip_in_the_source_tree() -> None:
    """So does spark-submit with `--py-files halfway.zip`."""
    package = ROOT / "src" / "halfway"
    with zipfile.ZipFile("halfway.zip", "w") as archive:
        for folder, _, names in os.walk(package, followlinks=True):
            for path in (Path(folder, name) for name in names if not name.endswith(".pyc")):
                archive.write(path, path.relative_to(package.parent))
    Path("src").symlink_to(ROOT / "src")
    program = "import sys; sys.path.insert(0, 'halfway.zip'); from halfway.pipelines.cli.app import app; app(prog_name='halfway')"
    done = subprocess.run([sys.executable, "-c", program, "broker", "status", "--json"], capture_output=True, text=True, check=False)
    assert (json.loads(done.stdout)["running"], done.stderr) == (False, "")


def test_a_broker_never_started_has_no_address() -> None:
    result = CliRunner().invoke(app, ["broker", "status", "--json"])
    assert (result.exit_code, result.output) == (0, '{"running": false, "bootstrap_servers": null}\n')


def test_what_a_command_writes_is_for_its_user_alone() -> None:
    before = os.umask(0o000)
    try:
        CliRunner().invoke(app, ["broker", "status"])
    finally:
        during = os.umask(before)
    assert during == 0o077


def test_stopping_a_broker_that_does_not_run_is_no_error() -> None:
    result = CliRunner().invoke(app, ["broker", "stop"])
    assert (result.exit_code, result.output) == (0, f"the broker of {Path.cwd()}/.halfway/broker was not running\n")
    assert not Path(".halfway").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["broker", "start", "--port", "0"],
        ["broker", "start", "--port", "many"],
        ["topics", "create", "--partitions", "0"],
        ["topics", "create", "--replication", "0"],
        ["topics", "create", "--real", "orders", "--real", ""],
        ["topics", "create", "--real", "transactions.op"],
        ["topics", "create", "--real", "__consumer_offsets"],
        ["topics", "create", "--set", "no-equals-sign"],
        ["topics", "create", "--set", "=1"],
        ["topics", "create", "--no-such-option"],
        ["replay", "order-\udcfc"],
        ["erase", "order-17", "--group", "caf\udce9"],
    ],
    ids=lambda arguments: ascii(" ".join(arguments)),
)
def test_wrong_usage_exits_with_code_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["topics", "create"], "error: no Kafka is configured: "),
        (["topics", "create", "--config", "none.yaml"], "error: cannot read the configuration none.yaml: "),
        (
            ["topics", "create", "--set", "state.bucket=3"],
            "error: --set state.bucket: unknown setting 'state.bucket'; did you",
        ),
        (["topics", "create", "--set", "kafka.op_topic=a b"], "error: kafka.op_topic: the name of a topic has 1 to"),
        (["topics", "create", "--set", "relay.allow=orders"], "error: relay.allow: expected JSON, such as"),
        (["erase", "order-17", "--set", "kafka.bootstrap_servers=127.0.0.1:1"], "error: there is no table"),
        (["replay", ""], "error: "),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(arguments: list[str], error: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith(error)


def test_a_known_error_is_one_line_and_a_defect_keeps_its_traceback() -> None:
    own = typer.Typer(cls=HalfwayGroup, pretty_exceptions_enable=False)

    @own.command()
    def known() -> None:
        raise SetupError("two\n lines")

    @own.command()
    def forbidden() -> None:
        raise PermissionError(13, "Permission denied", "/data/messages")

    @own.command()
    def full() -> None:
        raise OSError(28, "No space left on device", "/data/log")

    @own.command()
    def kafka() -> None:
        raise KafkaException(KafkaError(KafkaError._FATAL, "the producer was fenced"))

    @own.command()
    def extra() -> None:
        raise ModuleNotFoundError(name="deltalake")

    @own.command()
    def defect() -> None:
        raise ZeroDivisionError

    for command, told in [
        ("known", "two lines"),
        ("forbidden", "/data/messages: Permission denied: run this as its user, or give this user the right to it"),
        ("full", "cannot write /data/log: No space left on device; `halfway doctor` shows what is free"),
        ("kafka", "Kafka refuses this, or has failed: the producer was fenced"),
        ("extra", "this command needs deltalake, which is not installed: pip install '.[tables]' in a clone of Halfway"),
    ]:
        result = CliRunner().invoke(own, [command])
        assert (result.exit_code, result.stderr) == (1, f"error: {told}\n")
    assert isinstance(CliRunner().invoke(own, ["defect"]).exception, ZeroDivisionError)


def test_an_unreachable_kafka_is_reported_in_one_line_within_40_s(tmp_path: Path) -> None:
    done = run_halfway("topics", "create", "--set", f"kafka.bootstrap_servers={UNREACHABLE}", cwd=tmp_path, limit_s=40)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("error: Kafka cannot be reached")
    assert "Connection refused" in done.stderr
