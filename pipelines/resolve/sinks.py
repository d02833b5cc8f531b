"""Writes one batch: its outcomes to Delta exactly once, then its check requests to Kafka (decision 5)."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import or_
from time import monotonic
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from halfway.pipelines.kafka.spark_options import spark_options
from halfway.pipelines.kafka.writer import RecordWriter
from halfway.pipelines.resolve.read_back import fetch
from halfway.pipelines.resolve.report import BatchReport
from halfway.pipelines.storage.delta_tables import append_once, read_log_ahead, read_table
from halfway.schemas.events import CHECK_REQUEST_SCHEMA, OUTCOME_SCHEMA
from halfway.schemas.headers import HALF_LOST, Source
from halfway.schemas.outcomes import Kind, Reason
from halfway.schemas.reports import BucketReport
from halfway.schemas.settings import Settings
from halfway.schemas.tables import QUARANTINE_SCHEMA, TABLE_SCHEMAS, Table
from halfway.transforms import rows as row_makers

log = logging.getLogger(__name__)

_HALF_POINTER = ("half_partition", "half_offset")


def _is_before(ends: Mapping[int, int]) -> Column:
    """Return a condition: an outcome points to an offset before the end given for its partition."""
    return reduce(or_, ((F.col("partition") == partition) & (F.col("offset") < end) for partition, end in ends.items()), F.lit(False))


class BatchWriter:
    """Writes batches. Called once for each batch id, and again with the same id after a crash."""

    def __init__(self, settings: Settings, query_id: str, adopted: Mapping[int, int] | None = None) -> None:
        """Prepare to write for a query.

        Args:
            settings: the job's settings.
            query_id: the owner of the tables. With the table's name it is the `txnAppId` of its appends.
            adopted: by partition of the half topic, the offset up to which adopted tables may hold halves. Outcomes
                that the tables hold for halves before it are not written again.
        """
        self._settings = settings
        self._kafka = settings.kafka
        self._query_id = query_id
        self._adopted = _is_before(adopted or {}) & F.col("kind").isin([int(kind) for kind in (Kind.COMMIT, Kind.DISCARD, Kind.CHECK)])
        self._may_be_repeat = True
        self._known: dict[int, BucketReport] = {}
        self._appended: set[Table] = set()
        self._ahead = ThreadPoolExecutor(max_workers=1, thread_name_prefix="log-ahead")

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
        """Wait until the reading ahead has ended."""
        self._ahead.shutdown(cancel_futures=True)

    def write(self, outcomes: DataFrame, batch_id: int) -> BatchReport:
        """Write one batch's outcomes (OUTCOME_SCHEMA) and return its report."""
        started = monotonic()
        report = BatchReport(batch_id)
        outcomes.persist()
        try:
            wanted = self._without_adopted(outcomes, report) if self._count(outcomes, report) else outcomes
            lost = [
                self._append(wanted, Kind.COMMIT, Table.MESSAGES, report),
                self._append(wanted, Kind.DISCARD, Table.DISCARDED, report),
            ]
            self._append_quarantine(wanted, report)
            lost.append(self._send_checks(wanted, report))
            found_lost = [frame for frame in lost if frame is not None]
            if found_lost:
                self._quarantine_lost(found_lost, report)
        finally:
            outcomes.unpersist()
        self._may_be_repeat = False
        report.seconds = monotonic() - started
        return report

    def _count(self, outcomes: DataFrame, report: BatchReport) -> int:
        """Materialise the whole batch once, and fill the report.

        Returns:
            How many of the outcomes adopted tables may hold already.
        """
        adopted = 0
        details = F.collect_list(F.when(F.col("kind") == int(Kind.REPORT), F.col("detail")))
        buckets: dict[int, BucketReport] = {}
        for kind, rows, of_adopted, texts in outcomes.groupBy("kind").agg(F.count("*"), F.count_if(self._adopted), details).collect():
            report.rows[Kind(kind)] = rows
            adopted += of_adopted
            for text in texts:
                bucket = BucketReport.from_json(text)
                buckets[bucket.bucket] = bucket
        report.buckets = buckets
        report.known = self._known = {**self._known, **buckets}
        return adopted

    def _without_adopted(self, outcomes: DataFrame, report: BatchReport) -> DataFrame:
        """Leave out the outcomes that the tables held when they were adopted: the lost checkpoint's query wrote them.

        A pointer alone does not identify a half: the offsets of a topic that was deleted and created again start at 0.
        """
        spark, storage = outcomes.sparkSession, self._settings.storage
        tables = [read_table(spark, storage, table) for table in (Table.MESSAGES, Table.DISCARDED)]
        rows = [table.select("transaction_id", *_HALF_POINTER, F.unix_millis("half_at").alias("half_at_ms")) for table in tables]
        held = rows[0].union(rows[1])
        same_place = (outcomes["partition"] == held["half_partition"]) & (outcomes["offset"] == held["half_offset"])
        same_half = (outcomes["transaction_id"] == held["transaction_id"]) & (outcomes["at_ms"] == held["half_at_ms"])
        left = outcomes.join(held, self._adopted & same_place & same_half, "left_anti")
        report.rows = Counter({Kind(kind): rows for kind, rows in left.groupBy("kind").count().collect()})
        return left

    def _fetched(
        self, outcomes: DataFrame, kind: Kind, report: BatchReport, make_rows: row_makers.RowMaker, schema: StructType
    ) -> tuple[DataFrame, Any]:
        lost = outcomes.sparkSession.sparkContext.accumulator(0)
        topics = {Source.HALF: self._kafka.half_topic, Source.OP: self._kafka.op_topic}
        wanted = outcomes.where(F.col("kind") == int(kind))
        return fetch(wanted, self._kafka.as_librdkafka_dict(), topics, make_rows, schema, rows=report.rows[kind], lost=lost), lost

    def _append(self, outcomes: DataFrame, kind: Kind, table: Table, report: BatchReport) -> DataFrame | None:
        """Append commits or discards; return the outcomes whose halves were not found, None if all were."""
        if not report.rows[kind]:
            return None
        make_rows = (row_makers.messages_of if kind is Kind.COMMIT else row_makers.discarded_of)(report.batch_id)
        rows, lost = self._fetched(outcomes, kind, report, make_rows, TABLE_SCHEMAS[table])
        self._append_once(rows, table, f"{self._query_id}:{table}", report.batch_id)
        if lost.value == 0 and not self._may_be_repeat:
            return None
        # Delta skips a repeated append without a fetch. The rows missing from the table are then those that were lost
        # the first time.
        spark = outcomes.sparkSession
        written = read_table(spark, self._settings.storage, table).where(F.col("batch_id") == report.batch_id).select(*_HALF_POINTER)
        of_kind = outcomes.where(F.col("kind") == int(kind))
        same = (of_kind["partition"] == written["half_partition"]) & (of_kind["offset"] == written["half_offset"])
        missing = of_kind.join(written, same, "left_anti")
        return None if missing.isEmpty() else missing

    def _append_once(self, rows: DataFrame, table: Table, app_id: str, batch_id: int) -> None:
        append_once(rows, self._settings.storage, table, app_id, batch_id)
        self._appended.add(table)

    def _append_quarantine(self, outcomes: DataFrame, report: BatchReport) -> None:
        if report.rows[Kind.QUARANTINE]:
            make_rows = row_makers.quarantine_of(report.batch_id, self._kafka.half_topic, self._kafka.op_topic)
            rows, _ = self._fetched(outcomes, Kind.QUARANTINE, report, make_rows, QUARANTINE_SCHEMA)
            self._append_once(rows, Table.QUARANTINE, f"{self._query_id}:{Table.QUARANTINE}", report.batch_id)

    def _send_checks(self, outcomes: DataFrame, report: BatchReport) -> DataFrame | None:
        """Send check requests, at least once, each with the same `CHECK_ID` every time."""
        if not report.rows[Kind.CHECK]:
            return None
        requests, lost = self._fetched(outcomes, Kind.CHECK, report, row_makers.check_requests, CHECK_REQUEST_SCHEMA)
        options = {
            **spark_options(self._kafka),
            "topic": self._kafka.check_topic,
            "kafka.max.request.size": str(self._settings.resolution.max_record_bytes),
        }
        requests.write.format("kafka").options(**options).save()
        return self._fetched(outcomes, Kind.CHECK, report, row_makers.lost, OUTCOME_SCHEMA)[0] if lost.value else None

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
            self._append_once(quarantined, Table.QUARANTINE, f"{self._query_id}:{Reason.HALF_LOST}", report.batch_id)
            self._notify_lost(pointers)
        finally:
            rows.unpersist()

    def _notify_lost(self, pointers: Sequence[tuple[str, int, int]]) -> None:
        writer = RecordWriter(self._kafka)
        for transaction_id, partition, offset in pointers:
            writer.put(self._kafka.half_topic, transaction_id.encode(), None, [(HALF_LOST, f"{partition}:{offset}".encode())])
        writer.flush()
