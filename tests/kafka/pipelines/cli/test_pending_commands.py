"""`pending`, `commit`, `rollback` and `status`, with and without a running job."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from halfway.pipelines.storage import locks
from halfway.pipelines.storage.locks import job_lock
from halfway.schemas.settings import Settings
from halfway.transforms.views import quiet
from tests.support.commands import facts, groups_away, invoke, records, run
from tests.support.job_process import JobProcess
from tests.support.job_world import START_MS, MakeWorld, World, half_headers
from tests.support.kafka_topics import MakeTopics, make_topics_anew
from tests.support.waiting import until


@pytest.fixture
def settings(topics: MakeTopics, tmp_path: Path) -> Settings:
    storage = {"storage.warehouse": str(tmp_path / "warehouse"), "storage.checkpoint": str(tmp_path / "checkpoint")}
    return topics(overrides={**storage, "state.buckets": 4, "state.shuffle_partitions": 1})


@pytest.fixture
def job(settings: Settings, tmp_path: Path) -> Iterator[JobProcess]:
    """A job in its own process. Its first check is an hour away."""
    running = JobProcess(settings, tmp_path)
    running.start(**{"trigger.interval": "3s"})
    try:
        until((tmp_path / "checkpoint" / "status.json").exists, "the first batch")
        yield running
    finally:
        running.kill()


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_an_operator_settles_what_is_pending_while_the_job_runs(settings: Settings, job: JobProcess, world_of_job: World) -> None:
    """Each command runs beside the job, once in its own process with its own Spark, and then in this process."""
    w = world_of_job
    w.half("a")
    w.half("b")
    w.half("c", PGROUP=b"h", INCARNATION=b"2")
    rows: list[dict[str, Any]] = []

    def are_pending(*ids: str) -> bool:
        rows[:] = facts(invoke(settings, "pending", "--json"))
        return sorted(row["transaction_id"] for row in rows) == [*ids]

    until(lambda: are_pending("a", "b", "c") and all(row["age_ms"] > 0 for row in rows), "all halves in the state, and a tick after them")
    columns = ["transaction_id", "incarnation", "producer_group", "topic", "age_ms", "check_times", "next_due_ms", "waits_for"]
    assert [list(row) for row in rows] == [columns] * 3
    ages_ms = [row["age_ms"] for row in rows]
    assert ages_ms == sorted(ages_ms, reverse=True)
    assert max(ages_ms) < 200_000
    [c] = [row for row in rows if row["transaction_id"] == "c"]
    assert (c["producer_group"], c["incarnation"], c["topic"], c["check_times"]) == ("h", 2, "orders", 0)
    shown = run(settings, "pending", "--group", "h")
    assert shown.returncode == 0
    assert shown.stderr == "", "no Spark was started"
    assert len([line for line in shown.stdout.splitlines() if line.strip().startswith("c ")]) == 1
    assert "WARN" not in shown.stdout + shown.stderr

    sent = facts(run(settings, "commit", "c", "--json"))
    assert (sent["transaction_id"], sent["producer_group"], sent["incarnation"], sent["action"]) == ("c", "h", 2, "COMMIT")
    done = run(settings, "rollback", "b", "--remark", "order 17 was cancelled")
    assert (done.returncode, done.stdout.startswith("sent ROLLBACK of b (group g, incarnation 0)")) == (0, True), done.stderr
    job.until(lambda: job.delivered() == ["c"], "the message committed by hand")
    until(lambda: are_pending("a"), "the end of the batch")
    ops = {op.key(): dict(op.headers() or ()) for op in records(settings, settings.kafka.op_topic)}
    assert ops[b"c"]["INCARNATION"] == b"2"
    assert ops[b"b"]["REMARK"].startswith(b"by hand, by ")
    assert ops[b"b"]["REMARK"].endswith(b": order 17 was cancelled")
    again = invoke(settings, "rollback", "c")
    assert (again.exit_code, again.stdout) == (1, "")
    assert "error: the transaction c is not pending: it was committed at " in again.stderr

    status: dict[str, Any] = {}

    def says_who_is_away() -> bool:
        status.update(facts(run(settings, "status", "--json")))
        return sorted(status["absent_groups"]) == groups_away(settings.kafka.servers())

    until(says_who_is_away, "the groups that are away on this broker")
    # The state of the first batch, which may come before the first tick, has no horizon that a rate could begin at.
    until(lambda: says_who_is_away() and status["rates_over_s"] is not None, "rates")
    assert (status["is_running"], status["pending"]) == (True, 1)
    counted = {name: status["totals"][name] for name in ("halves", "committed", "rolled_back")}
    assert counted == {"halves": 3, "committed": 1, "rolled_back": 1}
    assert 0 < status["horizon_lag_ms"] < 60_000
    assert status["last_batch"]["batch_id"] >= status["batch_id"] > 1
    assert set(status["unread"]) == {settings.kafka.half_topic, settings.kafka.op_topic}
    assert status["rates_over_s"] > 0
    assert job.process is not None
    assert job.process.poll() is None, "the job was disturbed"
    assert "Traceback" not in job.log


@pytest.fixture
def world_of_job(settings: Settings, spark: SparkSession) -> World:
    """A world that produces records for the job in its own process."""
    return World(spark, settings)


def test_pending_filters_and_shows_what_each_transaction_waits_for(world: MakeWorld) -> None:
    w = world(**{"resolution.transactionCheckMax": 1})
    w.half("asked", 0)
    w.half("[young]", 6_000)
    w.half("away", 1, PGROUP=b"h")
    w.tick(6_001)
    w.resolve()
    w.tick(6_100, w.away("h"))
    w.resolve()
    shown = invoke(w.settings, "pending")
    assert "no job is running" in shown.stderr
    table = shown.stdout
    assert [line.split()[0] for line in table.splitlines() if "orders" in line] == ["asked", "away", "[young]"]
    assert "no check brought a verdict" in table
    assert "which is away" in table
    due = START_MS + 12_001
    listed = facts(invoke(w.settings, "pending", "--json"))
    young = {"producer_group": "g", "topic": "orders", "age_ms": 100, "check_times": 0, "next_due_ms": due}
    assert listed[2] == {"transaction_id": "[young]", "incarnation": 0, **young, "waits_for": "its verdict"}
    assert [row["waits_for"] for row in listed[:2]] == ["its discard: no check brought a verdict", "its group, which is away or behind"]

    def ids(*options: str) -> list[str]:
        return [row["transaction_id"] for row in facts(invoke(w.settings, "pending", "--json", *options))]

    assert ids("--limit", "2") == ["asked", "away"]
    assert ids("--group", "g") == ["asked", "[young]"]
    assert ids("--older-than", "100") == ["asked", "away"]
    assert ids("--older-than", "99ms") == ["asked", "away", "[young]"]
    assert ids("--group", "nobody") == []
    w.op("asked", b"ROLLBACK", 6_200)
    w.op("[young]", b"ROLLBACK", 6_200)
    w.op("away", b"ROLLBACK", 6_200, PGROUP=b"h")
    nobody = invoke(w.settings, "pending", "--group", "nobody")
    assert nobody.stdout == "none of the 3 pending transactions is of this group and age\n"
    w.resolve()
    assert re.fullmatch(r"nothing is pending as of batch 2 \(\S+ m?s ago\)\n", invoke(w.settings, "pending").stdout)


def test_pending_says_nothing_of_a_job_that_it_cannot_see(world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the checkpoint is in an object store: whoever starts a second job there may lose messages."""
    w = world()
    w.half("a")
    w.tick(1_000)
    w.resolve()
    monkeypatch.setattr(locks, "is_in_use", lambda _: None)
    assert invoke(w.settings, "pending").stderr == ""
    monkeypatch.setattr(quiet, "_QUIET_MS", -60_000)
    assert invoke(w.settings, "pending").stderr.startswith("if the job is running, its last batch ended ")


def test_status_refuses_to_count_what_is_unread_in_topics_that_were_recreated(world: MakeWorld) -> None:
    w = world()
    w.half("a")
    w.tick(1_000)
    w.resolve()
    make_topics_anew(w.settings)
    status = facts(invoke(w.settings, "status", "--json"))
    assert status["unread"] is None
    assert "it was recreated" in status["kafka_error"]


def test_pending_and_status_work_before_the_first_batch(world: MakeWorld) -> None:
    w = world()
    w.half("a")
    with job_lock(w.settings.storage):  # a job that starts has made the folder
        shown = invoke(w.settings, "pending", "--json")
        assert facts(shown) == []
        assert "has no batch yet" in shown.stderr
        assert invoke(w.settings, "pending").stdout == "nothing is pending\n"
        status = facts(invoke(w.settings, "status", "--json"))
        assert "has no batch yet" in invoke(w.settings, "status").stderr
        settled = invoke(w.settings, "commit", "a")
        assert (settled.exit_code, settled.stdout) == (1, "")
        assert settled.stderr.startswith("error: nothing tells whether a is pending: the checkpoint")
    assert (status["batch_id"], status["last_batch"], status["horizon_ms"], status["rates"]) == (None, None, None, None)
    assert status["unread"] == {w.settings.kafka.half_topic: 1, w.settings.kafka.op_topic: 0}
    for command in ("pending", "status"):  # that job has failed: its lock is all that is left
        refused = invoke(w.settings, command)
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert refused.stderr.startswith("error: there is no state in")


def test_status_counts_unread_records_and_computes_rates_by_the_horizon(world: MakeWorld) -> None:
    w = world()
    w.half("a")
    w.tick(1_000)
    w.resolve()
    w.half("b")
    w.half("c", PGROUP=b"h")
    w.op("a", b"COMMIT", 1_500)
    w.tick(3_000, w.away("h"))
    w.resolve()
    w.half("d")
    w.produce_odd("e", b"", half_headers())
    status = facts(invoke(w.settings, "status", "--json"))
    assert status["horizon_ms"] == START_MS + 3_000
    assert status["unread"] == {w.settings.kafka.half_topic: 2, w.settings.kafka.op_topic: 0}
    assert (status["rates_over_s"], status["rates"]["halves"], status["rates"]["committed"]) == (2.0, 1.0, 0.5)
    assert status["pending_by_group"] == [
        {"producer_group": "g", "pending": 1, "oldest_age_ms": 3_000, "is_absent": False},
        {"producer_group": "h", "pending": 1, "oldest_age_ms": 3_000, "is_absent": True},
    ]
    assert (status["is_running"], status["absent_groups"]) == (False, ["h"])
    table = invoke(w.settings, "status").stdout
    assert "no: time stands still" in table
    assert "2023-11-14 22:13:23 UTC" in table


def test_status_without_kafka_shows_the_rest(world: MakeWorld) -> None:
    w = world()
    w.half("a")
    w.tick(1_000)
    w.resolve()
    kafka = w.settings.kafka.model_copy(update={"bootstrap_servers": "127.0.0.1:1"})
    status = facts(invoke(w.settings.model_copy(update={"kafka": kafka}), "status", "--json"))
    assert (status["pending"], status["unread"]) == (1, None)
    assert "Kafka" in status["kafka_error"]


def test_commit_of_an_id_that_is_not_pending_is_refused_with_its_outcome(world: MakeWorld) -> None:
    w = world(**{"resolution.transactionCheckMax": 1})
    w.half("silent", 0)
    w.half("rolled", 0)
    w.op("rolled", b"ROLLBACK", 1)
    w.tick(6_001)
    w.resolve()
    w.tick(36_001)
    w.resolve()
    before = len(records(w.settings, w.settings.kafka.op_topic))
    outcomes = {
        "silent": "it was discarded (check_max, after 1 checks): `halfway replay silent` resends it",
        "rolled": "it was rolled back",
        "never": "up to batch 1 its half was not read",
    }
    for transaction_id, outcome in outcomes.items():
        done = invoke(w.settings, "commit", transaction_id)
        assert (done.exit_code, done.stdout) == (1, "")
        assert f"error: the transaction {transaction_id} is not pending: {outcome}" in done.stderr
    assert len(records(w.settings, w.settings.kafka.op_topic)) == before, "nothing was sent"


def test_tables_that_are_gone_are_named_and_say_nothing_of_a_transaction(world: MakeWorld) -> None:
    w = world()
    w.half("a", 0)
    w.op("a", b"COMMIT", 1)
    w.tick(2)
    w.resolve()
    warehouse = Path(w.settings.storage.warehouse)
    warehouse.rename(warehouse.with_name("elsewhere"))
    for command in (["commit", "a"], ["rollback", "never"], ["erase", "a"], ["replay", "--all"], ["messages"]):
        done = invoke(w.settings, *command)
        assert (done.exit_code, done.stdout) == (1, ""), command
        assert f"error: the checkpoint {w.settings.storage.checkpoint} has run before, but its table " in done.stderr, command


def test_commit_with_group_and_incarnation_does_not_read_the_checkpoint(settings: Settings) -> None:
    done = run(settings, "commit", "x", "--group", "h", "--incarnation", "3", "--json")
    assert facts(done)["topic"] == settings.kafka.op_topic
    assert done.stderr == "", "no Spark was started"
    [op] = records(settings, settings.kafka.op_topic)
    headers = dict(op.headers() or ())
    assert (op.key(), headers["ACTION"], headers["PGROUP"], headers["INCARNATION"]) == (b"x", b"COMMIT", b"h", b"3")
    assert (op.partition(), op.offset()) == (facts(done)["partition"], facts(done)["offset"])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["commit", "x", "--incarnation", "1"], 2, "--group"),
        (["commit"], 2, "ID"),
        (["rollback", "x", "--group", ""], 1, "error: bad_header: producer_group"),
        (["rollback", "y" * 256, "--group", "g"], 1, "error: key_too_long"),
        (["pending", "--older-than", "soon"], 2, "--older-than"),
        (["replay"], 2, "--all"),
        (["replay", "x", "--all"], 2, "--all"),
        (["replay", "x", "--reason", "expired"], 2, "--all"),
        (["replay", "--all", "--reason", "boredom"], 2, "check_max"),
        (["quarantine", "--reason", "check_max"], 2, "conflicting_verdict"),
    ],
)
def test_wrong_usage_is_refused(settings: Settings, arguments: list[str], code: int, message: str) -> None:
    done = invoke(settings, *arguments)
    assert (done.exit_code, done.stdout) == (code, "")
    assert message in done.stderr


def test_an_unreachable_kafka_is_reported_in_one_line(settings: Settings) -> None:
    kafka = settings.kafka.model_copy(update={"bootstrap_servers": "127.0.0.1:1"})
    done = run(settings.model_copy(update={"kafka": kafka}), "commit", "x", "--group", "g")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("error: ")
