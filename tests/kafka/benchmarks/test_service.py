"""The load generator in Java does what it says, with a real broker and the real job."""

import json
from pathlib import Path

import pytest

from benchmarks.load import GROUP
from benchmarks.service import Client, produce, service
from halfway.schemas.settings import KafkaSettings
from halfway.schemas.tables import Table
from tests.support.job_world import MakeWorld
from tests.support.partition_records import headers_of, topic_records
from tests.support.waiting import until


def answers(kafka: KafkaSettings) -> list[dict[str, bytes]]:
    """Return the headers of the ops that answer a check."""
    ops = [headers_of(op) for op in topic_records(kafka.servers(), kafka.op_topic)]
    return [headers for headers in ops if "FROM_CHECK" in headers]


@pytest.mark.long
def test_every_transaction_of_the_java_load_is_committed(world: MakeWorld, tmp_path: Path) -> None:
    w = world()
    kafka = w.settings.kafka
    paced = produce(Client.JAVA, kafka, tmp_path / "java", 4, per_second=60)
    assert 0 < paced["transactions"] < 500
    closed = produce(Client.JAVA, kafka, tmp_path / "java", 1)
    sent = paced["transactions"] + closed["transactions"]
    w.resolve()
    rows = w.by_id(Table.MESSAGES)
    assert len(rows) == sent == len(topic_records(kafka.servers(), kafka.half_topic))
    bodies = {bytes(row.body) for row in rows.values()}
    assert len(bodies) == sent
    assert {len(body) for body in bodies} == {1024}
    assert {(row.producer_group, row.topic, row.check_times) for row in rows.values()} == {(f"{GROUP}0", "orders", 0)}
    assert w.rows(Table.QUARANTINE) == []


@pytest.mark.long
def test_the_java_load_answers_every_check(world: MakeWorld, tmp_path: Path) -> None:
    w = world()
    kafka = w.settings.kafka
    names = {f"pending-{number}" for number in range(300)}
    for name in names:
        w.half(name, PGROUP=f"{GROUP}0".encode())
    w.half("another")
    w.tick(7_000)
    w.resolve()
    with service(Client.JAVA, kafka, tmp_path / "java", threads=0) as answering:
        until(lambda: len(answers(kafka)) == len(names), "the answers", limit_s=60)
        answering.terminate()
        assert json.loads(answering.communicate(timeout=30)[0])["answered"] == len(names)
    w.resolve()
    rows = w.by_id(Table.MESSAGES)
    assert set(rows) == names
    assert {row.check_times for row in rows.values()} == {1}
    assert w.rows(Table.QUARANTINE) == []
