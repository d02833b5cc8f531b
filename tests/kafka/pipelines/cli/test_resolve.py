"""`halfway resolve` as its own process: stopped, killed, started again."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow
import pytest
from confluent_kafka import Producer
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import TableNotFoundError

from halfway.schemas.settings import Settings
from tests.conftest import MakeTopics
from tests.support.paths import ROOT
from tests.support.waiting import LIMIT_S, until


class Job:
    """The command, with a log of its own and no settings but those given."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._folder = folder
        self._runs = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.warehouse = folder / "warehouse"
        kafka = settings.kafka
        self.options = {
            "kafka.bootstrap_servers": kafka.bootstrap_servers,
            "kafka.half_topic": kafka.half_topic,
            "kafka.op_topic": kafka.op_topic,
            "kafka.check_topic": kafka.check_topic,
            "storage.warehouse": self.warehouse,
            "storage.checkpoint": folder / "checkpoint",
            "state.buckets": 4,
            "state.shuffle_partitions": 1,
            "resolution.transactionTimeOut": "1h",
        }

    @property
    def log(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self._folder.glob("job-*.log")))

    def start(self, *more: str, **changed: object) -> subprocess.Popen[bytes]:
        self._runs += 1
        options = [part for name, value in {**self.options, **changed}.items() for part in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "halfway", "resolve", *options, *more]
        with (self._folder / f"job-{self._runs}.log").open("wb") as log:
            # A session of its own: the JVM and the Python workers go with it.
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=ROOT)
        return self.process

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)

    def delivered(self) -> list[str]:
        try:
            table = DeltaTable(str(self.warehouse / "messages"))
        except TableNotFoundError:
            return []
        rows = pyarrow.table(QueryBuilder().register("messages", table).execute("SELECT transaction_id FROM messages"))
        ids: list[str] = rows["transaction_id"].to_pylist()
        return ids


@pytest.fixture
def job(topics: MakeTopics, tmp_path: Path) -> Iterator[Job]:
    running = Job(topics(), tmp_path)
    yield running
    running.kill()


def send(job: Job, ids: list[str]) -> None:
    producer = Producer({"bootstrap.servers": str(job.options["kafka.bootstrap_servers"]), "partitioner": "murmur2_random"})
    for transaction_id in ids:
        producer.produce(
            str(job.options["kafka.half_topic"]), b"body", transaction_id, headers=[("REAL_TOPIC", b"orders"), ("PGROUP", b"g")]
        )
        producer.produce(str(job.options["kafka.op_topic"]), b"", transaction_id, headers=[("ACTION", b"COMMIT"), ("PGROUP", b"g")])
        producer.poll(0)
    assert producer.flush(30) == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stop", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_ends_it_between_two_batches(job: Job, stop: signal.Signals) -> None:
    process = job.start()
    first = [f"a{n}" for n in range(200)]
    send(job, first)
    until(lambda: len(job.delivered()) == len(first), "the first delivery")
    send(job, [f"b{n}" for n in range(200)])
    process.send_signal(stop)
    assert process.wait(60) == 0
    assert "Traceback" not in job.log
    assert "StackOverflowError" not in job.log
    assert "event=batch" in job.log
    delivered = job.delivered()
    assert len(delivered) == len(set(delivered))


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_killed_and_started_again_delivers_exactly_once(job: Job) -> None:
    slow = {"kafka.max_offsets_per_trigger": 100}
    ids = [f"t{n}" for n in range(300)]
    send(job, ids)
    for kills in range(2):
        job.start(**slow)
        already = len(job.delivered())
        until(lambda already=already: len(job.delivered()) > already, f"a delivery before kill {kills}")
        job.kill()
    process = job.start("--available-now")
    assert process.wait(LIMIT_S) == 0, job.log[-2000:]
    assert sorted(job.delivered()) == sorted(ids)


@pytest.mark.timeout(120)
def test_without_kafka_it_says_so_in_one_line(job: Job) -> None:
    process = job.start(**{"kafka.bootstrap_servers": "127.0.0.1:1"})
    assert process.wait(90) == 1
    last = job.log.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "Traceback" not in job.log
