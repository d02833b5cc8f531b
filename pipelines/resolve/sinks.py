"""Writes one batch: its outcomes to Delta exactly once, then its check requests to Kafka (decision 5)."""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from time import monotonic

from delta.exceptions import MetadataChangedException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from halfway.pipelines.kafka.writer import RecordWriter
from halfway.pipelines.resolve.batch_outcomes import BatchOutcomes
from halfway.pipelines.resolve.check_sender import CheckSender
from halfway.pipelines.resolve.read_back import RecordFetcher
from halfway.pipelines.resolve.report import BatchReport
from halfway.pipelines.storage.delta_tables import append_id, append_once, read_log_ahead, read_table
from halfway.pipelines.storage.lineage import BatchOrigin, origin_of, verify_not_skipped, verify_same_records
from halfway.pipelines.storage.manifest import Manifest
from halfway.pipelines.storage.ownership import verify_still_owner
from halfway.pipelines.storage.state_reader import HadoopFiles
from halfway.schemas.bookmark import Bookmark
from halfway.schemas.errors import OwnershipError
from halfway.schemas.events import OUTCOME_SCHEMA
from halfway.schemas.headers import HALF_LOST, SIGNATURE, SIGNED_WINDOW_MS, HeaderList, Source
from halfway.schemas.outcomes import Count, Kind, Reason
from halfway.schemas.reports import BucketReport
from halfway.schemas.settings import Settings
from halfway.schemas.signing import Signable, sha256_of
from halfway.schemas.tables import QUARANTINE_SCHEMA, TABLE_SCHEMAS, Table
from halfway.transforms import rows as row_makers
from halfway.transforms.packing import outcomes_in, repacked

log = logging.getLogger(__name__)

_HALF_POINTER = ("half_partition", "half_offset")
_OP_POINTER = ("op_partition", "op_offset")
_OWNER_CHECK_S = 3.0
_APPEND_TRIES = 5


class BatchWriter:
    """Writes batches. Called once for each batch id, and again with the same id after a crash."""

    def __init__(self, settings: Settings, manifest: Manifest, appended: Mapping[Table, int], held: Sequence[BatchOrigin]) -> None:
        """Prepare to write for a query.

        Args:
            settings: the job's settings.
            manifest: names the query that owns the tables, and their epoch.
            appended: the last batch that former runs have appended to each table.
            held: what the last batches in the tables were made of.
        """
        self.appended = dict(appended)
        """The last batch that was appended to each table."""
        self._held = held
        self.appended_before: Mapping[Table, int] = {}
        """The same, before the last batch."""
        self._settings = settings
        self._kafka = settings.kafka
        self._query_id, self._epoch = manifest.query_id, manifest.epoch
        self._remembered_ms = manifest.remembered_ms
        topics = {Source.HALF: self._kafka.half_topic, Source.OP: self._kafka.op_topic}
        self._fetcher = RecordFetcher({**self._kafka.as_librdkafka_dict(), "client.id": f"halfway-{self._query_id}"}, topics)
        self._check_sender = CheckSender(self._kafka)
        self._may_be_repeat = True
        self._known: dict[int, BucketReport] = {}
        self._log_to_read: set[Table] = set()
        self._proved: set[str] = set()
        self._pause = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pause")
        self._last_origin: BatchOrigin | None = None
        self._taken_over: OwnershipError | None = None
        self._owner_looked_s = monotonic()

    def write(self, packs: DataFrame, batch_id: int) -> BatchReport:
        """Write one batch's outcomes (PACKED_OUTCOMES_SCHEMA) and return its report.

        Raises:
            OwnershipError: another checkpoint has taken the tables over.
            RecordsLostError: the tables have a part of this batch already, made of other records. Nothing was written.
        """
        if self._taken_over is not None:
            raise self._taken_over
        started_s = monotonic()
        report = BatchReport(batch_id)
        self.appended_before = dict(self.appended)
        packs.persist()
        try:
            outcomes = self._count(packs, report)
            verify_same_records(self._settings.storage, self._held, batch_id, report.read_digest)
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
        report.seconds = monotonic() - started_s
        return report

    def use_pause(self, spark: SparkSession) -> None:
        """Start what can be done while Spark prepares the next batch.

        Read the logs of the tables that this batch appended to. Every few seconds, find out whether another checkpoint
        has taken the tables over: a job that appends nothing would not notice. The next batch then fails.
        """
        while self._log_to_read:
            self._pause.submit(self._read_log_ahead, spark, self._log_to_read.pop())
        if monotonic() - self._owner_looked_s >= _OWNER_CHECK_S:
            self._owner_looked_s = monotonic()
            self._pause.submit(self._look_for_owner, spark)

    def _read_log_ahead(self, spark: SparkSession, table: Table) -> None:
        try:
            read_log_ahead(spark, self._settings.storage, table)
        except Exception as error:  # the next append reads the log itself
            log.info("event=log_not_read_ahead table=%s cause=%s", table, type(error).__name__)

    def _look_for_owner(self, spark: SparkSession) -> None:
        try:
            self._verify_still_owner(spark, Table.MESSAGES)
        except OwnershipError as error:
            self._taken_over = error
        except Exception as error:  # Looked for again in some seconds; an append and a check look too.
            log.warning("event=owner_not_known cause=%s", type(error).__name__)

    def _verify_still_owner(self, spark: SparkSession, table: Table, *, at_append: bool = False) -> None:
        verify_still_owner(spark, self._settings.storage, table, self._query_id, at_append=at_append)

    def close(self) -> None:
        """Wait until what `use_pause` started has ended, and disconnect."""
        self._pause.shutdown(cancel_futures=True)
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
        """Leave out the outcomes of messages that a former checkpoint has committed.

        Those that it has discarded are known when their halves are read. There are few of them; of messages there are
        too many.

        A pointer alone does not identify a record: the offsets of a topic that was deleted and recreated start at 0.
        A COMMIT makes one message. If its half is in two partitions, the new checkpoint may read the other one first.
        A half of a lower incarnation, or one that came while the id was remembered, makes none beside a message of its
        group (R11, R12): `discarded` may be from an older backup than `messages`. Of a signed half, each copy is within
        twice the window of it.
        """
        spark, storage = packs.sparkSession, self._settings.storage
        messages = read_table(spark, storage, Table.MESSAGES).where(F.coalesce(F.col("epoch"), F.lit(-1)) < self._epoch)
        times = [F.unix_millis(name).alias(f"{name}_ms") for name in ("half_at", "committed_at")]
        names = ("transaction_id", "producer_group", "incarnation")
        held = messages.select(*names, *_HALF_POINTER, *_OP_POINTER, *times)
        found = outcomes_in(packs.where("may_be_held"))
        same_id = found["transaction_id"] == held["transaction_id"]
        same_place = (found["partition"] == held["half_partition"]) & (found["offset"] == held["half_offset"])
        same_op = reduce(Column.__and__, (found[name] == held[name] for name in _OP_POINTER))
        same_half = same_place & (found["at_ms"] == held["half_at_ms"])
        same_verdict = (found["kind"] == int(Kind.COMMIT)) & same_op & (found["decided_ms"] == held["committed_at_ms"])
        is_remembered = found["at_ms"] <= held["committed_at_ms"] + self._remembered_ms
        is_second = (found["at_ms"] >= held["half_at_ms"]) | (found["incarnation"] < held["incarnation"])
        same_group = found["producer_group"] == held["producer_group"]
        is_signed = found["producer_group"].isin(sorted(self._settings.kafka.signing.keys))
        is_near = F.abs(found["at_ms"] - held["half_at_ms"]) <= 2 * SIGNED_WINDOW_MS
        is_copy = is_signed & is_near & (found["incarnation"] == held["incarnation"])
        is_held = same_id & (same_half | same_verdict | (same_group & ((is_remembered & is_second) | is_copy)))
        return packs.where(~F.col("may_be_held")).union(repacked(found.join(held, is_held, "left_anti")))

    def _append(self, outcomes: BatchOutcomes, kind: Kind, table: Table, report: BatchReport) -> DataFrame | None:
        """Append commits or discards; return the outcomes whose halves were not found, None if all were."""
        if not outcomes.rows[kind]:
            return None
        make_rows = (row_makers.messages_of if kind is Kind.COMMIT else row_makers.discarded_of)(self._bookmark(report))
        rows, lost = outcomes.to_frame(kind, make_rows, TABLE_SCHEMAS[table])
        self._append_once(rows, table, report)
        if lost.value == 0 and not self._may_be_repeat:
            return None
        # Delta skips a repeated append without a fetch. The rows missing from the table are then those that were lost
        # the first time.
        stored = read_table(outcomes.spark, self._settings.storage, table)
        written = stored.where(self._is_of(report)).select(*_HALF_POINTER)
        of_kind = outcomes.of(kind)
        same = (of_kind["partition"] == written["half_partition"]) & (of_kind["offset"] == written["half_offset"])
        missing = of_kind.join(written, same, "left_anti")
        return None if missing.isEmpty() else missing

    def _append_once(self, rows: DataFrame, table: Table, report: BatchReport, what: Table | Reason | None = None) -> None:
        """Append a batch's rows to a table, exactly once. A second append of the batch is of something else: `what`."""
        origin, app_id = self._origin(rows.sparkSession, report), append_id(self._query_id, what or table)
        for left in reversed(range(_APPEND_TRIES)):
            try:
                append_once(rows, self._settings.storage, table, app_id, report.batch_id, origin=origin.to_json())
                break
            except OwnershipError:
                raise
            except Exception as error:
                self._verify_still_owner(rows.sparkSession, table)
                # `halfway erase` changes a property of the table, and no lock keeps it away in an object store.
                if not left or not isinstance(error, MetadataChangedException):
                    raise
        # Delta may have skipped the append, because a new owner has fenced this job.
        self._verify_still_owner(rows.sparkSession, table, at_append=True)
        if app_id not in self._proved:
            verify_not_skipped(rows.sparkSession, self._settings.storage, table, app_id, origin)
            self._proved.add(app_id)
        self._log_to_read.add(table)
        self.appended[table] = report.batch_id

    def _origin(self, spark: SparkSession, report: BatchReport) -> BatchOrigin:
        if self._last_origin is None or self._last_origin.batch_id != report.batch_id:
            files = HadoopFiles(spark, self._settings.storage)
            self._last_origin = origin_of(files, self._query_id, report.batch_id, report.read_digest)
        return self._last_origin

    def _bookmark(self, report: BatchReport) -> Bookmark:
        return Bookmark(self._epoch, report.batch_id)

    def _is_of(self, report: BatchReport) -> Column:
        """Return the condition on the rows of a table that this batch has appended."""
        return F.col("epoch").eqNullSafe(self._epoch) & (F.col("batch_id") == report.batch_id)

    def _append_quarantine(self, outcomes: BatchOutcomes, report: BatchReport) -> None:
        if outcomes.rows[Kind.QUARANTINE]:
            make_rows = row_makers.quarantine_of(self._bookmark(report), self._kafka.half_topic, self._kafka.op_topic)
            rows, _ = outcomes.to_frame(Kind.QUARANTINE, make_rows, QUARANTINE_SCHEMA)
            if report.counts[Count.LOST]:
                log.error("event=half_lost_notice batch_id=%d halves=%d", report.batch_id, report.counts[Count.LOST])
                known = self._known_lost(rows.sparkSession, report)
                same = _is_same_half(rows, "source_partition", "source_offset", known)
                rows = rows.join(known, same & (rows["reason"] == str(Reason.HALF_LOST)), "left_anti")
            self._append_once(rows, Table.QUARANTINE, report)

    def _send_checks(self, outcomes: BatchOutcomes) -> DataFrame | None:
        """Send check requests, at least once, each with the same `CHECK_ID` every time; return those without a half."""
        if not outcomes.rows[Kind.CHECK]:
            return None
        # No append may have proved in this batch that the tables are still this job's.
        self._verify_still_owner(outcomes.spark, Table.MESSAGES)
        # The sender stands in a RowMaker's place: it sends the checks, and returns those without a half.
        lost = outcomes.to_table(Kind.CHECK, self._check_sender, OUTCOME_SCHEMA)
        return outcomes.spark.createDataFrame(lost) if lost.num_rows else None

    def _quarantine_lost(self, frames: Sequence[DataFrame], report: BatchReport) -> None:
        """Quarantine lost halves, each once, and write a notice of each to the half topic (R17).

        By the notice the next batch settles the half's id.
        """
        spark = frames[0].sparkSession
        lost = reduce(DataFrame.union, frames)
        known = self._known_lost(spark, report)
        rows = lost.join(known, _is_same_half(lost, "partition", "offset", known), "left_anti").persist()
        try:
            pointers = [tuple(row) for row in rows.select("transaction_id", "partition", "offset").collect()]
            log.error("event=half_lost batch_id=%d halves=%d", report.batch_id, len(pointers))
            quarantined = row_makers.to_half_lost(rows, self._bookmark(report), self._kafka.half_topic)
            self._append_once(quarantined, Table.QUARANTINE, report, Reason.HALF_LOST)
            self._notify_lost(pointers)
        finally:
            rows.unpersist()

    def _known_lost(self, spark: SparkSession, report: BatchReport) -> DataFrame:
        """Return the lost halves that earlier batches have quarantined: known_partition, known_offset, known_id.

        Not those of a former checkpoint: a half that this one has read, and needs, has been there since.
        """
        rows = read_table(spark, self._settings.storage, Table.QUARANTINE)
        is_own = F.col("epoch").eqNullSafe(self._epoch) & ~self._is_of(report)
        known = rows.where((F.col("reason") == str(Reason.HALF_LOST)) & is_own)
        place = {"source_partition": "known_partition", "source_offset": "known_offset", "transaction_id": "known_id"}
        return known.select(*(F.col(name).alias(alias) for name, alias in place.items()))

    def _notify_lost(self, pointers: Sequence[tuple[str, int, int]]) -> None:
        writer, keyring, topic = RecordWriter(self._kafka), self._kafka.signing.keyring(), self._kafka.half_topic
        for transaction_id, partition, offset in pointers:
            key: bytes = transaction_id.encode()
            headers: HeaderList = [(HALF_LOST, f"{partition}:{offset}".encode())]
            signature = keyring.sign_as_job(Signable(topic, key, sha256_of(None), headers)) if keyring else None
            writer.put(topic, key, None, [*headers, (SIGNATURE, signature.encode())] if signature else headers)
        writer.flush()


def _is_same_half(rows: DataFrame, partition: str, offset: str, known: DataFrame) -> Column:
    """Return the condition on lost halves that are known. A recreated topic has other ids at the same offsets."""
    same_place = (rows[partition] == known["known_partition"]) & (rows[offset] == known["known_offset"])
    return same_place & (rows["transaction_id"] == known["known_id"])
