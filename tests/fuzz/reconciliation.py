"""Every record of the topics, and what became of it: read by a plain consumer and by delta-rs, judged by `judge`; no Spark.

A record is in the books exactly once: refused, in one row of `quarantine`, whole and for a reason that holds; or accepted, and then
the job's own counts must add up to all that was accepted, and every row that it wrote must be of an accepted record and say what that says.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import pyarrow
from confluent_kafka import Consumer
from deltalake import DeltaTable, QueryBuilder

from halfway.schemas.outcomes import Count, Reason
from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table
from tests.chaos.evidence import records_of
from tests.fuzz.generator import Control, Fate
from tests.fuzz.judge import Record, Sort, judge, meaning_of

_LIMIT_S = 30.0
_MS = "CAST(CAST({0} AS BIGINT) / 1000 AS BIGINT) AS {0}"
_MESSAGE = (
    "half_offset, transaction_id, topic, queue_id, tags, keys, body, properties, producer_group, "
    f"{_MS.format('born_at')}, {_MS.format('half_at')}, incarnation, check_times"
)
_REFUSED = f"source_offset, {_MS.format('source_timestamp')}, transaction_id, key, value, headers, reason"
_OF_HALVES = (Reason.ID_CONFLICT, Reason.STALE_INCARNATION, Reason.INCARNATION_REFUSED)
_OF_OPS = (Reason.CONFLICTING_VERDICT, Reason.LATE_VERDICT, Reason.ORPHAN_OP, Reason.GROUP_MISMATCH)
_EXAMPLES = 20

Rows = dict[int, list[dict[str, Any]]]
"""A partition's rows of one table, by offset."""


@dataclass
class Books:
    """What the accountant found."""

    records: int = 0
    sorts: Counter[str] = field(default_factory=Counter)
    """Accepted records by what they are."""
    only: Counter[str] = field(default_factory=Counter)
    """Refused records that break the contract in one way, by it."""
    among: Counter[str] = field(default_factory=Counter)
    """Those that break it in several, once for each."""
    refused: int = 0
    found: Counter[str] = field(default_factory=Counter)
    """Rows of `quarantine` by reason."""
    rows: Counter[str] = field(default_factory=Counter)
    differences: int = 0
    examples: list[str] = field(default_factory=list)

    def differ(self, what: str) -> None:
        self.differences += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(what)

    def expect(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            self.differ(f"{what}: {found!r}, not {expected!r}")


def keep_books(settings: Settings, counts: Mapping[str, int], control: Mapping[str, Control], check_max: int) -> Books:
    """Go through both topics and the three tables. `counts`: what the job counted in all its batches; nothing may be pending any more."""
    books, warehouse = Books(), Path(settings.storage.warehouse)
    left = dict(control)
    topics = {True: settings.kafka.half_topic, False: settings.kafka.op_topic}
    for of_half, topic in topics.items():
        for partition, records in _partitions(settings, topic, of_half=of_half):
            refused = _rows(warehouse, Table.QUARANTINE, _REFUSED, f"source_topic = '{topic}' AND source_partition = {partition}")
            ends: dict[Table, Rows] = {
                table: _ends(warehouse, table, partition) if of_half else {} for table in (Table.MESSAGES, Table.DISCARDED)
            }
            for offset, record in records:
                place = f"{topic}-{partition}@{offset}"
                _keep(books, place, record, refused.pop(offset, []), settings.resolution.max_body_bytes)
                messages, discarded = (ends[table].pop(offset, []) for table in (Table.MESSAGES, Table.DISCARDED))
                if of_half:
                    _keep_end(books, place, record, messages, discarded)
                    _keep_control(books, place, record, messages, discarded, left, check_max)
            for what, rest in ((Table.QUARANTINE, refused), *ends.items()):
                books.expect(f"rows of {what} of no record of {topic}-{partition}", sorted(rest)[:5], [])
    books.expect("control transactions without their end", sorted(left)[:5], [])
    _add_up(books, counts)
    return books


def _keep(books: Books, place: str, record: Record, rows: list[dict[str, Any]], max_body_bytes: int) -> None:
    """Enter one record: judged, and against its rows of `quarantine`."""
    books.records += 1
    judgement = judge(record, max_body_bytes)
    books.found.update(row["reason"] for row in rows)
    if judgement.reasons:
        books.refused += 1
        (books.only if len(judgement.reasons) == 1 else books.among).update(judgement.reasons)
        reasons = [row["reason"] for row in rows]
        if len(rows) != 1 or reasons[0] not in judgement.reasons:
            books.differ(f"{place} is refused for {reasons}, not for {sorted(judgement.reasons)}: {_shown(record)}")
    else:
        books.sorts[judgement.sort] += 1
        allowed = {Sort.HALF: _OF_HALVES, Sort.OP: _OF_OPS}.get(judgement.sort, ())
        if len(rows) > 1 or any(row["reason"] not in allowed for row in rows):
            books.differ(f"{place} is refused for {[row['reason'] for row in rows]}, a good {judgement.sort}: {_shown(record)}")
    for row in rows:
        _keep_whole(books, place, record, row, is_broken=bool(judgement.reasons))


def _keep_whole(books: Books, place: str, record: Record, row: Mapping[str, Any], *, is_broken: bool) -> None:
    """A broken record is in `quarantine` byte for byte; of a good one that a rule refuses, what is there must be so."""
    headers = None if row["headers"] is None else [(header["key"], header["value"]) for header in row["headers"]]
    pairs = {"key": (row["key"], record.key), "value": (row["value"], record.value), "headers": (headers, record.headers)}
    for name, (found, sent) in pairs.items():
        if found != sent and (is_broken or found is not None):
            books.differ(f"{place} in quarantine has another {name}: {str(found)[:200]}, sent: {str(sent)[:200]}")
    books.expect(f"{place} source_timestamp", row["source_timestamp"], record.at_ms)
    books.expect(f"{place} transaction_id", row["transaction_id"], _text(record.key))


def _keep_end(books: Books, place: str, record: Record, messages: list[dict[str, Any]], discarded: list[dict[str, Any]]) -> None:
    """A half ends in one row of one table at most, and the row says what the half says."""
    books.rows.update({Table.MESSAGES: len(messages), Table.DISCARDED: len(discarded)})
    if len(messages) + len(discarded) > 1:
        books.differ(f"{place} has {len(messages)} rows in messages and {len(discarded)} in discarded")
    for row in (*messages, *discarded):
        meaning = meaning_of(record)
        for name in ("transaction_id", "topic", "queue_id", "tags", "keys", "body", "producer_group", "incarnation"):
            books.expect(f"{place} {name}", row[name], getattr(meaning, name))
        books.expect(f"{place} properties", dict(row["properties"]), meaning.properties)
        books.expect(f"{place} born_at and half_at", (row["born_at"], row["half_at"]), (meaning.born_ms, meaning.half_ms))


def _keep_control(
    books: Books,
    place: str,
    record: Record,
    messages: list[dict[str, Any]],
    discarded: list[dict[str, Any]],
    left: dict[str, Control],
    check_max: int,
) -> None:
    """A control transaction has the end that it was made for."""
    promised = left.get(_text(record.key) or "")
    if promised is None or judge(record, 2**31).reasons:
        return
    del left[_text(record.key) or ""]
    expected = {
        Fate.COMMIT: ([promised.decided_ms], []),
        Fate.ROLLBACK: ([], []),
        Fate.SILENT: ([], [(Reason.CHECK_MAX, check_max)]),
    }[promised.fate]
    found = [row["committed_at"] for row in messages], [(row["reason"], row["check_times"]) for row in discarded]
    books.expect(f"{place} control {promised.fate}", found, expected)


def _add_up(books: Books, counts: Mapping[str, int]) -> None:
    """The job's own counts: every half and op that was accepted is one of them, and every row too."""
    of_halves = (Count.DUPLICATE_HALF, Count.COMMITTED, Count.ROLLED_BACK, Count.DISCARDED, *_OF_HALVES)
    of_ops = (Count.UNKNOWN, Count.DUPLICATE_OP, Count.COMMITTED, Count.ROLLED_BACK, *_OF_OPS)
    books.expect("halves counted", counts.get(Count.HALVES, 0), books.sorts[Sort.HALF])
    books.expect("halves by what became of them", sum(counts.get(name, 0) for name in of_halves), books.sorts[Sort.HALF])
    books.expect("ops counted", counts.get(Count.OPS, 0), books.sorts[Sort.OP])
    books.expect("ops by what became of them", sum(counts.get(name, 0) for name in of_ops), books.sorts[Sort.OP])
    books.expect("rows of messages", books.rows[Table.MESSAGES], counts.get(Count.COMMITTED, 0))
    books.expect("rows of discarded", books.rows[Table.DISCARDED], counts.get(Count.DISCARDED, 0))
    for reason in sorted({*books.found, *(name for name in counts if name in set(Reason))}):
        books.expect(f"rows of {reason}", books.found[reason], counts.get(reason, 0))


def _partitions(settings: Settings, topic: str, *, of_half: bool) -> Iterator[tuple[int, Iterator[tuple[int, Record]]]]:
    config = {"bootstrap.servers": settings.kafka.servers(), "group.id": "accountant", "enable.auto.commit": False, "fetch.wait.max.ms": 20}
    with Consumer(config) as consumer:
        for partition in consumer.list_topics(topic, timeout=_LIMIT_S).topics[topic].partitions:
            yield partition, _records(consumer, topic, partition, of_half=of_half)


def _records(consumer: Consumer, topic: str, partition: int, *, of_half: bool) -> Iterator[tuple[int, Record]]:
    for message in records_of(consumer, topic, partition):
        headers = cast("list[tuple[str, bytes | None]]", message.headers() or [])
        yield message.offset() or 0, Record(of_half, partition, message.key(), message.value(), headers, message.timestamp()[1])


def _ends(warehouse: Path, table: Table, partition: int) -> Rows:
    decided = _MS.format("committed_at") if table is Table.MESSAGES else "reason"
    return _rows(warehouse, table, f"{_MESSAGE}, {decided}", f"half_partition = {partition}")


def _rows(warehouse: Path, table: Table, columns: str, where: str) -> dict[int, list[dict[str, Any]]]:
    place = columns.partition(",")[0]
    query = f"SELECT {columns} FROM rows WHERE {where} ORDER BY {place}"
    found = pyarrow.table(QueryBuilder().register("rows", DeltaTable(str(warehouse / table))).execute(query))
    rows: Iterable[dict[str, Any]] = (row for batch in found.to_batches() for row in batch.to_pylist())
    return {offset: list(group) for offset, group in groupby(rows, key=lambda row: cast("int", row[place]))}


def _text(key: bytes | None) -> str | None:
    try:
        return None if key is None else key.decode()
    except UnicodeDecodeError:
        return None


def _shown(record: Record) -> str:
    return f"key {record.key!r:.100}, {len(record.value or b'')} bytes, at {record.at_ms}, {record.headers!s:.600}"
