"""R18: records of Kafka transactions count when they are committed, and an open transaction holds the horizon."""

import pytest

from halfway.pipelines.kafka.admin import admin_client
from halfway.pipelines.kafka.open_transactions import open_transactions
from halfway.pipelines.kafka.topic_scan import TopicScan, retained_ranges
from halfway.pipelines.operate.doctor.finding import Health
from halfway.pipelines.operate.doctor.kafka_checks import kafka_findings
from halfway.pipelines.operate.status import job_status
from halfway.schemas.tables import Table
from tests.support.job_world import START_MS, MakeWorld, World
from tests.support.kafka_transaction import Transaction


def ids(w: World, table: Table) -> set[str]:
    return {row["transaction_id"] for row in w.rows(table)}


@pytest.mark.timeout(240)
def test_r18_what_was_aborted_never_was(world: MakeWorld) -> None:
    w = world(partitions=1)
    w.half("a")
    Transaction(w, "t1").half("aborted", 1).op("aborted", b"COMMIT", 2).op("a", b"COMMIT", 3).abort()
    w.tick(6_000)
    [report] = w.resolve()
    assert (report.pending, ids(w, Table.QUARANTINE)) == (1, set())
    Transaction(w, "t2").half("b", 6_001).op("b", b"COMMIT", 6_002).commit()
    Transaction(w, "t3").op("a", b"ROLLBACK", 6_003).abort()
    w.tick(6_004)
    w.resolve()
    assert [check[0] for check in w.checks()] == ["a"]
    w.op("a", b"COMMIT", 6_005)
    w.tick(40_000)
    w.resolve()
    assert ids(w, Table.MESSAGES) == {"a", "b"}
    assert (w.rows(Table.QUARANTINE), w.rows(Table.DISCARDED)) == ([], [])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("ending", ["commit", "abort"])
def test_r18_an_open_transaction_holds_the_horizon(world: MakeWorld, ending: str) -> None:
    w = world(partitions=1, **{"resolution.transactionCheckMax": 1})
    w.half("before")
    w.half("a", 1)
    w.tick(100)
    w.resolve()
    transaction = Transaction(w, "holder").op("a", b"COMMIT", 200)
    other = Transaction(w, "halves").half("inside", 200)
    w.half("after", 300)
    w.op("before", b"COMMIT", 300)
    w.tick(90_000)
    reports = w.resolve()
    assert [report.horizon_ms for report in reports if report.horizon_ms] in ([], [START_MS + 100])
    assert (w.checks(), w.rows(Table.MESSAGES)) == ([], []), "time stands still"

    found = job_status(lambda: w.spark, w.settings, START_MS + 5_200).open_transactions
    assert [(each.topic, each.partition, each.since_ms, each.transactional_id) for each in found] == [
        (w.settings.kafka.half_topic, 0, START_MS + 200, other.id),
        (w.settings.kafka.op_topic, 0, START_MS + 200, transaction.id),
    ]
    assert all(each.producer_id is not None for each in found)
    texts = [each.text for each in kafka_findings(w.settings) if each.check == "time" and each.health is Health.WARNING]
    assert len(texts) == 2
    assert f"transactional.id {transaction.id}" in texts[1]

    other.commit()
    w.resolve()
    assert w.checks() == [], "the op topic is still held"
    getattr(transaction, ending)()
    w.resolve()
    settled = {"before", "a"} if ending == "commit" else {"before"}
    assert ids(w, Table.MESSAGES) == settled
    assert {check[0] for check in w.checks()} == {"a", "inside", "after"} - settled
    assert job_status(lambda: w.spark, w.settings, START_MS).open_transactions == []
    assert w.rows(Table.QUARANTINE) == []


@pytest.mark.timeout(240)
def test_r18_bodies_before_an_open_transaction_are_read(world: MakeWorld) -> None:
    w = world(partitions=1)
    w.half("a")
    w.half("b", 1)
    w.tick(10)
    w.resolve()
    transaction = Transaction(w, "open").half("inside", 20)
    w.op("a", b"COMMIT", 30)
    w.resolve()
    assert ids(w, Table.MESSAGES) == {"a"}, "the op topic is not held, and the body is before the transaction"
    transaction.abort()
    w.op("b", b"COMMIT", 40)
    w.tick(50)
    w.resolve()
    assert (ids(w, Table.MESSAGES), ids(w, Table.QUARANTINE)) == ({"a", "b"}, set())


@pytest.fixture
def scanned(world: MakeWorld) -> World:
    w = world(partitions=1)
    for number in range(5):
        Transaction(w, f"t{number}").half(f"aborted{number}", number).abort()
        w.half(f"h{number}", number)
    return w


@pytest.mark.timeout(120)
def test_r18_commands_read_what_is_committed_and_wait_for_nothing(scanned: World) -> None:
    kafka = scanned.settings.kafka

    def read() -> list[bytes | None]:
        with TopicScan.open(kafka, kafka.half_topic) as scan:
            return [record.key() for record in scan.since(START_MS, lambda _done, _total: None)]

    committed = [f"h{number}".encode() for number in range(5)]
    assert read() == committed
    transaction = Transaction(scanned, "last").half("inside", 10)
    scanned.half("after", 11)
    ranges = retained_ranges(kafka, [kafka.half_topic])
    assert ranges[kafka.half_topic][0].end == 15
    assert read() == committed
    [found] = open_transactions(admin_client(kafka), kafka, [kafka.half_topic], lambda: scanned.spark)
    assert (found.offset, found.transactional_id) == (15, transaction.id)
    transaction.commit()
    assert read() == [*committed, b"inside", b"after"]
    assert open_transactions(admin_client(kafka), kafka, [kafka.half_topic], lambda: scanned.spark) == []
