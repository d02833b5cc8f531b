"""The product's `BatchWriter`, which decides the order of a batch's steps, over simulated tables and topics."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from halfway.pipelines.resolve.report import BatchReport
from halfway.pipelines.resolve.sinks import BatchWriter
from halfway.pipelines.storage.delta_tables import append_id
from halfway.pipelines.storage.lineage import BatchOrigin, appended_in, origin_of, verify_not_skipped
from halfway.pipelines.storage.manifest import Manifest
from halfway.pipelines.storage.state_reader import HadoopFiles
from halfway.schemas.bookmark import Bookmark
from halfway.schemas.errors import KafkaUnavailableError
from halfway.schemas.events import OUTCOME_SCHEMA, StoredRecord
from halfway.schemas.headers import BORN_TIMESTAMP, HALF_LOST, Source
from halfway.schemas.outcomes import Kind, Reason
from halfway.schemas.reports import BucketReport
from halfway.schemas.tables import Table
from halfway.transforms import rows as row_makers
from halfway.transforms.protocol import Outcome
from tests.simulation.history import CHECK, HALF, OP, Row

if TYPE_CHECKING:
    from tests.simulation.job import Job

Rows = list[dict[str, Any]]
Found = list[tuple[Outcome, StoredRecord | None]]
_TOPICS = {Source.HALF: HALF, Source.OP: OP}


class BatchOutcomes:
    """The outcomes of one batch: what Spark's frame is to the product."""

    def __init__(self, outcomes: Iterable[Outcome], may_be_held: int, buckets: Mapping[int, BucketReport]) -> None:
        self.all = list(outcomes)
        self.may_be_held, self.buckets = may_be_held, buckets
        self.rows = Counter(outcome.kind for outcome in self.all)

    def of(self, kind: Kind) -> list[Outcome]:
        return [outcome for outcome in self.all if outcome.kind is kind]

    def persist(self) -> None:
        """Nothing is evaluated twice here."""

    def unpersist(self) -> None:
        """Nothing was cached."""


class SimulatedWriter(BatchWriter):
    """Writes batches. `write` is the product's; the single steps are done without Spark and Kafka."""

    def __init__(self, job: "Job", manifest: Manifest, held: Sequence[BatchOrigin]) -> None:
        self._job = job
        self._settings = job.settings
        self._query_id, self._epoch = manifest.query_id, manifest.epoch
        storage: Any = job.storage
        self.appended = appended_in(HadoopFiles(storage, job.settings.storage))
        self.appended_before = {}
        self._may_be_repeat = True
        self._taken_over = None
        self._held = held

    def _count(self, packs: Any, report: BatchReport) -> Any:
        outcomes: BatchOutcomes = packs
        if outcomes.may_be_held:
            outcomes = BatchOutcomes(self._not_held(outcomes), 0, outcomes.buckets)
        report.rows, report.buckets = outcomes.rows, outcomes.buckets
        return outcomes

    def may_be_held(self, outcome: Outcome) -> bool:
        """Return True if adopted tables may hold the message of an outcome."""
        ends = self._job.manifest.taken_at
        is_half = outcome.offset < ends.get(HALF, {}).get(outcome.partition, 0)
        is_verdict = outcome.kind is Kind.COMMIT and outcome.op_offset < ends.get(OP, {}).get(outcome.op_partition, 0)
        return outcome.kind is not Kind.QUARANTINE and (is_half or is_verdict)

    def _not_held(self, outcomes: BatchOutcomes) -> list[Outcome]:
        remembered_ms = self._job.manifest.remembered_ms
        of_id: dict[str, list[Any]] = defaultdict(list)
        for row in self._job.storage.tables[Table.MESSAGES].rows:
            if row["epoch"] < self._epoch:
                of_id[row["transaction_id"]].append(row)

        def is_held(outcome: Outcome, row: Any) -> bool:
            half = (outcome.partition, outcome.offset, outcome.at_ms)
            verdict = (outcome.op_partition, outcome.op_offset, outcome.decided_ms)
            is_half = half == (row["half_partition"], row["half_offset"], row["half_at"])
            is_verdict = verdict == (row["op_partition"], row["op_offset"], row["committed_at"])
            is_second = outcome.at_ms >= row["half_at"] or outcome.incarnation < row["incarnation"]
            is_same = outcome.producer_group == row["producer_group"] and outcome.at_ms <= row["committed_at"] + remembered_ms
            return is_half or (outcome.kind is Kind.COMMIT and is_verdict) or (is_same and is_second)

        return [
            outcome
            for outcome in outcomes.all
            if not (self.may_be_held(outcome) and any(is_held(outcome, row) for row in of_id[outcome.transaction_id]))
        ]

    def _append(self, outcomes: Any, kind: Kind, table: Table, report: BatchReport) -> Any:
        chosen = outcomes.of(kind)
        if not chosen:
            return None
        found = self._fetch(chosen)
        kept = [(outcome, record) for outcome, record in found if record is not None]
        self._put(table, table, self._message_rows(kind, kept, self._bookmark(report)), report)
        if len(kept) == len(found) and not self._may_be_repeat:
            return None
        rows = self._job.storage.tables[table].rows
        written = {(row["half_partition"], row["half_offset"]) for row in rows if self._is_of_batch(row, report)}
        return [outcome for outcome in chosen if (outcome.partition, outcome.offset) not in written] or None

    def _append_quarantine(self, outcomes: Any, report: BatchReport) -> None:
        chosen = outcomes.of(Kind.QUARANTINE)
        if chosen:
            known = self._known_lost(report)
            is_new = [out.reason != Reason.HALF_LOST or (out.partition, out.offset, out.transaction_id) not in known for out in chosen]
            chosen = [outcome for outcome, new in zip(chosen, is_new, strict=True) if new]
            rows = self._quarantine_rows(self._fetch(chosen), self._bookmark(report))
            self._put(Table.QUARANTINE, Table.QUARANTINE, rows, report)

    def _is_of_batch(self, row: Row, report: BatchReport) -> bool:
        return bool((row["epoch"], row["batch_id"]) == self._bookmark(report))

    def _send_checks(self, outcomes: Any) -> Any:
        chosen = outcomes.of(Kind.CHECK)
        if not chosen:
            return None
        storage: Any = self._job.storage
        self._verify_still_owner(storage, Table.MESSAGES)
        found = self._fetch(chosen)
        for topic, key, value, headers in row_makers.check_requests(to_batch(chosen), [record for _, record in found], lambda _: CHECK):
            self._job.step("before check")
            self._job.kafka.append(topic, key, value, tuple(headers))
        self._job.step("after checks")
        return [outcome for outcome, record in found if record is None] or None

    def _quarantine_lost(self, frames: Any, report: BatchReport) -> None:
        known = self._known_lost(report)
        lost = [out for frame in frames for out in frame if (out.partition, out.offset, out.transaction_id) not in known]
        found: Rows = [
            _refusal(outcome, None, self._bookmark(report))
            | {"reason": str(Reason.HALF_LOST), "source_topic": HALF, "detail": row_makers.HALF_IS_GONE}
            for outcome in lost
        ]
        self._put(Table.QUARANTINE, Reason.HALF_LOST, found, report)
        for outcome in lost:
            pointer = f"{outcome.partition}:{outcome.offset}".encode()
            self._job.kafka.append(HALF, outcome.transaction_id.encode(), None, ((HALF_LOST, pointer),))
        self._job.step("after notices")

    def _known_lost(self, report: BatchReport) -> set[tuple[int, int, str]]:
        return {
            (row["source_partition"], row["source_offset"], row["transaction_id"])
            for row in self._job.storage.tables[Table.QUARANTINE].rows
            if row["reason"] == Reason.HALF_LOST and row["epoch"] == self._epoch and not self._is_of_batch(row, report)
        }

    def _put(self, table: Table, what: Table | Reason, rows: Rows, report: BatchReport) -> None:
        """Append once, and fail if the table has another owner by then, as `_append_once` does."""
        self._job.step(f"before {table}")
        storage: Any = self._job.storage
        origin = origin_of(HadoopFiles(storage, self._settings.storage), self._query_id, report.batch_id, report.read_digest)
        app_id = append_id(self._query_id, what)
        storage.append(table, app_id, report.batch_id, rows, self._job.name, origin.to_json())
        self._verify_still_owner(storage, table)
        verify_not_skipped(storage, self._settings.storage, table, app_id, origin)
        self.appended[table] = report.batch_id
        self._job.step(f"after {table}")

    def _fetch(self, outcomes: list[Outcome]) -> Found:
        """Read the records back that outcomes point to, as `read_back` does."""
        found: Found = []
        for outcome in outcomes:
            place = (_TOPICS[outcome.source], outcome.partition)
            read = self._job.kafka.fetch(place, outcome.offset, committed_only=self._job.fetches_committed)
            if read.is_waiting:
                raise KafkaUnavailableError(f"{place} does not answer for a minute: an open transaction is before {outcome.offset}")
            record = read.record
            is_same = record is not None and record.at_ms == outcome.at_ms
            is_half = outcome.source is Source.HALF and bool(outcome.transaction_id)
            if record is not None and is_half and record.key != outcome.transaction_id.encode():
                is_same = False
            found.append(
                (outcome, StoredRecord(record.key, record.value, list(record.headers)) if record is not None and is_same else None)
            )
        return found

    def _message_rows(self, kind: Kind, found: Found, at: Bookmark) -> Rows:
        if not found:
            return []
        if self._job.is_full:
            return _made(kind, found, at)
        return [_row(kind, outcome, record, at) for outcome, record in found if record is not None]

    def _quarantine_rows(self, found: Found, at: Bookmark) -> Rows:
        if found and self._job.is_full:
            make = row_makers.quarantine_of(at, HALF, OP)
            return _plain(make(to_batch([outcome for outcome, _ in found]), [record for _, record in found]))
        return [_refusal(outcome, record, at) for outcome, record in found]


def forget_rows() -> None:
    """Forget the rows that the product has made: it was replaced."""
    _rows.clear()


_rows: dict[Hashable, dict[str, Any]] = {}
"""Kind and content of a half → the row that the product makes of it."""


def _row(kind: Kind, outcome: Outcome, record: StoredRecord, at: Bookmark) -> dict[str, Any]:
    """Return a row. The product, of which a call takes a millisecond, is asked once for each content of a half."""
    headers = dict(record.headers or ())
    born_ms = int(headers.pop(BORN_TIMESTAMP, None) or outcome.at_ms)
    content = (kind, outcome.topic, outcome.producer_group, outcome.reason, record.value, *headers.items())
    if content not in _rows:
        [_rows[content]] = _made(kind, [(outcome, record)], at)
    row = {
        **_rows[content],
        **at._asdict(),
        "transaction_id": outcome.transaction_id,
        "check_times": outcome.check_times,
        "incarnation": outcome.incarnation,
        "half_partition": outcome.partition,
        "half_offset": outcome.offset,
        "half_at": outcome.at_ms,
        "born_at": born_ms,
        "committed_at" if kind is Kind.COMMIT else "discarded_at": outcome.decided_ms,
    }
    if kind is Kind.COMMIT:
        row |= {"op_partition": outcome.op_partition, "op_offset": outcome.op_offset}
    assert row.keys() == _rows[content].keys()
    return row


def _made(kind: Kind, found: Found, at: Bookmark) -> Rows:
    make = (row_makers.messages_of if kind is Kind.COMMIT else row_makers.discarded_of)(at)
    return _plain(make(to_batch([outcome for outcome, _ in found]), [record for _, record in found]))


def to_batch(outcomes: list[Outcome]) -> pa.RecordBatch:
    """Return OUTCOME_SCHEMA."""
    columns = zip(*outcomes, strict=True)
    arrays = [pa.array(values, kind) for values, kind in zip(columns, OUTCOME_SCHEMA.types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=OUTCOME_SCHEMA)


def _plain(rows: pa.RecordBatch) -> Rows:
    """Return rows with times in ms and maps as dicts."""
    columns: dict[str, list[Any]] = {}
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        if pa.types.is_timestamp(column.type):
            columns[name] = [value // 1000 for value in column.cast(pa.int64()).to_pylist()]
        elif pa.types.is_map(column.type):
            columns[name] = [dict(value) for value in column.to_pylist()]
        else:
            columns[name] = column.to_pylist()
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _refusal(outcome: Outcome, record: StoredRecord | None, at: Bookmark) -> dict[str, Any]:
    return {
        "source_topic": _TOPICS[outcome.source],
        "source_partition": outcome.partition,
        "source_offset": outcome.offset,
        "source_timestamp": outcome.at_ms,
        "transaction_id": outcome.transaction_id,
        "key": record.key if record else None,
        "value": record.value if record else None,
        "headers": record.headers if record else None,
        "reason": str(outcome.reason),
        "detail": outcome.detail,
        **at._asdict(),
    }
