"""The metrics of a running job agree with its tables, are never negative, and stay the same after a restart."""

import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer
from deltalake import DeltaTable
from prometheus_client.parser import text_string_to_metric_families

from halfway.pipelines.local.processes import free_port
from halfway.schemas.headers import Source
from tests.support.commands import groups_away
from tests.support.job_process import JobProcess
from tests.support.job_world import Headers, MakeWorld, half_headers, op_headers
from tests.support.kafka_topics import MakeTopics
from tests.support.waiting import until

COMMITS, ROLLBACKS, OPEN, UNANSWERED = 20, 5, 3, 2
FOREVER = {"CHECK_IMMUNITY_TIME_IN_SECONDS": b"86400"}


@pytest.fixture
def job(topics: MakeTopics, tmp_path: Path) -> Iterator[JobProcess]:
    running = JobProcess(topics(), tmp_path)
    short = {"resolution.transactionTimeOut": "1s", "resolution.transactionCheckInterval": "1s", "resolution.transactionCheckMax": 1}
    running.options |= {**short, "metrics.port": free_port()}
    yield running
    running.kill()


def scraped(job: JobProcess) -> dict[str, float]:
    """Return every sample as `name{label=value}`, or nothing if the job does not listen yet."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{job.options['metrics.port']}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, ConnectionError):
        return {}
    return {
        sample.name + "".join(f"{{{name}={value}}}" for name, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def traffic(job: JobProcess) -> None:
    """Send records of every kind that the metrics count."""
    producer = Producer({"bootstrap.servers": str(job.options["kafka.bootstrap_servers"]), "partitioner": "murmur2_random"})
    half_topic, op_topic = (str(job.options[f"kafka.{kind}_topic"]) for kind in ("half", "op"))

    def send(topic: str, key: str, headers: Headers) -> None:
        producer.produce(topic, b"body", key, headers=headers)

    for n in range(COMMITS):
        send(half_topic, f"commit{n}", half_headers(**FOREVER))
        send(op_topic, f"commit{n}", op_headers(b"COMMIT"))
    for n in range(ROLLBACKS):
        send(half_topic, f"rollback{n}", half_headers(**FOREVER))
        send(op_topic, f"rollback{n}", op_headers(b"ROLLBACK"))
    for n in range(OPEN):
        send(half_topic, f"open{n}", half_headers(**FOREVER))
    for n in range(UNANSWERED):
        send(half_topic, f"unanswered{n}", half_headers())
    send(half_topic, "open0", half_headers(**FOREVER))
    send(op_topic, "open0", op_headers(b"UNKNOWN"))
    send(op_topic, "commit0", op_headers(b"COMMIT"))
    send(op_topic, "commit1", op_headers(b"ROLLBACK"))
    send(op_topic, "stranger", op_headers(b"COMMIT"))
    send(half_topic, "broken", [("PGROUP", b"g")])
    assert producer.flush(30) == 0


EXPECTED = {
    "halfway_half_messages": OPEN,
    "halfway_pending_messages{checked=false}": OPEN,
    "halfway_pending_messages{checked=true}": 0,
    "halfway_records_total{kind=half}": COMMITS + ROLLBACKS + OPEN + UNANSWERED + 1,
    "halfway_records_total{kind=op}": COMMITS + ROLLBACKS + 4,
    "halfway_commit_messages_total": COMMITS,
    "halfway_rollback_messages_total": ROLLBACKS,
    "halfway_checks_total": UNANSWERED,
    "halfway_unknown_answers_total": 1,
    "halfway_discarded_messages_total{reason=check_max}": UNANSWERED,
    "halfway_discarded_messages_total{reason=expired}": 0,
    "halfway_quarantined_records_total{reason=conflicting_verdict}": 1,
    "halfway_quarantined_records_total{reason=orphan_op}": 1,
    "halfway_quarantined_records_total{reason=missing_header}": 1,
    "halfway_duplicates_total{kind=half}": 1,
    "halfway_duplicates_total{kind=op}": 1,
    "halfway_former_records_total{kind=adopted}": 0,
    "halfway_former_records_total{kind=aged_out}": 0,
    "halfway_finish_message_latency_count": COMMITS,
}
LASTING = ("_total", "halfway_finish_message_latency", "halfway_half_messages", "halfway_pending_messages")


def lasting(samples: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in samples.items() if any(part in name for part in LASTING)}


def rows(job: JobProcess, table: str) -> int:
    return int(DeltaTable(str(job.warehouse / table)).to_pyarrow_dataset().count_rows())


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_metrics_agree_with_the_tables_and_go_on_after_a_restart(job: JobProcess) -> None:
    process = job.start()
    traffic(job)

    def arrived() -> bool:
        samples = scraped(job)
        assert min(samples.values(), default=0) >= 0
        return EXPECTED.items() <= samples.items()

    try:
        until(arrived, "the sent records in the metrics")
    except AssertionError as error:
        samples = scraped(job)
        raise AssertionError(
            {name: (value, samples.get(name)) for name, value in EXPECTED.items() if samples.get(name) != value}
        ) from error
    servers = str(job.options["kafka.bootstrap_servers"])
    until(lambda: scraped(job)["halfway_absent_groups"] == len(groups_away(servers)), "a tick that says which groups are away")
    before = scraped(job)
    assert [rows(job, table) for table in ("messages", "discarded", "quarantine")] == [
        sum(value for name, value in before.items() if name.startswith(counter))
        for counter in ("halfway_commit_messages_total", "halfway_discarded_messages_total", "halfway_quarantined_records_total")
    ]
    half_topic, op_topic = job.options["kafka.half_topic"], job.options["kafka.op_topic"]
    assert {name: value for name, value in before.items() if name.startswith("halfway_unread")} == {
        f"halfway_unread_records{{topic={topic}}}": 0 for topic in (half_topic, op_topic)
    }, "ticks are no backlog"
    assert before["halfway_horizon_lag_seconds"] < 60
    assert before["halfway_batch_seconds_count"] > 0
    assert "unread=" in job.log
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0

    job.start()
    partly: list[dict[str, float]] = []

    def back() -> bool:
        partly.append(lasting(scraped(job)))
        return bool(partly[-1])

    until(back, "the metrics after the restart")
    assert partly[-1] == lasting(before), "totals are the same after a restart"
    after = scraped(job)
    assert after["halfway_start_timestamp_seconds"] > before["halfway_start_timestamp_seconds"]


def test_unread_records_fall_to_zero(world: MakeWorld) -> None:
    """Each of the small batches lowers the number of unread records of each topic."""
    w = world(**{"kafka.max_offsets_per_trigger": 10})
    for n in range(20):
        w.produce(Source.HALF, f"t{n}", b"body", half_headers(), n)
        w.produce(Source.OP, f"t{n}", b"", op_headers(), n)
    left = [report.unread for report in w.resolve()]
    known = [unread for unread in left if unread is not None]
    assert set(known[-1]) == {w.settings.kafka.half_topic, w.settings.kafka.op_topic}
    totals = [sum(unread.values()) for unread in known]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > totals[-1] == 0
