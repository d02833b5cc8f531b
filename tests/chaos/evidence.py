"""Where the auditor's evidence comes from: topics by a plain consumer, tables by delta-rs, the ledger; nothing of the job is asked."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pyarrow
from confluent_kafka import Consumer, Message, TopicPartition
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import TableNotFoundError

from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table
from tests.chaos.client import GARBAGE, LEDGER_FILE, STRAY
from tests.chaos.launcher import JOURNAL_FILE
from tests.chaos.plans import Ledger, digest
from tests.fuzz.auditor import Check, Evidence, Half, Place, Refused, Row, Verdict

_LIMIT_S = 30.0
_MS = "CAST(CAST({} AS BIGINT) / 1000 AS BIGINT)"
_ROW = "transaction_id, half_partition, half_offset, {half_at} AS half_at, {decided} AS decided, check_times, producer_group, body"


class TopicReader:
    """Reads topics on from where it was; what was read stays known, also when it is gone from Kafka."""

    def __init__(self, settings: Settings) -> None:
        self._kafka = settings.kafka
        self._position: dict[tuple[str, int], int] = {}
        self.halves: list[Half] = []
        self.verdicts: list[Verdict] = []
        self.checks: list[Check] = []
        self.garbage: list[Place] = []

    def read_on(self) -> None:
        """Read all that is in the three topics now."""
        for message in self._new_records():
            pairs = cast("list[tuple[str, bytes | None]]", message.headers() or [])
            headers = {name: value for name, value in pairs if value is not None}
            if "TICK" in headers or "HALF_LOST" in headers:
                continue
            key, place = (message.key() or b"").decode(), (message.partition() or 0, message.offset() or 0)
            self._take(str(message.topic()), key, place, headers, message)

    def forget_place(self) -> None:
        """Begin anew: the topics are not those that they were."""
        self._position.clear()

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
            for topic in (self._kafka.half_topic, self._kafka.op_topic, self._kafka.check_topic):
                for partition in consumer.list_topics(topic, timeout=_LIMIT_S).topics[topic].partitions:
                    for message in records_of(consumer, topic, partition, self._position.get((topic, partition), 0)):
                        self._position[topic, partition] = (message.offset() or 0) + 1
                        yield message


def records_of(consumer: Consumer, topic: str, partition: int, since: int = 0) -> Iterator[Message]:
    """The records that a partition holds now, from an offset on."""
    low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=_LIMIT_S)
    position = max(low, since)
    if position < high:
        consumer.assign([TopicPartition(topic, partition, position)])
    while position < high:
        messages = consumer.consume(min(10_000, high - position), timeout=_LIMIT_S)
        assert messages, f"{topic} does not answer"
        for message in messages:
            assert message.error() is None, message.error()
            position = (message.offset() or 0) + 1
            yield message


def ends_of(settings: Settings, topic: str) -> dict[int, int]:
    """The end of each partition of a topic."""
    return {number: high for number, (_, high) in _watermarks(settings, topic).items()}


def lows_of(settings: Settings, topic: str) -> dict[int, int]:
    """The first offset that is left in each partition of a topic."""
    return {number: low for number, (low, _) in _watermarks(settings, topic).items()}


def _watermarks(settings: Settings, topic: str) -> dict[int, tuple[int, int]]:
    with Consumer({"bootstrap.servers": settings.kafka.servers(), "group.id": "auditor"}) as consumer:
        partitions = consumer.list_topics(topic, timeout=_LIMIT_S).topics[topic].partitions
        return {number: consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=_LIMIT_S) for number in partitions}


def query(warehouse: Path, table: Table, columns: str, where: str = "true") -> list[dict[str, Any]]:
    """Rows of a table by delta-rs' own engine; none if it is not there yet."""
    with suppress(TableNotFoundError):
        rows = QueryBuilder().register("rows", DeltaTable(str(warehouse / table))).execute(f"SELECT {columns} FROM rows WHERE {where}")
        found: list[dict[str, Any]] = pyarrow.table(rows).to_pylist()
        return found
    return []


def ids_in(warehouse: Path, table: Table) -> set[str]:
    return {row["transaction_id"] for row in query(warehouse, table, "transaction_id")}


def rows_of(warehouse: Path, table: Table) -> list[Row]:
    decided = "committed_at" if table is Table.MESSAGES else "discarded_at"
    columns = _ROW.format(half_at=_MS.format("half_at"), decided=_MS.format(decided))
    found = ([*row.values()] for row in query(warehouse, table, columns))
    return [Row._make([*values, digest(body)]) for *values, body in found]


def gather(folder: Path, settings: Settings, topics: TopicReader, **known: Any) -> Evidence:
    """Put together what is known now, in an order in which traffic may go on: a row needs a decision, that a half, and a check a note."""
    warehouse = Path(settings.storage.warehouse)
    messages, discarded = rows_of(warehouse, Table.MESSAGES), rows_of(warehouse, Table.DISCARDED)
    refused = query(warehouse, Table.QUARANTINE, "transaction_id, source_topic, source_partition, source_offset, reason")
    ledger = Ledger(folder / LEDGER_FILE).entries()
    topics.read_on()
    return Evidence(
        half_topic=settings.kafka.half_topic,
        op_topic=settings.kafka.op_topic,
        check_max=settings.resolution.transactionCheckMax,
        ledger=ledger,
        halves=topics.halves,
        verdicts=topics.verdicts,
        checks=topics.checks,
        messages=messages,
        discarded=discarded,
        quarantine=[Refused(*row.values()) for row in refused],
        garbage=topics.garbage,
        asked_at=journal(folder),
        low=lows_of(settings, settings.kafka.half_topic),
        **known,
    )


def journal(folder: Path) -> list[tuple[str, int]]:
    """What the launcher noted: CHECK_ID and horizon of each check. A line that was cut off by a kill was never sent."""
    found = []
    with suppress(FileNotFoundError):
        for line in (folder / JOURNAL_FILE).read_text().splitlines():
            with suppress(ValueError):
                name, horizon_ms = json.loads(line)
                found.append((name, horizon_ms))
    return found
