"""A job whose tables another checkpoint has taken over appends nothing more, and ends (decision 6)."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfway.pipelines.runtime.java import SHORT_LIVED_JVM
from halfway.pipelines.storage import delta_tables, lineage
from halfway.pipelines.storage.delta_tables import owner_of
from halfway.schemas.errors import OwnershipError
from halfway.schemas.tables import Table
from tests.chaos.launched_job import LaunchedJob
from tests.chaos.launcher import Step
from tests.support.job_world import SMALL_JOB, MakeWorld, World
from tests.support.kafka_topics import topic_settings
from tests.support.waiting import until


@pytest.fixture
def old_job() -> Iterator[list[LaunchedJob]]:
    started: list[LaunchedJob] = []
    yield started
    for job in started:
        job.kill()


def start_old(w: World, folder: Path, started: list[LaunchedJob], **changed: object) -> LaunchedJob:
    """Return a running job of its own process, with its own checkpoint and the tables of the world."""
    options = {**SMALL_JOB, **topic_settings(w.settings.kafka), "storage.warehouse": w.settings.storage.warehouse}
    job = LaunchedJob(folder, {**options, "trigger.available_now": False, "trigger.interval": 0, **changed}, SHORT_LIVED_JVM)
    started.append(job)
    return job


def wait_for_the_end(job: LaunchedJob, limit_s: float) -> None:
    until(lambda: not job.is_running(), "the end of the job that has lost its tables", limit_s)
    assert job.process is not None
    assert job.process.returncode == 1
    assert "has taken over the table" in job.last_words(), job.last_words()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_frozen_job_that_wakes_writes_nothing(world: MakeWorld, tmp_path: Path, old_job: list[LaunchedJob]) -> None:
    """It is held between the count of a batch and its first append, with commits, a discard, bad records and checks."""
    w = world(**{"resolution.transactionCheckMax": 1})
    (tmp_path / "old").mkdir()
    job = start_old(w, tmp_path / "old", old_job, **{"resolution.transactionCheckMax": 1})
    w.half("dropped", 0)
    w.tick(6_001)
    job.start()
    until(lambda: job.last_batch() >= 0 and len(w.checks()) == 1, "the first batch")
    job.arm(Step.AFTER_COUNT, 1, "wait")
    for n in range(6):
        w.half(f"t{n}", 30_000)
        w.op(f"t{n}", b"COMMIT", 30_001)
    w.half("asked", 30_000)
    w.half("bad", 30_000, PGROUP=None)
    w.tick(36_002)
    job.wait_for_step()
    job.signal(signal.SIGSTOP)
    try:
        w.resolve(adopt=True)
        before, asked = {table: w.rows(table) for table in Table}, w.checks()
    finally:
        job.signal(signal.SIGCONT)
    assert set(w.by_id(Table.MESSAGES)) == {f"t{n}" for n in range(6)}
    assert {row["epoch"] for rows in before.values() for row in rows} == {1}
    job.go_on()
    wait_for_the_end(job, 60)
    assert {table: w.rows(table) for table in Table} == before
    assert w.checks() == asked
    w.resolve()
    assert {table: w.rows(table) for table in Table} == before


@pytest.mark.timeout(300)
@pytest.mark.long
def test_a_job_that_appends_nothing_notices_that_its_tables_were_taken(
    world: MakeWorld, tmp_path: Path, old_job: list[LaunchedJob]
) -> None:
    w = world(timestamps="LogAppendTime")
    (tmp_path / "old").mkdir()
    job = start_old(w, tmp_path / "old", old_job, **{"resolution.tick_interval": "200ms"})
    job.start()
    until(lambda: job.last_batch() >= 0, "the first batch")
    w.half("a")
    w.resolve(adopt=True)
    wait_for_the_end(job, 30)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_append_that_delta_leaves_out_ends_the_job(world: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables name this job as their owner, and its query is fenced. No message may vanish, whatever led to it."""
    w = world()
    w.half("a", 0)
    w.tick(1)
    w.resolve()
    storage = w.settings.storage
    query_id = owner_of(w.spark, storage, Table.MESSAGES).query_id
    assert query_id is not None
    delta_tables._fence(w.spark, storage, Table.MESSAGES, query_id)
    w.op("a", b"COMMIT", 2)
    w.tick(3)
    with pytest.raises(OwnershipError, match="takes no more batches of the checkpoint"):
        w.resolve()
    monkeypatch.setattr(lineage, "_verify_not_fenced", lambda *_: None)  # as if it were fenced after the start
    with pytest.raises(OwnershipError, match="takes no batch 1 of the checkpoint"):
        w.resolve()
    assert (w.rows(Table.MESSAGES), w.rows(Table.QUARANTINE)) == ([], [])
    adopting = w.settings.model_copy(update={"storage": storage.model_copy(update={"checkpoint": str(tmp_path / "new")})})
    w.resolve(adopting, adopt=True)
    assert set(w.by_id(Table.MESSAGES)) == {"a"}
