"""Collects the auditor's evidence without asking the job.

A plain consumer reads the topics, and delta-rs reads the tables.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Message

from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table
from tests.chaos.auditor import Check, Evidence, Half, Place, Refused, Row, Verdict
from tests.chaos.client import DATABASE_FILE, GARBAGE, STRAY
from tests.chaos.launcher import JOURNAL_FILE
from tests.chaos.plans import digest
from tests.chaos.reading import Tick
from tests.chaos.service_database import ServiceDatabase
from tests.support.delta_rows import delta_rows
from tests.support.partition_records import headers_of, records_of, retained_of
from tests.support.waiting import LIMIT_S

_MS = "CAST(CAST({} AS BIGINT) / 1000 AS BIGINT)"
_ROW = "transaction_id, half_partition, half_offset, {half_at} AS half_at, {decided} AS decided, check_times, producer_group, body"


class TopicReader:
    """Reads topics on from where it stopped, and keeps what it has read, also when Kafka has deleted it."""

    def __init__(self, settings: Settings) -> None:
        self._kafka, self._max_skew_ms = settings.kafka, settings.resolution.max_clock_skew
        self._position: dict[tuple[str, int], int] = {}
        self.halves: list[Half] = []
        self.verdicts: list[Verdict] = []
        self.checks: list[Check] = []
        self.garbage: list[Place] = []
        self.op_ticks: list[Tick] = []

    def read_on(self) -> None:
        """Read all new records of the three topics."""
        for message in self._new_records():
            headers = headers_of(message)
            key, place = (message.key() or b"").decode(), (message.partition() or 0, message.offset() or 0)
            if "TICK" in headers:
                self._take_tick(place, headers["TICK"], message)
                continue
            if "HALF_LOST" in headers:
                continue
            self._take(str(message.topic()), key, place, headers, message)

    def forget_positions(self) -> None:
        """Read from the start again, because the topics were deleted and created again."""
        self._position.clear()
        self.op_ticks.clear()

    def _take_tick(self, place: Place, own_ms: bytes, message: Message) -> None:
        """Keep a tick of the op topic that moves time (R14)."""
        at_ms = message.timestamp()[1]
        if message.topic() == self._kafka.op_topic and abs(int(own_ms) - at_ms) <= self._max_skew_ms:
            self.op_ticks.append(Tick(*place, at_ms))

    def _take(self, topic: str, key: str, place: Place, headers: dict[str, bytes], message: Message) -> None:
        at_ms, body = message.timestamp()[1], message.value() or b""
        group = headers.get("PGROUP", b"").decode()
        if topic == self._kafka.half_topic and key.startswith(GARBAGE):
            self.garbage.append(place)
        elif topic == self._kafka.half_topic:
            self.halves.append(Half(key, *place, at_ms, group, digest(body)))
        elif topic == self._kafka.check_topic:
            times = int(headers["TRANSACTION_CHECK_TIMES"])
            self.checks.append(Check(key, headers["CHECK_ID"].decode(), times, at_ms, digest(body)))
        elif headers["ACTION"] != b"UNKNOWN":
            is_stray = headers.get("REMARK") == STRAY
            self.verdicts.append(Verdict(key, at_ms, *place, group, headers["ACTION"] == b"COMMIT", is_stray))

    def _new_records(self) -> Iterator[Message]:
        config = {"bootstrap.servers": self._kafka.servers(), "group.id": "auditor", "enable.auto.commit": False, "fetch.wait.max.ms": 20}
        with Consumer(config) as consumer:
            # The check topic comes first, so that while traffic runs the half of each check that was read is read too.
            for topic in (self._kafka.check_topic, self._kafka.half_topic, self._kafka.op_topic):
                for partition in consumer.list_topics(topic, timeout=LIMIT_S).topics[topic].partitions:
                    for message in records_of(consumer, topic, partition, self._position.get((topic, partition), 0)):
                        self._position[topic, partition] = (message.offset() or 0) + 1
                        yield message


def end_offsets(settings: Settings, topic: str) -> dict[int, int]:
    """Return the end offset of each partition of a topic."""
    return {number: high for number, (_, high) in _watermarks(settings, topic).items()}


def start_offsets(settings: Settings, topic: str) -> dict[int, int]:
    """Return the first retained offset of each partition of a topic."""
    return {number: low for number, (low, _) in _watermarks(settings, topic).items()}


def _watermarks(settings: Settings, topic: str) -> dict[int, tuple[int, int]]:
    with Consumer({"bootstrap.servers": settings.kafka.servers(), "group.id": "auditor"}) as consumer:
        partitions = consumer.list_topics(topic, timeout=LIMIT_S).topics[topic].partitions
        return {number: retained_of(consumer, topic, number) for number in partitions}


def query(warehouse: Path, table: Table, columns: str, where: str = "true") -> list[dict[str, Any]]:
    """Return rows of a table, read by delta-rs; none if the table does not exist yet."""
    return delta_rows(warehouse / table, f"SELECT {columns} FROM rows WHERE {where}")


def ids_in(warehouse: Path, table: Table) -> set[str]:
    return {row["transaction_id"] for row in query(warehouse, table, "transaction_id")}


def rows_of(warehouse: Path, table: Table) -> list[Row]:
    decided = "committed_at" if table is Table.MESSAGES else "discarded_at"
    columns = _ROW.format(half_at=_MS.format("half_at"), decided=_MS.format(decided))
    found = ([*row.values()] for row in query(warehouse, table, columns))
    return [Row._make([*values, digest(body)]) for *values, body in found]


def gather(folder: Path, settings: Settings, topics: TopicReader, **known: Any) -> Evidence:
    """Return the evidence of now, read in an order that tolerates running traffic.

    Tables come first, then the decisions, the topics and the journal: a row needs a decision, a decision needs a half,
    and a check request needs its line in the journal.
    """
    warehouse = Path(settings.storage.warehouse)
    messages, discarded = rows_of(warehouse, Table.MESSAGES), rows_of(warehouse, Table.DISCARDED)
    refused = query(warehouse, Table.QUARANTINE, "transaction_id, source_topic, source_partition, source_offset, reason")
    decisions = ServiceDatabase(folder / DATABASE_FILE).decisions()
    topics.read_on()
    return Evidence(
        half_topic=settings.kafka.half_topic,
        check_max=settings.resolution.transactionCheckMax,
        decisions=decisions,
        halves=topics.halves,
        verdicts=topics.verdicts,
        checks=topics.checks,
        messages=messages,
        discarded=discarded,
        quarantine=[Refused(*row.values()) for row in refused],
        garbage=topics.garbage,
        op_ticks=topics.op_ticks,
        asked_at=journal(folder),
        start_offsets=start_offsets(settings, settings.kafka.half_topic),
        **known,
    )


def journal(folder: Path) -> list[tuple[str, int]]:
    """Return CHECK_ID and horizon of each check that the launcher recorded.

    A kill may cut a line off. Then its check request was not sent.
    """
    found = []
    with suppress(FileNotFoundError):
        for line in (folder / JOURNAL_FILE).read_text().splitlines():
            with suppress(ValueError):
                name, horizon_ms = json.loads(line)
                found.append((name, horizon_ms))
    return found
