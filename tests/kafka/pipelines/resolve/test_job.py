"""The job from end to end: records in Kafka, rows in Delta, requests in the check topic."""

import os
import signal
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from confluent_kafka import Producer

from halfway.pipelines.kafka.admin import admin_client
from halfway.pipelines.resolve import sinks
from halfway.pipelines.resolve.sent_checks import SentChecks
from halfway.pipelines.resolve.ticks import TickPublisher
from halfway.schemas.errors import CheckpointInUseError, JobFailedError, OwnershipError, TopicError
from halfway.schemas.headers import Source
from halfway.schemas.outcomes import Count, Kind
from halfway.schemas.tables import Table
from tests.support.job_process import JobProcess
from tests.support.job_world import START_MS, MakeWorld, World
from tests.support.kafka_topics import MakeTopics, delete_records, make_topics_anew


def at(ms: int) -> datetime:
    """Return a time as PySpark returns it from a table: naive, in the time zone of this machine."""
    return datetime.fromtimestamp((START_MS + ms) / 1000, UTC).astimezone().replace(tzinfo=None)


def table_version(world: World, table: Table) -> int:
    return len(list((Path(world.settings.storage.warehouse) / table / "_delta_log").glob("*.json")))


def test_r1_a_committed_half_is_one_row_with_all_its_headers(world: MakeWorld) -> None:
    w = world()
    body = bytes(range(256)) * 5
    sent = {
        "REAL_QID": b"3",
        "TAGS": b"TagA",
        "KEYS": b"k1 k2",
        "BORN_TIMESTAMP": b"1699999999999",
        "INCARNATION": b"2",
        "own": "größe".encode(),
    }
    partition, offset = w.half("a", 10, body, **sent)
    op_partition, op_offset = w.op("a", b"COMMIT", 20, INCARNATION=b"2")
    w.half("b", 11)
    w.op("b", b"ROLLBACK", 12)
    w.tick(1_000)
    w.resolve()
    [row] = w.rows(Table.MESSAGES)
    assert row.asDict() == {
        "transaction_id": "a",
        "topic": "orders",
        "queue_id": 3,
        "tags": "TagA",
        "keys": "k1 k2",
        "body": bytearray(body),
        "properties": {"own": "größe"},
        "producer_group": "g",
        "born_at": datetime.fromtimestamp(1699999999.999, UTC).astimezone().replace(tzinfo=None),
        "half_at": at(10),
        "committed_at": at(20),
        "check_times": 0,
        "incarnation": 2,
        "half_partition": partition,
        "half_offset": offset,
        "op_partition": op_partition,
        "op_offset": op_offset,
        "epoch": 0,
        "batch_id": 0,
    }
    assert w.rows(Table.DISCARDED) == w.rows(Table.QUARANTINE) == []


def test_a_row_has_defaults_an_empty_body_for_null_and_the_last_of_two_properties(world: MakeWorld) -> None:
    w = world()
    w.produce(Source.HALF, "a", None, [("REAL_TOPIC", b"orders"), ("PGROUP", b"g"), ("p", b"1"), ("n", None), ("p", b"2")], 5)
    w.op("a", b"COMMIT", 6)
    w.resolve()
    [row] = w.rows(Table.MESSAGES)
    assert (row.body, row.queue_id, row.tags, row["keys"], row.properties) == (bytearray(b""), 0, None, None, {"p": "2", "n": None})
    assert (row.born_at, row.incarnation) == (at(5), 0)


@pytest.mark.slow
def test_a_silent_half_is_checked_and_discarded_over_several_runs(world: MakeWorld) -> None:
    w = world(**{"resolution.transactionCheckMax": 2})
    partition, offset = w.half("a", 0, b"hello", own=b"kept", TAGS=b"T")
    w.tick(6_001)
    w.resolve()
    w.tick(36_001)
    w.resolve()
    expected = [
        (
            "a",
            b"hello",
            {
                "REAL_TOPIC": b"orders",
                "PGROUP": b"g",
                "own": b"kept",
                "TAGS": b"T",
                "TRANSACTION_CHECK_TIMES": b"%d" % n,
                "CHECK_ID": f"a:{partition}.{offset}:{n}".encode(),
            },
        )
        for n in (1, 2)
    ]
    assert w.checks() == expected
    w.tick(66_000)
    w.resolve()
    assert w.rows(Table.DISCARDED) == []
    w.tick(66_001)
    w.resolve()
    [row] = w.rows(Table.DISCARDED)
    assert (row.transaction_id, row.reason, row.check_times, bytes(row.body), row.discarded_at) == (
        "a",
        "check_max",
        2,
        b"hello",
        at(66_001),
    )
    assert row.properties == {"own": "kept"}
    w.op("a", b"COMMIT", 66_002)
    w.resolve()
    [late] = w.rows(Table.QUARANTINE)
    assert (late.reason, late.transaction_id, late.source_topic) == ("late_verdict", "a", w.settings.kafka.op_topic)
    assert w.rows(Table.MESSAGES) == []


@pytest.mark.long
def test_a_backlog_read_in_small_batches_causes_no_check(world: MakeWorld) -> None:
    """The horizon follows the ticks alone, so a slow reader of the log checks no half that has a verdict there."""
    w = world(**{"kafka.max_offsets_per_trigger": 7})
    for n in range(30):
        w.half(f"t{n}", n * 1_000)
    for n in range(30):
        w.op(f"t{n}", b"COMMIT", n * 1_000 + 1)
    w.tick(900_000)
    reports = w.resolve()
    assert len(reports) > 5
    assert len(w.by_id(Table.MESSAGES)) == 30
    assert w.checks() == []


def test_a_batch_writes_nothing_to_a_table_without_rows(world: MakeWorld) -> None:
    w = world()
    w.half("a")
    w.op("a", b"COMMIT", 1)
    w.resolve()
    before = {table: table_version(w, table) for table in Table}
    w.tick(10)
    w.tick(11)
    assert w.resolve()[0].rows == {Kind.REPORT: 4}
    assert {table: table_version(w, table) for table in Table} == before == {Table.MESSAGES: 2, Table.DISCARDED: 1, Table.QUARANTINE: 1}


def test_a_replayed_batch_writes_nothing_twice(world: MakeWorld) -> None:
    """Without the newest file of `commits/` Spark repeats the last batch, and Delta skips its appends."""
    w = world()
    for n in range(50):
        w.half(f"t{n}", 0, os.urandom(100))
        w.op(f"t{n}", b"COMMIT", 1)
    w.op("stranger", b"COMMIT", 1)
    w.half("asked", 0)
    w.tick(6_002)
    w.resolve()
    first = {table: w.rows(table) for table in Table}
    commits = Path(w.settings.storage.checkpoint) / "commits"
    newest = max((file for file in commits.iterdir() if file.name.isdigit()), key=lambda file: int(file.name))
    newest.unlink()
    (commits / f".{newest.name}.crc").unlink(missing_ok=True)
    w.resolve()
    assert {table: w.rows(table) for table in Table} == first
    assert len(first[Table.MESSAGES]) == 50
    assert len(first[Table.QUARANTINE]) == 1
    checks = w.checks()
    assert len(checks) == 2, "check requests are sent at least once"
    assert checks[0] == checks[1], "with the same CHECK_ID and the same content"


def test_a_batch_that_fails_in_spark_for_an_unknown_reason_is_logged_while_its_error_has_a_text(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    w = world()
    w.half("a")
    w.op("a", b"COMMIT", 1)
    with monkeypatch.context() as patch:
        patch.setattr(sinks, "append_once", lambda rows, *_, **__: rows.sparkSession.sql("SELECT raise_error('out of luck')").collect())
        with pytest.raises(JobFailedError, match="the next start repeats it"):
            w.resolve()
    assert "out of luck" in caplog.text
    w.resolve()
    assert [row["transaction_id"] for row in w.rows(Table.MESSAGES)] == ["a"]


def test_r15_a_tick_names_absent_groups(world: MakeWorld) -> None:
    w = world()
    w.half("a", 0)
    w.half("b", 0, PGROUP=b"h")
    w.tick(6_001, w.away("g"))
    [report] = w.resolve()
    assert [check[0] for check in w.checks()] == ["b"]
    assert report.counts[Count.PUT_OFF] == 1


@pytest.mark.slow
@pytest.mark.parametrize("needed_for", [pytest.param("check", marks=pytest.mark.long), "commit"])
def test_r17_a_deleted_half_is_quarantined_once_and_settled(world: MakeWorld, needed_for: str) -> None:
    w = world(partitions=1)
    partition, offset = w.half("a", 0)
    w.half("b", 0)
    w.tick(1_000)
    w.resolve()
    delete_records(w.settings.kafka, w.settings.kafka.half_topic, {partition: offset + 1})
    if needed_for == "commit":
        w.op("a", b"COMMIT", 1_001)
        w.tick(1_002)
    else:
        w.tick(6_001)
    w.resolve()
    [row] = w.rows(Table.QUARANTINE)
    assert (row.reason, row.transaction_id) == ("half_lost", "a")
    assert (row.source_topic, row.source_partition, row.source_offset) == (w.settings.kafka.half_topic, partition, offset)
    w.op("a", b"ROLLBACK", 7_000)
    w.tick(40_000)
    w.resolve()
    w.tick(70_000)
    w.resolve()
    assert sorted(row.reason for row in w.rows(Table.QUARANTINE)) == ["half_lost", "late_verdict"]
    assert w.rows(Table.MESSAGES) == []
    assert "a" not in {check[0] for check in w.checks()}
    assert "b" in {check[0] for check in w.checks()}


def test_r17_a_start_is_refused_if_retention_is_shorter_than_half_retention(world: MakeWorld) -> None:
    w = world(timestamps="LogAppendTime", **{"resolution.half_retention": "400d"})
    too_long = w.settings.resolution.model_copy(update={"half_retention": 900 * 86_400_000})
    with pytest.raises(TopicError, match=r"retention\.ms"):
        w.resolve(w.settings.model_copy(update={"resolution": too_long}))


def test_another_checkpoint_changed_buckets_or_topics_and_missing_tables_are_refused(world: MakeWorld, tmp_path: Path) -> None:
    w = world()
    w.half("a")
    w.op("a", b"COMMIT", 1)
    w.resolve()
    before = w.rows(Table.MESSAGES)

    def changed(group: str, **values: object) -> None:
        part = getattr(w.settings, group).model_copy(update=values)
        w.resolve(w.settings.model_copy(update={group: part}))

    with pytest.raises(OwnershipError, match="--adopt"):
        changed("storage", checkpoint=str(tmp_path / "another"))
    with pytest.raises(OwnershipError, match=r"state\.buckets = 4, not 5"):
        changed("state", buckets=5)
    with pytest.raises(OwnershipError, match=r"kafka\.half_topic"):
        changed("kafka", half_topic=w.settings.kafka.op_topic, op_topic=w.settings.kafka.half_topic)
    with pytest.raises(OwnershipError, match="is missing"):
        changed("storage", warehouse=str(tmp_path / "elsewhere"))
    assert w.rows(Table.MESSAGES) == before


def test_a_second_job_on_one_checkpoint_is_refused(world: MakeWorld) -> None:
    from halfway.pipelines.storage.locks import job_lock

    w = world()
    with job_lock(w.settings.storage), pytest.raises(CheckpointInUseError, match="another job"):
        w.resolve()


def test_large_bodies_arrive_whole(world: MakeWorld) -> None:
    w = world()
    bodies = {f"big{n}": os.urandom(4 * 1024 * 1024) for n in range(3)}
    for key, body in bodies.items():
        w.half(key, 0, body)
        w.op(key, b"COMMIT", 1)
    w.half("asked", 0, bodies["big0"])
    w.tick(6_001)
    w.resolve()
    assert {key: bytes(row.body) for key, row in w.by_id(Table.MESSAGES).items()} == bodies
    assert w.checks()[0][1] == bodies["big0"]


def test_a_job_of_another_checkpoint_on_the_same_topics_is_named(world: MakeWorld, caplog: pytest.LogCaptureFixture) -> None:
    """As of one that was started in another folder: each message would be delivered by both."""
    w = world()
    TickPublisher(w.settings, admin_client(w.settings.kafka), SentChecks(1_000), "another").publish()
    w.resolve()
    assert "event=another_job cause='a job of another checkpoint, with other tables (query another), ticked" in caplog.text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_whose_jvm_is_killed_ends_with_one_line(topics: MakeTopics, tmp_path: Path) -> None:
    """As the kernel does for want of memory. Each request to it fails with an error of its own."""
    job = JobProcess(topics(partitions=1), tmp_path)
    process = job.start()
    try:
        job.until_first_batch()
        listed = subprocess.run(["ps", "-eo", "pid=,ppid=,comm="], capture_output=True, text=True, check=True).stdout
        [jvm] = [int(pid) for pid, parent, name in map(str.split, listed.splitlines()) if (int(parent), name) == (process.pid, "java")]
        os.kill(jvm, signal.SIGKILL)
        assert process.wait(120) == 1
        assert job.log.rstrip().endswith("error: Spark's JVM has ended: it was killed, as for want of memory, or has said why before")
    finally:
        job.kill()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_topics_that_are_recreated_while_the_job_stands_still_end_it(topics: MakeTopics, tmp_path: Path) -> None:
    """They have grown past what it has read by then: it would leave out what is before that, without a word."""
    settings = topics(partitions=1)
    job = JobProcess(settings, tmp_path)
    process = job.start()
    try:
        job.until_first_batch()
        os.killpg(process.pid, signal.SIGSTOP)
        make_topics_anew(settings)
        producer = Producer({"bootstrap.servers": settings.kafka.servers(), "acks": "all"})
        for topic in (settings.kafka.half_topic, settings.kafka.op_topic):
            for _ in range(2_000):
                producer.produce(topic, b"{}", partition=0)
        assert producer.flush(60) == 0
        os.killpg(process.pid, signal.SIGCONT)
        assert process.wait(120) == 1
        assert f"error: the topic {settings.kafka.half_topic} is not the one that the checkpoint" in job.log
    finally:
        job.kill()
