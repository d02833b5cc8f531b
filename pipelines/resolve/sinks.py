"""Writes one batch: its outcomes to Delta exactly once, then its check requests to Kafka (decision 5)."""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from time import monotonic

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from halfway.pipelines.kafka.writer import RecordWriter
from halfway.pipelines.resolve.batch_outcomes import BatchOutcomes
from halfway.pipelines.resolve.check_sender import CheckSender
from halfway.pipelines.resolve.read_back import RecordFetcher
from halfway.pipelines.resolve.report import BatchReport
from halfway.pipelines.storage.delta_tables import append_once, read_log_ahead, read_table
from halfway.schemas.events import OUTCOME_SCHEMA
from halfway.schemas.headers import HALF_LOST, Source
from halfway.schemas.outcomes import Kind, Reason
from halfway.schemas.reports import BucketReport
from halfway.schemas.settings import Settings
from halfway.schemas.tables import QUARANTINE_SCHEMA, TABLE_SCHEMAS, Table
from halfway.transforms import rows as row_makers
from halfway.transforms.packing import outcomes_in, packed

log = logging.getLogger(__name__)

_HALF_POINTER = ("half_partition", "half_offset")


class BatchWriter:
    """Writes batches. Called once for each batch id, and again with the same id after a crash."""

    def __init__(self, settings: Settings, query_id: str) -> None:
        """Prepare to write for a query.

        Args:
            settings: the job's settings.
            query_id: the owner of the tables. With the table's name it is the `txnAppId` of its appends.
        """
        self._settings = settings
        self._kafka = settings.kafka
        self._query_id = query_id
        topics = {Source.HALF: self._kafka.half_topic, Source.OP: self._kafka.op_topic}
        self._fetcher = RecordFetcher({**self._kafka.as_librdkafka_dict(), "client.id": f"halfway-{query_id}"}, topics)
        self._check_sender = CheckSender(self._kafka, settings.resolution.max_record_bytes)
        self._may_be_repeat = True
        self._known: dict[int, BucketReport] = {}
        self._appended: set[Table] = set()
        self._ahead = ThreadPoolExecutor(max_workers=1, thread_name_prefix="log-ahead")

    def write(self, packs: DataFrame, batch_id: int) -> BatchReport:
        """Write one batch's outcomes (PACKED_OUTCOMES_SCHEMA) and return its report."""
        started = monotonic()
        report = BatchReport(batch_id)
        packs.persist()
        try:
            outcomes = self._count(packs, report)
            lost = [
                self._append(outcomes, Kind.COMMIT, Table.MESSAGES, report),
                self._append(outcomes, Kind.DISCARD, Table.DISCARDED, report),
            ]
            self._append_quarantine(outcomes, report)
            lost.append(self._send_checks(outcomes))
            found_lost = [frame for frame in lost if frame is not None]
            if found_lost:
                self._quarantine_lost(found_lost, report)
        finally:
            packs.unpersist()
        self._may_be_repeat = False
        report.seconds = monotonic() - started
        return report

    def read_logs_ahead(self, spark: SparkSession) -> None:
        """Start to read the logs of the tables that this batch appended to, while Spark prepares the next batch."""
        while self._appended:
            self._ahead.submit(self._read_log_ahead, spark, self._appended.pop())

    def _read_log_ahead(self, spark: SparkSession, table: Table) -> None:
        try:
            read_log_ahead(spark, self._settings.storage, table)
        except Exception as error:  # the next append reads the log itself
            log.info("event=log_not_read_ahead table=%s cause=%s", table, type(error).__name__)

    def close(self) -> None:
        """Wait until the reading ahead has ended, and disconnect."""
        self._ahead.shutdown(cancel_futures=True)
        self._fetcher.close()
        self._check_sender.close()

    def _count(self, packs: DataFrame, report: BatchReport) -> BatchOutcomes:
        """Evaluate the whole batch once, and fill the report."""
        outcomes = BatchOutcomes(packs, self._fetcher)
        report.buckets = {bucket.bucket: bucket for bucket in outcomes.reports}
        report.known = self._known = {**self._known, **report.buckets}
        if outcomes.may_be_held:
            outcomes = BatchOutcomes(self._without_held(packs), self._fetcher)
        report.rows = outcomes.rows
        return outcomes

    def _without_held(self, packs: DataFrame) -> DataFrame:
        """Leave out the outcomes that the tables held when they were adopted: the lost checkpoint's query wrote them.

        A pointer alone does not identify a half: the offsets of a topic that was deleted and created again start at 0.
        """
        spark, storage = packs.sparkSession, self._settings.storage
        tables = [read_table(spark, storage, table) for table in (Table.MESSAGES, Table.DISCARDED)]
        rows = [table.select("transaction_id", *_HALF_POINTER, F.unix_millis("half_at").alias("half_at_ms")) for table in tables]
        held = rows[0].union(rows[1])
        found = outcomes_in(packs.where("may_be_held"))
        same_place = (found["partition"] == held["half_partition"]) & (found["offset"] == held["half_offset"])
        same_half = (found["transaction_id"] == held["transaction_id"]) & (found["at_ms"] == held["half_at_ms"])
        return packs.where(~F.col("may_be_held")).union(packed(found.join(held, same_place & same_half, "left_anti")))

    def _append(self, outcomes: BatchOutcomes, kind: Kind, table: Table, report: BatchReport) -> DataFrame | None:
        """Append commits or discards; return the outcomes whose halves were not found, None if all were."""
        if not outcomes.rows[kind]:
            return None
        make_rows = (row_makers.messages_of if kind is Kind.COMMIT else row_makers.discarded_of)(report.batch_id)
        rows, lost = outcomes.to_frame(kind, make_rows, TABLE_SCHEMAS[table])
        self._append_once(rows, table, report.batch_id)
        if lost.value == 0 and not self._may_be_repeat:
            return None
        # Delta skips a repeated append without a fetch. The rows missing from the table are then those that were lost
        # the first time.
        stored = read_table(outcomes.spark, self._settings.storage, table)
        written = stored.where(F.col("batch_id") == report.batch_id).select(*_HALF_POINTER)
        of_kind = outcomes.of(kind)
        same = (of_kind["partition"] == written["half_partition"]) & (of_kind["offset"] == written["half_offset"])
        missing = of_kind.join(written, same, "left_anti")
        return None if missing.isEmpty() else missing

    def _append_once(self, rows: DataFrame, table: Table, batch_id: int, name: str | None = None) -> None:
        """Append a batch's rows to a table, exactly once. A second append of the batch has a `name` of its own."""
        append_once(rows, self._settings.storage, table, f"{self._query_id}:{name or table}", batch_id)
        self._appended.add(table)

    def _append_quarantine(self, outcomes: BatchOutcomes, report: BatchReport) -> None:
        if outcomes.rows[Kind.QUARANTINE]:
            make_rows = row_makers.quarantine_of(report.batch_id, self._kafka.half_topic, self._kafka.op_topic)
            rows, _ = outcomes.to_frame(Kind.QUARANTINE, make_rows, QUARANTINE_SCHEMA)
            self._append_once(rows, Table.QUARANTINE, report.batch_id)

    def _send_checks(self, outcomes: BatchOutcomes) -> DataFrame | None:
        """Send check requests, at least once, each with the same `CHECK_ID` every time; return those without a half."""
        if not outcomes.rows[Kind.CHECK]:
            return None
        lost = outcomes.to_table(Kind.CHECK, self._check_sender, OUTCOME_SCHEMA)
        return outcomes.spark.createDataFrame(lost) if lost.num_rows else None

    def _quarantine_lost(self, frames: Sequence[DataFrame], report: BatchReport) -> None:
        """Quarantine lost halves, each once, and notify the operator, so that their ids count as settled (R17)."""
        spark, storage = frames[0].sparkSession, self._settings.storage
        lost = reduce(DataFrame.union, frames)
        known = read_table(spark, storage, Table.QUARANTINE).where(
            (F.col("reason") == str(Reason.HALF_LOST)) & (F.col("batch_id") != report.batch_id)
        )
        same_place = (lost["partition"] == known["source_partition"]) & (lost["offset"] == known["source_offset"])
        same = same_place & (lost["transaction_id"] == known["transaction_id"])
        rows = lost.join(known, same, "left_anti").persist()
        try:
            pointers = [tuple(row) for row in rows.select("transaction_id", "partition", "offset").collect()]
            report.lost = len(pointers)
            log.error("event=half_lost batch_id=%d halves=%d", report.batch_id, len(pointers))
            quarantined = row_makers.to_half_lost(rows, report.batch_id, self._kafka.half_topic)
            self._append_once(quarantined, Table.QUARANTINE, report.batch_id, Reason.HALF_LOST)
            self._notify_lost(pointers)
        finally:
            rows.unpersist()

    def _notify_lost(self, pointers: Sequence[tuple[str, int, int]]) -> None:
        writer = RecordWriter(self._kafka)
        for transaction_id, partition, offset in pointers:
            writer.put(self._kafka.half_topic, transaction_id.encode(), None, [(HALF_LOST, f"{partition}:{offset}".encode())])
        writer.flush()
