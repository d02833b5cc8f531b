"""`halfway demo` as a user runs it, and its verdict on wrong tables."""

import json
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from halfway.conf.loader import load_settings
from halfway.pipelines.demo.run import time_limit_s
from halfway.pipelines.demo.traffic import PlannedTransaction, Traffic, TransactionEnd
from halfway.pipelines.demo.verdict import DemoJudge
from halfway.pipelines.demo.watch import TopicWatch
from halfway.pipelines.kafka.admin import partition_counts
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.pipelines.local.broker import LocalBroker
from halfway.pipelines.storage.delta_tables import table_path
from halfway.pipelines.storage.locks import is_in_use
from halfway.schemas.settings import Settings, StorageSettings
from halfway.schemas.state_format import FORMAT_VERSION
from halfway.schemas.tables import Table
from tests.support.commands import as_options, halfway_command, run_halfway
from tests.support.delta_rows import ids_in
from tests.support.kafka_topics import MakeTopics, patient_admin, unique_topics
from tests.support.paths import ROOT
from tests.support.waiting import until

QUICK = {
    "resolution.transactionTimeOut": "2s",
    "resolution.transactionCheckInterval": "2s",
    "resolution.transactionCheckMax": 3,
}
_START_LIMIT_S = 90


@pytest.fixture
def overrides(broker: LocalBroker, tmp_path: Path) -> dict[str, object]:
    """Settings of a job with its own topics, tables and checkpoint."""
    storage = {"storage.warehouse": str(tmp_path / "warehouse"), "storage.checkpoint": str(tmp_path / "checkpoint")}
    return {**unique_topics(broker), **storage, "state.buckets": 8, "state.shuffle_partitions": 2}


def options(overrides: Mapping[str, object]) -> list[str]:
    return ["--config", "conf/default.yaml", *as_options(overrides)]


def run_demo(overrides: Mapping[str, object], *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_halfway("demo", *arguments, *options(overrides), limit_s=200)


@contextmanager
def running_job(overrides: Mapping[str, object], log_file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `halfway resolve`, and yield it after its first batch."""
    status = Path(str(overrides["storage.checkpoint"])) / "status.json"
    before = status.read_bytes() if status.exists() else b""
    command = halfway_command("resolve", *options({**overrides, **QUICK}))
    with log_file.open("wb") as log:
        job = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until(lambda: job.poll() is not None or (status.exists() and status.read_bytes() != before), "a batch of the job", _START_LIMIT_S)
        assert job.poll() is None, log_file.read_text()
        yield job
    finally:
        job.terminate()
        try:
            job.wait(60)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()


def ids(overrides: Mapping[str, object], table: str) -> list[str]:
    return ids_in(f"{overrides['storage.warehouse']}/{table}")


@pytest.mark.timeout(300)
@pytest.mark.long
def test_a_demo_succeeds_also_a_second_time_on_the_same_tables(overrides: dict[str, object], tmp_path: Path) -> None:
    first = run_demo(overrides, "--json", "--messages", "30")
    assert first.returncode == 0, first.stderr
    counts = {"committed": 21, "rolled_back": 10, "checked": 13, "discarded": 2, "quarantined": 3, "pending": 0}
    tables = {name: f"{overrides['storage.warehouse']}/{name}" for name in ("messages", "discarded", "quarantine")}
    told = json.loads(first.stdout)
    assert told.pop("prefix").startswith("demo-")
    assert told.pop("seconds") > 0
    assert told == {"ok": True, "expected": counts, "found": counts, "problems": [], "tables": tables}
    assert "no job is running: starting one" in first.stderr
    assert first.stderr.count("created the topic") == 3

    with running_job({**overrides, **QUICK}, tmp_path / "job.log") as job:
        second = run_demo({**overrides, **QUICK}, "--messages", "4")
        assert job.poll() is None, "the demo must not stop a job that it did not start"
    assert second.returncode == 0, second.stdout + second.stderr
    assert "a job is running: the demo uses it" in second.stdout
    assert "created the topic" not in second.stdout
    assert second.stdout.splitlines()[-1].startswith("ok: demo-")
    found = {line.split()[0]: line.split()[-2] for line in second.stdout.splitlines() if line.endswith(" ok")}
    assert found == {"committed": "4", "rolled": "1", "checked": "5", "discarded": "2", "quarantined": "3", "pending": "0"}

    messages = ids(overrides, "messages")
    assert len(messages) == len(set(messages)) == 21 + 4
    assert len(ids(overrides, "discarded")) == 4
    assert len(ids(overrides, "quarantine")) == 6


def test_a_job_that_cannot_start_ends_the_demo_with_its_error(overrides: dict[str, object]) -> None:
    checkpoint = Path(str(overrides["storage.checkpoint"]))
    checkpoint.mkdir()
    topics = {name: overrides[f"kafka.{name}"] for name in ("half_topic", "op_topic")}
    facts = {
        "format_version": FORMAT_VERSION,
        "query_id": "q",
        "epoch": 0,
        "buckets": 3,
        "halves_since_ms": 0,
        "taken_at": {},
        "remembered_ms": 60_000,
        "bucket_keys": [0, 1, 2],
        "bucket_secret": "",
        "topic_ids": {},
        "starting_offsets": "earliest",
        **topics,
    }
    (checkpoint / "halfway.json").write_text(json.dumps(facts))
    ended = run_demo(overrides, "--json")
    assert (ended.returncode, ended.stdout) == (1, "")
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("error: the job ended with exit code 1: the checkpoint")
    assert "state.buckets = 3" in last


@pytest.mark.slow
def test_sigterm_ends_the_demo_and_its_job(overrides: dict[str, object]) -> None:
    command = halfway_command("demo", "--json", *options(overrides))
    demo = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    checkpoint = Path(str(overrides["storage.checkpoint"]))
    storage = StorageSettings(checkpoint=str(checkpoint))
    try:
        until(lambda: demo.poll() is not None or (checkpoint / "status.json").exists(), "the start of a job", _START_LIMIT_S)
        assert is_in_use(storage)
        demo.send_signal(signal.SIGTERM)
        out, err = demo.communicate(timeout=60)
    finally:
        if demo.poll() is None:
            demo.kill()
    assert (demo.returncode, out) == (128 + signal.SIGTERM, ""), err
    assert not is_in_use(storage), "the demo's job is still running"


def test_the_time_limit_is_the_time_of_a_discard_and_a_minute() -> None:
    assert time_limit_s(load_settings(environ={}, overrides=QUICK)) == 4 * 2 + 2 + 60


@pytest.fixture
def demo_settings(topics: MakeTopics, tmp_path: Path) -> Settings:
    return topics(overrides={"storage.warehouse": str(tmp_path / "warehouse"), "storage.checkpoint": str(tmp_path / "checkpoint")})


def test_a_topic_that_the_broker_does_not_know_for_a_moment_is_read_later(demo_settings: Settings) -> None:
    kafka = demo_settings.kafka
    watch, client = TopicWatch(kafka, "demo-"), patient_admin(kafka)
    assert watch.read()
    client.delete_topics([kafka.op_topic])[kafka.op_topic].result()
    until(lambda: not partition_counts(client, [kafka.op_topic]), "the end of the topic")
    assert not watch.read()
    create_topics(demo_settings, 2)
    assert watch.read()


def row(planned: PlannedTransaction, **changes: object) -> dict[str, object]:
    """Return a row of `messages` or `discarded` as the job writes it."""
    own = {"body": planned.body, "tags": planned.tags, "keys": planned.keys, "producer_group": planned.group}
    return {"transaction_id": planned.transaction_id, "topic": "TopicTest1234", **own, "check_times": 0, "reason": "check_max", **changes}


def problems(settings: Settings, traffic: Traffic, messages: list[dict[str, object]], discarded: list[dict[str, object]]) -> list[str]:
    for table, rows in ((Table.MESSAGES, messages), (Table.DISCARDED, discarded)):
        if rows:
            write_deltalake(table_path(settings.storage, table), pa.Table.from_pylist(rows))
    judge = DemoJudge(settings, traffic)
    verdict = judge.judge()
    assert not verdict.is_settled
    return [problem for problem in verdict.problems if not problem.startswith("quarantined for")]


def test_right_tables_have_no_problem_and_rows_of_other_runs_do_not_count(demo_settings: Settings) -> None:
    traffic, other = Traffic(demo_settings, 3), Traffic(demo_settings, 3)
    committed = [planned for planned in traffic.planned.values() if planned.end is TransactionEnd.COMMITTED]
    theirs = [row(planned, body=b"other") for planned in other.planned.values()]
    assert problems(demo_settings, traffic, [*map(row, committed), *theirs], []) == []


def test_each_wrong_row_is_reported(demo_settings: Settings) -> None:
    traffic = Traffic(demo_settings, 6)
    unknown, committed, rolled_back, _, altered, _, stranger, silent, _ = traffic.planned.values()
    delayed = row(stranger, transaction_id=traffic.delayed_id)
    messages = [
        row(unknown, check_times=1),
        row(committed),
        row(committed),
        row(rolled_back),
        row(altered, body=altered.body + b"\n", tags="TagX"),
        delayed,
    ]
    discarded = [row(silent, reason="expired"), row(stranger)]
    assert sorted(problems(demo_settings, traffic, messages, discarded)) == sorted(
        [
            f"{unknown.transaction_id}: check_times is 1, the check topic has []",
            f"{committed.transaction_id} has 2 outcomes: committed, committed",
            f"{rolled_back.transaction_id} was committed, expected rolled_back",
            f"{altered.transaction_id}: body, tags differ from what was sent",
            f"{traffic.delayed_id} was committed, and must not have an outcome",
            f"{silent.transaction_id} was discarded for expired, expected check_max",
            f"{stranger.transaction_id} was discarded, expected committed",
        ]
    )
