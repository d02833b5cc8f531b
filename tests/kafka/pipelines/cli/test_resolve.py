"""`halfway resolve` in its own process: stopped, killed, started again."""

import signal

import pytest
from confluent_kafka import Producer

from tests.support.job_process import JobProcess
from tests.support.waiting import LIMIT_S, until


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
@pytest.mark.parametrize("stop", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_ends_the_job_between_two_batches(job: JobProcess, stop: signal.Signals) -> None:
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
def test_a_job_that_is_killed_and_started_again_delivers_exactly_once(job: JobProcess) -> None:
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
def test_without_kafka_the_job_ends_with_one_line(job: JobProcess) -> None:
    process = job.start(**{"kafka.bootstrap_servers": "127.0.0.1:1"})
    assert process.wait(90) == 1
    last = job.log.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "Traceback" not in job.log
