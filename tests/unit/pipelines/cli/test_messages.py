"""`halfway messages` on tables in folders: what it prints, and that it needs no Java."""

import json
import signal
import subprocess
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from halfway.pipelines.cli.app import app
from tests.support.commands import halfway_command
from tests.support.message_tables import append, row
from tests.support.paths import ROOT
from tests.support.waiting import until


@pytest.fixture
def warehouse(tmp_path: Path) -> Path:
    append(tmp_path / "messages", [row((0, 1), 1, transaction_id="b", body=b"\xff\x1b[2Jb"), row((0, 0), 0, transaction_id="a", keys="k")])
    append(tmp_path / "messages", [row((1, 0), 2, transaction_id="c", topic="stock", tags=None, body=b"x" * 5_000)])
    return tmp_path


def invoke(warehouse: Path, *arguments: str) -> Result:
    places = {"warehouse": warehouse, "checkpoint": warehouse / "checkpoint"}
    return CliRunner().invoke(app, ["messages", *(f"--set=storage.{name}={place}" for name, place in places.items()), *arguments])


def ids(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return [json.loads(line)["transaction_id"] for line in result.stdout.splitlines()]


def test_messages_are_a_table_with_the_bookmark_at_its_end(warehouse: Path) -> None:
    result = invoke(warehouse)
    header, *lines = result.stdout.splitlines()
    assert header.split("  ")[0] == "committed at"
    assert [line.split()[1:] for line in lines] == [
        ["22:13:20.000+00:00", "orders", "paid", "k", "a", "0"],
        ["22:13:20.000+00:00", "orders", "paid", "b", r"\xff\x1b[2Jb"],
        ["22:13:20.000+00:00", "stock", "c", "x" * 200, "…", "5,000", "bytes"],
    ]
    assert result.stderr == "go on with --after 1.0\n"
    assert len({line.index(name) for line, name in zip(lines, ["orders", "orders", "stock"], strict=True)}) == 1


def test_each_message_is_a_line_of_json(warehouse: Path) -> None:
    first, *_ = invoke(warehouse, "--json").stdout.splitlines()
    facts = json.loads(first)
    assert list(facts) == [
        *("transaction_id", "incarnation", "topic", "queue_id", "tags", "keys", "properties", "producer_group"),
        *("born_at", "half_at", "committed_at", "check_times", "half_partition", "half_offset", "op_partition", "op_offset"),
        *("epoch", "batch_id", "body"),
    ]
    assert (facts["committed_at"], facts["properties"], facts["body"]) == ("2023-11-14T22:13:20+00:00", {"trace": "x"}, "0")
    assert [json.loads(line)["body"] for line in invoke(warehouse, "--json", "--body", "hex").stdout.splitlines()][1] == "ff1b5b324a62"
    assert "body" not in json.loads(invoke(warehouse, "--json", "--body", "none").stdout.splitlines()[0])


def test_bookmark_topic_and_tags_select(warehouse: Path) -> None:
    assert ids(invoke(warehouse, "--json", "--after", "0.0")) == ["b", "c"]
    assert ids(invoke(warehouse, "--json", "--topic", "stock")) == ["c"]
    assert ids(invoke(warehouse, "--json", "--tags", "sent || paid")) == ["a", "b"]
    ended = invoke(warehouse, "--json", "--after", "1.0")
    assert (ended.stdout, ended.stderr) == ("", "go on with --after 1.0\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--after", "1.1"], ["warning: the table ends at 1.0: nothing is shown before 1.1 is passed", "go on with --after 1.1"]),
        (["--topic", "nope"], ["no message of topic nope", "go on with --after 1.0"]),
        (["--tags", "sent || lost"], ["no message with tag lost or sent", "go on with --after 1.0"]),
        (
            ["--topic", "orders", "--tags", "sent", "--after", "0.1"],
            ["no message of topic orders with tag sent after 0.1", "go on with --after 1.0"],
        ),
    ],
)
def test_why_nothing_is_shown_is_said(warehouse: Path, arguments: list[str], said: list[str]) -> None:
    result = invoke(warehouse, "--json", *arguments)
    assert (result.exit_code, result.stdout, result.stderr.splitlines()) == (0, "", said)


def test_a_bookmark_is_ahead_of_a_table_without_messages(tmp_path: Path) -> None:
    append(tmp_path / "messages", [])
    assert "warning: the table holds no message yet: nothing is shown before 0.7 is passed\n" in invoke(tmp_path, "--after", "0.7").stderr


def test_wrong_usage_and_a_missing_table_are_named(warehouse: Path) -> None:
    wrong = invoke(warehouse, "--after", "7")
    assert (wrong.exit_code, "EPOCH.BATCH" in wrong.output) == (2, True)
    for tags in ("a &&", "a ||", "", "a && b"):
        wrong = invoke(warehouse, "--tags", tags)
        assert (wrong.exit_code, "several as in 'paid || refunded'" in " ".join(wrong.output.split())) == (2, True)
    missing = invoke(warehouse / "nothing")
    assert missing.exit_code == 1
    assert missing.stderr.startswith(f"error: there is no table {warehouse}/nothing/messages yet: run `halfway resolve`")


@pytest.mark.parametrize("command", ["messages", "relay"])
def test_a_table_whose_checkpoint_has_run_is_gone_and_not_yet_to_come(tmp_path: Path, command: str) -> None:
    (tmp_path / "checkpoint" / "offsets").mkdir(parents=True)
    (tmp_path / "checkpoint" / "offsets" / "0").touch()
    places = [part for name in ("warehouse", "checkpoint") for part in ("--set", f"storage.{name}={tmp_path / name}")]
    gone = CliRunner().invoke(app, [command, *places, "--set", "kafka.bootstrap_servers=127.0.0.1:1"])
    assert (gone.exit_code, gone.stdout) == (1, "")
    assert f"error: the checkpoint {tmp_path}/checkpoint has run before, but its table {tmp_path}/warehouse/messages is miss" in gone.stderr
    assert "set storage.warehouse to where its tables are" in gone.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_long_reading_with_the_bookmark_to_go_on_with(number: signal.Signals, warehouse: Path, tmp_path: Path) -> None:
    """Nobody reads what it prints, so that the signal comes while it prints the first batch."""
    for batch_id in (1, 2):
        append(warehouse / "messages", [row((1, batch_id), offset, transaction_id=f"{batch_id}-{offset}") for offset in range(1_000)])
    command = halfway_command("messages", "--json", "--after", "1.0", "--set", f"storage.warehouse={warehouse}")
    # Without a buffer here, `communicate` would miss what `readline` has read ahead.
    running = subprocess.Popen(command, cwd=tmp_path, bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert running.stdout is not None
        assert running.stdout.readline()
        running.send_signal(number)
        printed, error = running.communicate(timeout=30)
    finally:
        running.kill()
    assert running.returncode == 128 + number
    assert (len(printed.splitlines()), error) == (999, b"go on with --after 1.1\n")


def test_follow_shows_new_messages_and_ends_with_the_bookmark(warehouse: Path, tmp_path: Path) -> None:
    """In a process of its own, without Java, and ended as a service manager does."""
    out, err = tmp_path / "out", tmp_path / "err"
    command = halfway_command("messages", "--follow", "--json", "--after", "1.0", "--set", f"storage.warehouse={warehouse}")
    environ = {"PATH": "/nonexistent", "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    with out.open("wb") as stdout, err.open("wb") as stderr:
        running = subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=stdout, stderr=stderr)
    try:
        for batch_id in (1, 2):
            append(warehouse / "messages", [row((1, batch_id), batch_id, transaction_id=f"new{batch_id}")])
            until(lambda: f"new{batch_id}" in out.read_text(), "the new message")  # noqa: B023
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0
    finally:
        running.kill()
    assert len(out.read_text().splitlines()) == 2
    assert err.read_text() == "go on with --after 1.2\n"
