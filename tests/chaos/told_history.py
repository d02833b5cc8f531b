"""Tells a chaos world in the words of the history checker (tests/simulation/checker.py), which then judges it.

Threads and processes leave open in which order some things happened. What is told of the order is what the checker may
conclude from: records have the order of the brokers' clocks, put right where one was off, a tick is told before other
records of its millisecond, because the job may have read it by then, and rows come after everything, in the order of
their bookmarks.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka import Message

from halfway.schemas.headers import TICK
from halfway.schemas.outcomes import Reason
from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table
from halfway.transforms.rules import rules_of
from tests.chaos.client import GARBAGE, STRAY
from tests.chaos.evidence import query, start_offsets
from tests.chaos.plans import Decision, Fate, digest
from tests.simulation import history as told
from tests.support.partition_records import topic_records

_MS = "CAST(CAST({0} AS BIGINT) / 1000 AS BIGINT) AS {0}"
_HOUR_MS = 3_600_000
_OUTCOME = ("transaction_id", "half_partition", "half_offset", "check_times", "producer_group", "topic", "incarnation", "body")
_COLUMNS = {
    Table.MESSAGES: (
        *_OUTCOME,
        *("op_partition", "op_offset", _MS.format("half_at"), _MS.format("committed_at"), "epoch", "batch_id"),
    ),
    Table.DISCARDED: (*_OUTCOME, _MS.format("half_at"), _MS.format("discarded_at"), "reason", "epoch", "batch_id"),
    Table.QUARANTINE: ("source_topic", "source_partition", "source_offset", "transaction_id", "reason", "epoch", "batch_id"),
}


class Told(NamedTuple):
    """A record of a topic, as a plain consumer reads it."""

    topic: str
    partition: int
    offset: int
    at_ms: int
    key: bytes | None
    value: bytes | None
    headers: told.Headers


def history_of(settings: Settings, decisions: Mapping[str, Decision], pending: Iterable[str], *, was_adopted: bool) -> told.History | None:
    """Return the history of a world whose job and services have stopped; None if Kafka has deleted a part of it.

    Args:
        settings: the job's.
        decisions: what the services' database holds.
        pending: the ids that the job still holds as pending.
        was_adopted: a job has taken the tables over with a new checkpoint.
    """
    kafka, resolution = settings.kafka, settings.resolution
    topics = {kafka.half_topic: told.HALF, kafka.op_topic: told.OP, kafka.check_topic: told.CHECK}
    if any(first for topic in topics for first in start_offsets(settings, topic).values()):
        return None
    found = (_told(topics[topic], record) for topic in topics for record in topic_records(kafka.servers(), topic))
    records = records_in_order(found, resolution.max_clock_skew)
    groups = {record.text_key: record.header("PGROUP") for record in records if record.topic == told.HALF and record.flaw is None}
    return told.History(
        records=records,
        rows=rows_in_order(_rows(Path(settings.storage.warehouse), topics), len(records) + 1),
        decisions=[
            told.Decision(0, groups.get(name, ""), name, 0, told.Fate(decision.fate))
            for name, decision in decisions.items()
            if decision.fate is not Fate.NEVER
        ],
        acts=[told.Act(0, "started", "--adopt")] * was_adopted,
        numbers=[told.Numbers(*rules_of(resolution)[:5], resolution.max_clock_skew, resolution.max_body_bytes)],
        still_pending=set(pending),
        clocks_jumped=any(record.flaw == Reason.BAD_TICK for record in records),
        is_at_rest=False,
    )


def _told(topic: str, message: Message) -> Told:
    headers: Any = message.headers() or ()
    return Told(
        topic, message.partition() or 0, message.offset() or 0, message.timestamp()[1], message.key(), message.value(), tuple(headers)
    )


def records_in_order(records: Iterable[Told], max_clock_skew_ms: int) -> list[told.Record]:
    """Return records in an order that the brokers' clocks allow, each tick as early as it can have come."""

    def order(timed: tuple[int, Told]) -> tuple[int, bool, str, int, int]:
        true_ms, record = timed
        return true_ms, not _is_tick(record), record.topic, record.partition, record.offset

    return [_record(record, seq, max_clock_skew_ms) for seq, (_, record) in enumerate(sorted(_timed(records), key=order), 1)]


def _timed(records: Iterable[Told]) -> Iterator[tuple[int, Told]]:
    """Yield records with their times as a clock that is right tells them: a fault puts one off by a whole hour.

    A world is never silent for half an hour, so a larger step between neighbours in a partition is a clock's.
    """
    for _, those in groupby(sorted(records, key=lambda record: record[:3]), key=lambda record: record[:2]):
        true_ms = None
        for record in those:
            hours = 0 if true_ms is None else round((record.at_ms - true_ms) / _HOUR_MS)
            true_ms = record.at_ms - hours * _HOUR_MS
            yield true_ms, record


def _record(record: Told, seq: int, max_clock_skew_ms: int) -> told.Record:
    is_garbage = record.topic == told.HALF and (record.key or b"").startswith(GARBAGE.encode())
    is_stray = is_garbage or ("REMARK", STRAY) in record.headers
    flaw = Reason.MISSING_HEADER if is_garbage else None
    if _is_tick(record) and abs(int(dict(record.headers)[TICK] or 0) - record.at_ms) > max_clock_skew_ms:
        flaw = Reason.BAD_TICK
    # The checker compares bodies, which may be large.
    value = record.value if _is_tick(record) else digest(record.value or b"").encode()
    content = (record.key, value, record.headers)
    return told.Record(*record[:4], *content, seq, flaw=flaw, is_stray=is_stray)


def _is_tick(record: Told) -> bool:
    return any(name == TICK for name, _ in record.headers)


def _rows(warehouse: Path, topics: Mapping[str, str]) -> list[tuple[Table, dict[str, Any]]]:
    found = [(table, row) for table, columns in _COLUMNS.items() for row in query(warehouse, table, ", ".join(columns))]
    for table, row in found:
        if table is Table.QUARANTINE:
            row["source_topic"] = topics[row["source_topic"]]
        else:
            row["body"] = digest(row["body"]).encode()
    return found


def rows_in_order(rows: Iterable[tuple[Table, Mapping[str, Any]]], first_seq: int) -> list[told.Row]:
    """Return rows as if each batch was written after all records, in the order of the bookmarks."""

    def bookmark(row: tuple[Table, Mapping[str, Any]]) -> tuple[int, int]:
        return row[1]["epoch"], row[1]["batch_id"]

    ordered = sorted(rows, key=bookmark)
    seq_of = {mark: first_seq + number for number, mark in enumerate(dict.fromkeys(map(bookmark, ordered)))}
    return [told.Row(str(row[0]), seq_of[bookmark(row)], dict(row[1])) for row in ordered]
