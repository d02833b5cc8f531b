"""Plain Kafka clients that follow docs/contract.md alone work with the real job."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from confluent_kafka import Consumer, Message, Producer
from pyspark.sql import SparkSession

from halfway.pipelines.runtime.jars import ensure_jars
from halfway.schemas import headers as names
from halfway.schemas.settings import KafkaSettings
from halfway.schemas.tables import Table
from tests.support.job_world import START_MS, MakeWorld, World
from tests.support.kafka_topics import MakeTopics
from tests.support.partition_records import headers_of
from tests.support.paths import ROOT
from tests.support.waiting import until

PAGE = (ROOT / "docs" / "contract.md").read_text()
VECTORS = [
    (key, int(value), int(of_4), int(of_12))
    for key, value, of_4, of_12 in re.findall(r"^\| `(.+)` \| (\d+) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
]


class PlainClient:
    """A service of one producer group, written from the page alone."""

    def __init__(self, world: World, group: str = "order-service") -> None:
        kafka = world.settings.kafka
        self.half_topic, self.op_topic, self.check_topic, self.group = kafka.half_topic, kafka.op_topic, kafka.check_topic, group
        common = {"bootstrap.servers": kafka.servers()}
        self._producer = Producer({**common, "acks": "all", "enable.idempotence": True, "partitioner": "murmur2_random"})
        own = {"group.id": f"txn-check-{group}", "enable.auto.commit": False, "auto.offset.reset": "earliest"}
        self._consumer = Consumer({**common, **own})
        self._consumer.subscribe([self.check_topic])

    def send(self, topic: str, key: bytes, value: bytes | None, headers: list[tuple[str, bytes]]) -> Message:
        """Send one record and wait for its acknowledgement."""
        stored: list[Message] = []

        def delivered(error: object, message: Message) -> None:
            assert error is None, error
            stored.append(message)

        self._producer.produce(topic, value, key, headers=list(headers), on_delivery=delivered)
        assert self._producer.flush(30) == 0
        return stored[0]

    def half(self, name: str, *more: tuple[str, bytes]) -> None:
        headers = [("REAL_TOPIC", b"orders"), ("PGROUP", self.group.encode()), *more]
        self.send(self.half_topic, name.encode(), b"body of " + name.encode(), headers)

    def op(self, name: str, action: bytes, *more: tuple[str, bytes]) -> None:
        self.send(self.op_topic, name.encode(), None, [("ACTION", action), ("PGROUP", self.group.encode()), *more])

    def answer(self, checks: int, look_up: Callable[[str], bytes]) -> list[dict[str, bytes]]:
        """Answer `checks` checks of this group, and return their headers."""
        answered: list[dict[str, bytes]] = []
        deadline_s = time.monotonic() + 60
        while len(answered) < checks:
            assert time.monotonic() < deadline_s, f"{len(answered)} of {checks} checks came"
            check = self._consumer.poll(1)
            if check is None:
                continue
            assert check.error() is None
            headers = headers_of(check)
            if headers["PGROUP"] == self.group.encode():
                name = (check.key() or b"").decode()
                assert check.value() == b"body of " + name.encode()
                again = [("FROM_CHECK", b"true"), ("CHECK_TIMES", headers["TRANSACTION_CHECK_TIMES"])]
                self.op(name, look_up(name), *again, ("INCARNATION", headers.get("INCARNATION", b"0")))
                answered.append(headers)
            self._consumer.commit(check, asynchronous=False)
        return answered

    def close(self) -> None:
        self._consumer.close()


def after_now(ms: int) -> int:
    """Return the time `ms` after now, relative to START_MS."""
    return time.time_ns() // 1_000_000 - START_MS + ms


def worked_example() -> dict[str, tuple[bytes, bytes | None, list[tuple[str, bytes]]]]:
    """Return key, value and headers of the page's `half` and `op`, parsed from its bytes."""
    [block] = re.findall(r"```text\n(half\n.*?)```", PAGE, re.DOTALL)
    records: dict[str, tuple[bytes, bytes | None, list[tuple[str, bytes]]]] = {}
    for kind, text in re.findall(r"^(half|op)\n((?:  .*\n)+)", block, re.MULTILINE):
        parts = re.findall(r"^  (key|value|header (\S+)) +((?:[0-9a-f]{2} )+) ", text, re.MULTILINE)
        found = {name: bytes.fromhex(hexes) for name, _, hexes in parts}
        headers = [(header, bytes.fromhex(hexes)) for _, header, hexes in parts if header]
        assert len(parts) == text.count("\n")
        records[kind] = found["key"], found.get("value"), headers
    return records


def test_the_worked_example_makes_the_row_that_the_page_shows(world: MakeWorld) -> None:
    w = world(partitions=4)
    client, records = PlainClient(w), worked_example()
    half, op = client.send(client.half_topic, *records["half"]), client.send(client.op_topic, *records["op"])
    assert half.partition() == op.partition() == 1
    client.close()
    w.resolve()
    [row] = w.rows(Table.MESSAGES)
    expected = {
        "transaction_id": "order-7",
        "topic": "orders",
        "tags": "placed",
        "queue_id": 0,
        "producer_group": "order-service",
        "properties": {"colour": "röt"},
        "incarnation": 0,
        "check_times": 0,
    }
    assert {name: row[name] for name in expected} == expected
    assert row.born_at.astimezone(UTC) == datetime(2025, 11, 21, 10, 13, 20, tzinfo=UTC)
    assert bytes(row.body) == b'{"order": 7}' == records["half"][1]
    section = PAGE.split("## Byte by byte")[1]
    for name, value in expected.items():
        written = json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)
        assert re.search(rf"`{name}` = `?{re.escape(written)}`?[,. ]", section), name


@pytest.mark.slow
def test_a_client_written_from_the_page_alone_works(world: MakeWorld) -> None:
    w = world(**{"resolution.transactionCheckMax": 2})
    client, other = PlainClient(w), PlainClient(w, "another-service")
    client.op("early", b"COMMIT")
    for name in ("early", "rolled", "twice", "lost", "undone", "silent", "silent-too"):
        client.half(name)
    other.half("other")
    client.op("rolled", b"ROLLBACK")
    for action in (b"UNKNOWN", b"COMMIT", b"COMMIT", b"ROLLBACK"):
        client.op("twice", action)
    client.op("silent", b"UNKNOW")
    w.tick(after_now(0))
    w.resolve()
    assert set(w.by_id(Table.MESSAGES)) == {"early", "twice"}
    assert [(row.transaction_id, row.reason) for row in w.rows(Table.QUARANTINE)] == [("twice", "conflicting_verdict")]

    w.tick(after_now(7_000))  # after transactionTimeOut: the first check of all pending transactions
    w.resolve()
    answers = {"lost": b"COMMIT", "undone": b"ROLLBACK"}
    first = client.answer(4, lambda name: answers.get(name, b"UNKNOWN"))
    assert sorted(check["CHECK_ID"].rsplit(b":", 2)[0] for check in first) == [b"lost", b"silent", b"silent-too", b"undone"]
    assert {check["TRANSACTION_CHECK_TIMES"] for check in first} == {b"1"}
    assert other.answer(1, lambda _: b"COMMIT")[0]["CHECK_ID"].startswith(b"other:")
    client.op("lost", b"COMMIT")  # a second time, because answers are at least once
    w.tick(after_now(38_000))  # after transactionCheckInterval
    w.resolve()
    rows = w.by_id(Table.MESSAGES)
    assert {name: row.check_times for name, row in rows.items()} == {"early": 0, "twice": 0, "lost": 1, "other": 1}

    w.tick(after_now(69_000))
    w.resolve()
    assert {name: row.reason for name, row in w.by_id(Table.DISCARDED).items()} == {"silent": "check_max", "silent-too": "check_max"}
    client.half("silent", ("INCARNATION", b"1"))
    client.op("silent", b"COMMIT", ("INCARNATION", b"1"))
    w.resolve()
    again = w.by_id(Table.MESSAGES)["silent"]
    assert (again.incarnation, bytes(again.body)) == (1, b"body of silent")
    assert "rolled" not in w.by_id(Table.MESSAGES)
    assert len(w.rows(Table.QUARANTINE)) == 1
    client.close()
    other.close()


def partitions_of(kafka: KafkaSettings, keys: list[str]) -> dict[str, int | None]:
    """Return the partition that each key gets."""
    producer = Producer({"bootstrap.servers": kafka.servers(), "partitioner": "murmur2_random"})
    placed: dict[str, int | None] = {}
    for key in keys:
        producer.produce(
            kafka.half_topic, b"", key, on_delivery=lambda _, message: placed.update({message.key().decode(): message.partition()})
        )
    assert producer.flush(30) == 0
    return placed


def test_the_murmur2_vectors_of_the_page_agree_with_kafka(spark: SparkSession, topics: MakeTopics) -> None:
    assert len(VECTORS) >= 8
    jvm = spark._jvm
    assert jvm is not None
    utils = jvm.org.apache.kafka.common.utils.Utils
    for key, value, of_4, of_12 in VECTORS:
        assert utils.toPositive(utils.murmur2(key.encode())) == value
        assert (value % 4, value % 12) == (of_4, of_12)
    for partitions in (4, 12):
        kafka = topics(partitions=partitions).kafka
        placed = partitions_of(kafka, [key for key, *_ in VECTORS])
        assert placed == {key: of_4 if partitions == 4 else of_12 for key, _, of_4, of_12 in VECTORS}


def test_the_page_names_every_header() -> None:
    cells = set(re.findall(r"`([A-Za-z_0-9]+)`", PAGE))
    own = {names.TICK, names.PARTITIONS, names.HALF_LOST, names.SIGNATURE}
    assert own | {*names.HALF_HEADERS, *names.OP_HEADERS, *names.CHECK_HEADERS, *names.DELAY_HEADERS} <= cells


def send_poison(kafka: KafkaSettings) -> None:
    """Write what is no check to the check topic, as anyone may: before all others, so that it is read first."""
    group = ("PGROUP", b"java-service")
    producer = Producer({"bootstrap.servers": kafka.servers()})
    for key, headers in [
        (None, [group, ("TRANSACTION_CHECK_TIMES", b"1")]),
        (b"no-times", [group]),
        (b"null", [group, ("TRANSACTION_CHECK_TIMES", None)]),
        (b"incarnation", [group, ("TRANSACTION_CHECK_TIMES", b"1"), ("INCARNATION", b"one")]),
        (b"long", [group, ("TRANSACTION_CHECK_TIMES", b"9" * 30)]),
    ]:
        for partition in range(2):
            producer.produce(kafka.check_topic, b"", key, partition=partition, headers=headers)
    assert producer.flush(30) == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("javac") is None, reason="Java here has no compiler")
def test_the_java_client_works(world: MakeWorld) -> None:
    w = world()
    kafka = w.settings.kafka
    jars = [str(jar) for jar in ensure_jars("kafka") if jar.name.startswith(("kafka-clients", "slf4j", "lz4", "snappy", "zstd"))]
    source = ROOT / "examples" / "java" / "TransactionClient.java"
    command = ["java", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error", "-cp", ":".join(jars), str(source)]
    arguments = [kafka.servers(), kafka.half_topic, kafka.op_topic, kafka.check_topic, "java-"]
    send_poison(kafka)
    service = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert service.stdout is not None
        printed = [service.stdout.readline() for _ in range(4)]
        assert printed[-1] == "sent\n", printed
        w.tick(after_now(7_000))
        w.resolve()
        assert set(w.by_id(Table.MESSAGES)) == {"java-commit"}
        until(lambda: service.poll() == 0, "the answer of the Java client", limit_s=60)
    finally:
        service.kill()
        service.communicate(timeout=30)
    w.resolve()
    rows = w.by_id(Table.MESSAGES)
    assert {name: (bytes(row.body), row.check_times) for name, row in rows.items()} == {
        "java-commit": (b"body of java-commit", 0),
        "java-unknown": (b"body of java-unknown", 1),
    }
    assert w.rows(Table.QUARANTINE) == []
