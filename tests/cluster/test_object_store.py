"""Checkpoint and tables on S3: kills, a compaction beside the job, another checkpoint, and two jobs at once."""

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from confluent_kafka import Producer
from deltalake import DeltaTable

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.pipelines.local.broker import LocalBroker
from tests.support.job_world import half_headers, op_headers
from tests.support.kafka_topics import unique_topics
from tests.support.object_store import BUCKET, ObjectStore
from tests.support.waiting import until

PLACE = f"s3a://{BUCKET}/payments"
ROUNDS = 12
MOST_REQUESTS = 400


class JobOnS3:
    """The job and commands beside it, as one test starts them."""

    def __init__(self, store: ObjectStore, topics: dict[str, object], folder: Path) -> None:
        self.store = store
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []
        self.options: dict[str, object] = {
            **topics,
            "storage.warehouse": f"{PLACE}/warehouse",
            "storage.checkpoint": f"{PLACE}/checkpoint",
            "state.buckets": 4,
            "state.shuffle_partitions": 1,
            "resolution.transactionTimeOut": "1h",
        }
        settings = load_settings(environ={}, overrides=self.options)
        create_topics(settings, 2)
        self._producer = Producer({"bootstrap.servers": settings.kafka.servers(), "partitioner": "murmur2_random"})
        self._kafka = settings.kafka
        self.sent = 0

    def start(self, *arguments: str, **changed: object) -> subprocess.Popen[bytes]:
        process = self.store.start(self.log_file(len(self._started)), *arguments, options={**self.options, **changed})
        self._started.append(process)
        return process

    def log_file(self, number: int) -> Path:
        return self._folder / f"log-{number}"

    @property
    def log(self) -> str:
        """What the newest process wrote."""
        return self.log_file(len(self._started) - 1).read_text(errors="replace")

    def kill_all(self) -> None:
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)

    def commit(self, count: int) -> None:
        """Send and commit more messages."""
        for n in range(self.sent, self.sent + count):
            self._producer.produce(self._kafka.half_topic, b"body", f"t{n}", headers=half_headers())
            self._producer.produce(self._kafka.op_topic, b"", f"t{n}", headers=op_headers(b"COMMIT"))
        assert self._producer.flush(30) == 0
        self.sent += count

    def until_logged(self) -> int:
        """Wait until the job has told of every row, without a look at the store. Return the newest batch's number."""
        until(
            lambda: sum(int(count) for count in re.findall(r" committed=(\d+)", self.log)) >= self.sent,
            f"{self.sent} rows",
            progress=lambda: len(self.log),
        )
        return int(re.findall(r"event=batch batch_id=(\d+)", self.log)[-1])

    def table(self) -> DeltaTable:
        return DeltaTable(f"s3://{BUCKET}/payments/warehouse/messages", storage_options=self.store.for_delta_rs())

    def delivered(self) -> list[str]:
        if not DeltaTable.is_deltatable(f"s3://{BUCKET}/payments/warehouse/messages", storage_options=self.store.for_delta_rs()):
            return []
        return [str(name) for name in self.table().to_pyarrow_table(columns=["transaction_id"])["transaction_id"].to_pylist()]

    def until_delivered(self) -> None:
        until(lambda: len(self.delivered()) >= self.sent, f"{self.sent} rows", progress=lambda: len(self.log))
        assert sorted(self.delivered()) == sorted(f"t{n}" for n in range(self.sent))


@pytest.fixture
def job(broker: LocalBroker, tmp_path: Path) -> Iterator[JobOnS3]:
    with ObjectStore(tmp_path) as store:
        running = JobOnS3(store, unique_topics(broker), tmp_path)
        yield running
        running.kill_all()


@pytest.mark.timeout(900)
def test_kills_a_compaction_beside_the_job_and_another_checkpoint_lose_and_double_nothing(job: JobOnS3) -> None:
    job.commit(50)
    first = job.start("resolve")
    job.until_delivered()
    for _ in range(6):  # files for the compaction
        job.commit(5)
        job.until_delivered()
    job.commit(200)
    os.killpg(first.pid, signal.SIGKILL)
    job.start("resolve")
    compaction = job.start("optimize")
    for _ in range(3):
        job.commit(20)
        job.until_delivered()
    assert compaction.wait(240) == 0, job.log
    assert "OPTIMIZE" in {entry["operation"] for entry in job.table().history()}
    job.commit(20)
    job.until_delivered()
    job.kill_all()
    job.commit(30)
    adopting = job.start("resolve", "--adopt", "--available-now", **{"storage.checkpoint": f"{PLACE}/checkpoint-2"})
    assert adopting.wait(240) == 0, job.log
    job.until_delivered()
    old = job.start("resolve", "--available-now")
    assert old.wait(240) == 1
    assert "belongs to another checkpoint" in job.log


@pytest.mark.long
@pytest.mark.timeout(600)
def test_of_two_jobs_on_one_checkpoint_no_row_is_written_twice(job: JobOnS3) -> None:
    job.commit(20)
    first = job.start("resolve")
    job.until_delivered()
    second = job.start("resolve")
    until(lambda: "event=batch" in job.log or second.poll() is not None, "the second job", 180)
    for _ in range(10):
        job.commit(20)
        job.until_delivered()
    assert first.poll() is None or second.poll() is None
    for number in (0, 1):
        if (first, second)[number].poll() is not None:
            assert "another job is running on the checkpoint s3a://" in job.log_file(number).read_text().splitlines()[-1]
    # Whichever is left, or is started again, goes on.
    job.kill_all()
    job.commit(20)
    job.start("resolve")
    job.until_delivered()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_batch_costs_a_bounded_number_of_requests(job: JobOnS3, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the figures of docs/cluster.md: how often a batch asks the store, by what it asks for."""
    job.start("resolve")
    job.commit(20)
    first, before = job.until_logged(), len(job.store.requests())
    newest = first
    for _ in range(ROUNDS):
        job.commit(20)
        newest = job.until_logged()
    batches = newest - first
    kinds = Counter(kind_of(method, path) for method, path, _ in job.store.requests()[before:])
    with capsys.disabled():
        for (place, method), count in sorted(kinds.items()):
            sys.stdout.write(f"\n{place:11} {method:6} {count / batches:5.1f} a batch")
    assert kinds.total() / batches < MOST_REQUESTS


def kind_of(method: str, path: str) -> tuple[str, str]:
    """Return what a request is for: checkpoint, log of a table, or data; and the method, LIST for a listing."""
    is_list = "list-type=2" in path
    where = "checkpoint" if "/checkpoint" in path or "%2Fcheckpoint" in path else "log" if "_delta_log" in path else "data"
    return where, "LIST" if is_list else method
