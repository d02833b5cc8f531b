"""Reconciles every record of the topics with the tables, without Spark.

A plain consumer reads the topics, delta-rs reads the tables, and `judge` says what is right. A record is either refused
or accepted. A refused record has one row in `quarantine`, whole and for a reason that holds. The job's counts add up to
the accepted records. Each row of `messages` and `discarded` belongs to an accepted half and says what that half says.
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
from tests.fuzz.generator import Control, Fate
from tests.fuzz.judge import Judgement, Record, RecordKind, judge, meaning_of
from tests.fuzz.signing import Signing, is_late
from tests.support.partition_records import records_of
from tests.support.waiting import LIMIT_S

_MS = "CAST(CAST({0} AS BIGINT) / 1000 AS BIGINT) AS {0}"
_MESSAGE = (
    "half_offset, transaction_id, topic, queue_id, tags, keys, body, properties, producer_group, "
    f"{_MS.format('born_at')}, {_MS.format('half_at')}, incarnation, check_times"
)
_REFUSED = f"source_offset, {_MS.format('source_timestamp')}, transaction_id, key, value, headers, reason"
_OF_HALVES = (Reason.ID_CONFLICT, Reason.STALE_INCARNATION, Reason.INCARNATION_REFUSED)
# The last one is of an op whose `HALF_SIGNATURE` is not that of its half.
_OF_OPS = (Reason.CONFLICTING_VERDICT, Reason.LATE_VERDICT, Reason.ORPHAN_OP, Reason.GROUP_MISMATCH, Reason.BAD_SIGNATURE)
_EXAMPLES = 20

Rows = dict[int, list[dict[str, Any]]]
"""The rows of one table that belong to a partition, by offset."""


@dataclass
class Reconciliation:
    """The numbers of records and rows, and the differences between them."""

    records: int = 0
    accepted: Counter[str] = field(default_factory=Counter)
    """The accepted records by kind."""
    refused: int = 0
    refused_for_one: Counter[str] = field(default_factory=Counter)
    """The refused records that break the contract in one way, by reason."""
    refused_for_several: Counter[str] = field(default_factory=Counter)
    """The refused records that break it in several ways, counted for each reason."""
    quarantined: Counter[str] = field(default_factory=Counter)
    """The rows of `quarantine` by reason."""
    forged: int = 0
    """The rows of `quarantine` of records that are refused for their signature alone."""
    late: int = 0
    """The good halves that a rule refuses, because they were read after their signature was valid."""
    rows: Counter[str] = field(default_factory=Counter)
    """The rows of `messages` and `discarded` by table."""
    differences: int = 0
    examples: list[str] = field(default_factory=list)
    """The first 20 differences."""

    def differ(self, what: str) -> None:
        self.differences += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(what)

    def expect(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            self.differ(f"{what}: {found!r}, not {expected!r}")


@dataclass(frozen=True)
class _Judge:
    """Judges records as the job of this run must."""

    max_body_bytes: int
    signing: Signing | None

    def __call__(self, record: Record) -> Judgement:
        is_forged = (lambda _: False) if self.signing is None else self.signing.refuses
        return judge(record, self.max_body_bytes, is_forged=is_forged)

    def may_be_late(self, record: Record) -> bool:
        """Return True if the job may refuse a good half, because its signature was valid until before the horizon."""
        return self.signing is not None and record.of_half and is_late(record)


def reconcile(
    settings: Settings, counts: Mapping[str, int], control: Mapping[str, Control], check_max: int, signing: Signing | None = None
) -> Reconciliation:
    """Compare both topics with the three tables, after everything is settled.

    Args:
        settings: the settings of the job.
        counts: what the job counted in all its batches.
        control: the control transactions by id.
        check_max: the number of checks before a discard.
        signing: the keys, if records are signed.
    """
    judging = _Judge(settings.resolution.max_body_bytes, signing)
    account, warehouse = Reconciliation(), Path(settings.storage.warehouse)
    left = dict(control)
    topics = {True: settings.kafka.half_topic, False: settings.kafka.op_topic}
    for of_half, topic in topics.items():
        for partition, records in _partitions(settings, topic, of_half=of_half):
            refused = _rows(warehouse, Table.QUARANTINE, _REFUSED, f"source_topic = '{topic}' AND source_partition = {partition}")
            ends: dict[Table, Rows] = {
                table: _outcome_rows(warehouse, table, partition) if of_half else {} for table in (Table.MESSAGES, Table.DISCARDED)
            }
            for offset, record in records:
                place = f"{topic}-{partition}@{offset}"
                _check_record(account, place, record, refused.pop(offset, []), judging)
                messages, discarded = (ends[table].pop(offset, []) for table in (Table.MESSAGES, Table.DISCARDED))
                if of_half:
                    _check_outcome_rows(account, place, record, messages, discarded)
                    _check_control(account, place, record, messages, discarded, left, check_max, judging)
            for what, rest in ((Table.QUARANTINE, refused), *ends.items()):
                account.expect(f"rows of {what} of no record of {topic}-{partition}", sorted(rest)[:5], [])
    account.expect("control transactions without a half", sorted(left)[:5], [])
    _check_counts(account, counts)
    return account


def _check_record(account: Reconciliation, place: str, record: Record, rows: list[dict[str, Any]], judging: _Judge) -> None:
    """Compare the judgement of a record with its rows of `quarantine`."""
    account.records += 1
    judgement, found = judging(record), [row["reason"] for row in rows]
    is_late = not judgement.reasons and found == [Reason.BAD_SIGNATURE] and judging.may_be_late(record)
    account.late += is_late
    account.quarantined.update(found)
    account.forged += bool(judgement.reasons) * found.count(Reason.BAD_SIGNATURE)
    if judgement.reasons:
        account.refused += 1
        (account.refused_for_one if len(judgement.reasons) == 1 else account.refused_for_several).update(judgement.reasons)
        if len(rows) != 1 or found[0] not in judgement.reasons:
            account.differ(f"{place} is refused for {found}, not for {sorted(judgement.reasons)}: {_shown(record)}")
    else:
        account.accepted[judgement.kind] += 1
        allowed = {RecordKind.HALF: _OF_HALVES, RecordKind.OP: _OF_OPS}.get(judgement.kind, ())
        if len(rows) > 1 or (not is_late and any(reason not in allowed for reason in found)):
            account.differ(f"{place} is refused for {found}, a good {judgement.kind}: {_shown(record)}")
    for row in rows:
        _check_quarantine_row(account, place, record, row, is_broken=bool(judgement.reasons))


def _check_quarantine_row(account: Reconciliation, place: str, record: Record, row: Mapping[str, Any], *, is_broken: bool) -> None:
    """Check a row of `quarantine`.

    It holds a broken record byte for byte. If a rule refuses a good record, key, value and headers may be null.
    """
    headers = None if row["headers"] is None else [(header["key"], header["value"]) for header in row["headers"]]
    pairs = {"key": (row["key"], record.key), "value": (row["value"], record.value), "headers": (headers, record.headers)}
    for name, (found, sent) in pairs.items():
        if found != sent and (is_broken or found is not None):
            account.differ(f"{place} in quarantine has another {name}: {str(found)[:200]}, sent: {str(sent)[:200]}")
    account.expect(f"{place} source_timestamp", row["source_timestamp"], record.at_ms)
    account.expect(f"{place} transaction_id", row["transaction_id"], _text(record.key) if len(record.key or b"") <= 255 else None)


def _check_outcome_rows(
    account: Reconciliation, place: str, record: Record, messages: list[dict[str, Any]], discarded: list[dict[str, Any]]
) -> None:
    """Check that a half has at most one row in one table, and that the row says what the half says."""
    account.rows.update({Table.MESSAGES: len(messages), Table.DISCARDED: len(discarded)})
    if len(messages) + len(discarded) > 1:
        account.differ(f"{place} has {len(messages)} rows in messages and {len(discarded)} in discarded")
    for row in (*messages, *discarded):
        meaning = meaning_of(record)
        for name in ("transaction_id", "topic", "queue_id", "tags", "keys", "body", "producer_group", "incarnation"):
            account.expect(f"{place} {name}", row[name], getattr(meaning, name))
        account.expect(f"{place} properties", dict(row["properties"]), meaning.properties)
        account.expect(f"{place} born_at and half_at", (row["born_at"], row["half_at"]), (meaning.born_ms, meaning.half_ms))


def _check_control(
    account: Reconciliation,
    place: str,
    record: Record,
    messages: list[dict[str, Any]],
    discarded: list[dict[str, Any]],
    left: dict[str, Control],
    check_max: int,
    judging: _Judge,
) -> None:
    """Check that a control transaction has the outcome it was made for."""
    promised = left.get(_text(record.key) or "")
    if promised is None or judging(record).reasons:
        return
    del left[_text(record.key) or ""]
    expected = {
        Fate.COMMIT: ([promised.decided_ms], []),
        Fate.ROLLBACK: ([], []),
        Fate.SILENT: ([], [(Reason.CHECK_MAX, check_max)]),
    }[promised.fate]
    found = [row["committed_at"] for row in messages], [(row["reason"], row["check_times"]) for row in discarded]
    account.expect(f"{place} control {promised.fate}", found, expected)


def _check_counts(account: Reconciliation, counts: Mapping[str, int]) -> None:
    """Check the job's counts against the accepted halves and ops, and against the rows."""
    of_halves = (Count.DUPLICATE_HALF, Count.COMMITTED, Count.ROLLED_BACK, Count.DISCARDED, *_OF_HALVES)
    of_ops = (Count.UNKNOWN, Count.DUPLICATE_OP, Count.COMMITTED, Count.ROLLED_BACK, *_OF_OPS)
    account.expect("halves counted", counts.get(Count.HALVES, 0), account.accepted[RecordKind.HALF])
    by_outcome = sum(counts.get(name, 0) for name in of_halves) + account.late
    account.expect("halves by outcome", by_outcome, account.accepted[RecordKind.HALF])
    account.expect("ops counted", counts.get(Count.OPS, 0), account.accepted[RecordKind.OP])
    by_outcome = sum(counts.get(name, 0) for name in of_ops) - account.forged - account.late
    account.expect("ops by outcome", by_outcome, account.accepted[RecordKind.OP])
    account.expect("rows of messages", account.rows[Table.MESSAGES], counts.get(Count.COMMITTED, 0))
    account.expect("rows of discarded", account.rows[Table.DISCARDED], counts.get(Count.DISCARDED, 0))
    for reason in sorted({*account.quarantined, *(name for name in counts if name in set(Reason))}):
        account.expect(f"rows of {reason}", account.quarantined[reason], counts.get(reason, 0))


def _partitions(settings: Settings, topic: str, *, of_half: bool) -> Iterator[tuple[int, Iterator[tuple[int, Record]]]]:
    config = {"bootstrap.servers": settings.kafka.servers(), "group.id": "accountant", "enable.auto.commit": False, "fetch.wait.max.ms": 20}
    with Consumer(config) as consumer:
        for partition in consumer.list_topics(topic, timeout=LIMIT_S).topics[topic].partitions:
            yield partition, _records(consumer, topic, partition, of_half=of_half)


def _records(consumer: Consumer, topic: str, partition: int, *, of_half: bool) -> Iterator[tuple[int, Record]]:
    for message in records_of(consumer, topic, partition):
        headers = cast("list[tuple[str, bytes | None]]", message.headers() or [])
        yield message.offset() or 0, Record(of_half, partition, message.key(), message.value(), headers, message.timestamp()[1])


def _outcome_rows(warehouse: Path, table: Table, partition: int) -> Rows:
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
