"""`halfway resolve` in its own process: stopped, killed, started again."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.pipelines.local.broker import LocalBroker
from tests.support.job_process import JobProcess
from tests.support.kafka_topics import unique_topics
from tests.support.waiting import LIMIT_S, until


@pytest.fixture
def own_job(own_broker: LocalBroker, tmp_path: Path) -> Iterator[JobProcess]:
    """A job on a broker that the test may freeze."""
    settings = load_settings(environ={}, overrides=unique_topics(own_broker))
    create_topics(settings, 2)
    process = JobProcess(settings, tmp_path)
    yield process
    process.kill()


def send(job: JobProcess, ids: list[str]) -> None:
    producer = Producer({"bootstrap.servers": str(job.options["kafka.bootstrap_servers"]), "partitioner": "murmur2_random"})
    for transaction_id in ids:
        producer.produce(
            str(job.options["kafka.half_topic"]), b"body", transaction_id, headers=[("REAL_TOPIC", b"orders"), ("PGROUP", b"g")]
        )
        producer.produce(str(job.options["kafka.op_topic"]), b"", transaction_id, headers=[("ACTION", b"COMMIT"), ("PGROUP", b"g")])
        producer.poll(0)
    assert producer.flush(30) == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stop", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_ends_the_job_between_two_batches(job: JobProcess, stop: signal.Signals) -> None:
    process = job.start()
    first = [f"a{n}" for n in range(200)]
    send(job, first)
    job.until(lambda: len(job.delivered()) == len(first), "the first delivery")
    send(job, [f"b{n}" for n in range(200)])
    process.send_signal(stop)
    assert process.wait(60) == 0
    assert "Traceback" not in job.log
    assert "StackOverflowError" not in job.log
    events = ("event=start ", "event=spark_starting", "event=spark_started", "event=query_started", "event=batch")
    told = [log.index(event) for log in [job.log] for event in events]
    assert told == sorted(told), "a sign of life before each wait"
    delivered = job.delivered()
    assert len(delivered) == len(set(delivered))


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_a_job_that_is_killed_and_started_again_delivers_exactly_once(job: JobProcess) -> None:
    slow = {"kafka.max_offsets_per_trigger": 100}
    ids = [f"t{n}" for n in range(300)]
    send(job, ids)
    for kills in range(2):
        job.start(**slow)
        already = len(job.delivered())
        job.until(lambda already=already: len(job.delivered()) > already, f"a delivery before kill {kills}")
        job.kill()
    process = job.start("--available-now")
    assert process.wait(LIMIT_S) == 0, job.log[-2000:]
    assert sorted(job.delivered()) == sorted(ids)
    assert "loadedMaps" not in job.log, "Spark says at each start that it reads the state"


@pytest.mark.timeout(120)
def test_without_kafka_the_job_ends_with_one_line(job: JobProcess) -> None:
    process = job.start(**{"kafka.bootstrap_servers": "127.0.0.1:1"})
    assert process.wait(90) == 1
    last = job.log.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "Traceback" not in job.log
    assert (
        f"event=start kafka=127.0.0.1:1 checkpoint={job.options['storage.checkpoint']} tables={job.options['storage.warehouse']}" in job.log
    )


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_while_kafka_does_not_answer_a_second_signal_ends_the_job_within_seconds(own_broker: LocalBroker, own_job: JobProcess) -> None:
    job, kafka = own_job, own_broker.pid()
    assert kafka is not None
    process = job.start()
    job.until_first_batch()
    os.kill(kafka, signal.SIGSTOP)
    try:
        until(lambda: "effect=time_stands_still" in job.log, "a tick that is not published")
        process.send_signal(signal.SIGTERM)
        until(lambda: "stopping after the batch that is under way" in job.log, "the answer to the first signal", 20)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        until(lambda: job.processes() == [], "the end of what the job has started", 20)
    finally:
        os.kill(kafka, signal.SIGCONT)
    assert "Traceback" not in job.log
    send(job, ["after"])
    assert job.start("--available-now").wait(LIMIT_S) == 0, job.log[-2000:]
    assert job.delivered() == ["after"]


@pytest.mark.timeout(400)
@pytest.mark.long
def test_a_stop_while_kafka_is_gone_is_no_failure(own_broker: LocalBroker, own_job: JobProcess) -> None:
    job = own_job
    process = job.start()
    job.until_first_batch()
    own_broker.stop()
    until(lambda: "effect=time_stands_still" in job.log, "a tick that is not published")
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 0, job.log[-2000:]
    own = [line for line in job.log.splitlines() if " logger=" not in line]  # A task of Spark's may still say something.
    assert "event=ended" in own[-1]
    assert "Traceback" not in job.log


@pytest.mark.timeout(500)
@pytest.mark.long
@pytest.mark.parametrize("frozen", [False, True])
def test_without_kafka_for_minutes_the_job_ends_with_one_line_and_few_before_it(
    own_broker: LocalBroker, own_job: JobProcess, *, frozen: bool
) -> None:
    """Between two batches Spark asks Kafka three times, a minute each, and within one once."""
    job, kafka = own_job, own_broker.pid()
    assert kafka is not None
    process = job.start()
    job.until_first_batch()
    if frozen:
        os.kill(kafka, signal.SIGSTOP)
    else:
        own_broker.stop()
    try:
        before = len(job.log.splitlines())
        assert process.wait(400) == 1
    finally:
        if frozen:
            os.kill(kafka, signal.SIGCONT)
        else:
            own_broker.start()
    lines = job.log.splitlines()[before:]
    assert lines[-1].startswith(("error: Kafka has not answered for minutes (", "error: Kafka has not reported for a minute where ")), (
        lines[-1]
    )
    assert not [line for line in lines if line.startswith("\t") or "Traceback" in line]
    assert len(lines) < 40
    send(job, ["after"])
    assert job.start("--available-now").wait(LIMIT_S) == 0, job.log[-2000:]
    assert job.delivered() == ["after"]


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_spark_ends_with_a_job_that_is_killed_and_an_error_is_the_last_line(job: JobProcess, tmp_path: Path) -> None:
    process = job.start()
    job.until_first_batch()
    process.kill()
    process.wait(10)
    until(lambda: job.processes() == [], "the end of Spark's JVM", 20)
    other = job.start(**{"storage.checkpoint": tmp_path / "other"})
    assert other.wait(LIMIT_S) == 1
    last = job.log.splitlines()[-1]
    assert last.startswith("error: the table ")
    assert "belongs to another checkpoint" in last


@pytest.mark.timeout(120)
def test_ctrl_c_during_a_start_ends_everything_without_a_traceback(job: JobProcess) -> None:
    """As a terminal sends it: to all processes of the group."""
    process = job.start()
    until(lambda: len(job.processes()) > 1, "Spark's JVM")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) in (130, -signal.SIGINT)
    until(lambda: job.processes() == [], "the end of Spark's JVM", 20)
    assert "Traceback" not in job.log
