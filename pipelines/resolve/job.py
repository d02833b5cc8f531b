"""The job: one streaming query from the half and op topics to the tables and the check topic (design §1)."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from halfway.pipelines.kafka.admin import JOB_GROUPS, admin, check_rights, job_rights
from halfway.pipelines.kafka.topic_setup import check_half_retention
from halfway.pipelines.resolve.failures import explain
from halfway.pipelines.resolve.groups import GroupWatch
from halfway.pipelines.resolve.sinks import BatchReport, BatchWriter
from halfway.pipelines.resolve.sources import read_records, unread_records
from halfway.pipelines.resolve.ticks import TickPublisher
from halfway.pipelines.runtime.collector import without_collector
from halfway.pipelines.storage.checkpoint import (
    STATUS_FILE,
    adopted_by,
    bucket_keys_of,
    check_ownership,
    checkpoint_file,
    sole_user,
    write_facts,
)
from halfway.pipelines.storage.delta_tables import create_tables
from halfway.pipelines.storage.file_systems import on_local_disk, write_json
from halfway.schemas.errors import AccessError, HalfwayError, KafkaUnavailableError
from halfway.schemas.settings import Settings
from halfway.transforms.decoding import Contract, decode
from halfway.transforms.operator import bucket_function, resolve_events, rules_of

log = logging.getLogger(__name__)

QUERY_NAME = "halfway"
# For a checkpoint on a local disk. The default one starts a process, of 8 ms, four times for each file that it puts in place; the second
# job that it would find out is kept away by a lock there (design §1.6).
_LOCAL_FILE_MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
_START_LIMIT_S = 120
_BETWEEN_BATCHES = ("Waiting for next trigger", "Waiting for data to arrive", "Getting offsets", "No new data")


class ResolveJob:
    """One run of the job. `run` returns when it has been stopped, or when all that was waiting is done (`available_now`)."""

    def __init__(self, settings: Settings, *, adopt: bool = False, on_batch: Callable[[BatchReport], None] | None = None) -> None:
        """Prepare a run.

        Args:
            settings: all of them.
            adopt: take existing tables over with a new checkpoint (design §1.6).
            on_batch: is told what each batch did, a moment after it is done, in the thread of `run`.
        """
        self._settings = settings
        self._adopt = adopt
        self._on_batch = on_batch
        self._stop = threading.Event()
        self._writer: BatchWriter | None = None
        self._writer_made = threading.Event()
        self._pending: dict[int, int] = {}
        self._untold: deque[BatchReport] = deque()
        self.failure: Exception | None = None

    def stop(self) -> None:
        """Ask the job to end after the batch that is under way; may be called from a signal handler."""
        self._stop.set()

    def run(self, session: Callable[[], SparkSession]) -> None:
        """Run until stopped or done.

        Args:
            session: makes the Spark session, once what is quick to refuse has been looked at.

        Raises:
            TopicError: a topic is missing, or its retention is too short (R17).
            AccessError: Kafka does not let this user do what the job does, at the start or any more.
            OwnershipError: checkpoint, tables and settings do not belong together.
            CheckpointInUseError: another job has this checkpoint.
            RecordsLostError: Kafka has deleted what had not been read.
            StateDamagedError: the checkpoint's state cannot be read.
            KafkaUnavailableError: Kafka cannot be reached at the start.
            StreamingQueryException: a batch failed; a new run repeats it.
        """
        settings = self._settings
        with sole_user(settings.storage):
            self._check_rights()
            check_half_retention(settings)
            spark = session()
            check_ownership(spark, settings, adopt=self._adopt)
            write_facts(spark, settings, adopt=self._adopt)
            groups = GroupWatch(settings)
            ticks = TickPublisher(settings, groups.absent)
            if settings.resolution.tick_interval > 0 and settings.trigger.available_now:
                ticks.publish()
            elif not settings.trigger.available_now:
                ticks.start()
            try:
                self._run_query(spark)
            finally:
                ticks.stop()
                groups.close()

    def _check_rights(self) -> None:
        check_rights(admin(self._settings), job_rights(self._settings.kafka), **JOB_GROUPS)

    def _tell_lost_right(self) -> None:
        """Name a right that was taken away meanwhile: what Spark says of it is a page long."""
        try:
            self._check_rights()
        except AccessError:
            raise
        except KafkaUnavailableError as error:
            log.warning("event=rights_not_known cause=%r", str(error))

    def _run_query(self, spark: SparkSession) -> None:
        query = self._start(spark)
        try:
            create_tables(spark, self._settings.storage, query.id)
            self._writer = BatchWriter(self._settings, query.id, adopted_by(spark, self._settings.storage))
        finally:
            self._writer_made.set()
        while query.isActive and not self._stop.wait(0.2):
            self._tell_batches(query)
        if query.isActive:
            _stop_between_batches(query)
        try:
            query.awaitTermination()
        except StreamingQueryException as error:
            self._tell_lost_right()
            failure = self.failure or error
            raise explain(failure, self._settings) or failure from None
        finally:
            self._writer.close()
            self._tell_batches(query, ended=True)

    def _tell_batches(self, query: StreamingQuery, *, ended: bool = False) -> None:
        """Hand on the reports of batches that are done, once Spark says what it left unread: after the batch, not in it."""
        progress = query.lastProgress if self._untold else None
        done_id = -1 if progress is None else progress.batchId
        while self._untold and (ended or self._untold[0].batch_id <= done_id):
            report = self._untold.popleft()
            report.unread = unread_records(progress)
            if self._on_batch is not None:
                self._on_batch(report)

    def _start(self, spark: SparkSession) -> StreamingQuery:
        settings = self._settings
        kafka, resolution = settings.kafka, settings.resolution
        keyring = kafka.signing.keyring()
        contract = Contract(
            kafka.half_topic, kafka.op_topic, resolution.max_body_bytes, bucket_keys_of(spark, settings.storage), keyring is not None
        )
        # A reading task takes 0.1 s of CPU before its first record, to write the code that decodes: no more of them than work.
        records = read_records(spark, kafka).coalesce(settings.state.shuffle_partitions)
        outcomes = resolve_events(decode(records, contract), without_collector(bucket_function(rules_of(resolution), keyring)))
        if on_local_disk(spark, settings.storage.checkpoint) is not None:
            spark.conf.set("spark.sql.streaming.checkpointFileManagerClass", _LOCAL_FILE_MANAGER)
        writer = outcomes.writeStream.queryName(QUERY_NAME).option("checkpointLocation", settings.storage.checkpoint)
        writer = writer.outputMode("append").foreachBatch(self._write_batch)
        if settings.trigger.available_now:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=f"{settings.trigger.interval} milliseconds").start()

    def _write_batch(self, outcomes: DataFrame, batch_id: int) -> None:
        if not self._writer_made.wait(_START_LIMIT_S) or self._writer is None:
            raise HalfwayError("the tables could not be made")
        try:
            report = self._writer.write(outcomes, batch_id)
            self._pending.update(report.pending)
            self._write_status(outcomes.sparkSession, report)
            self._writer.read_logs_ahead(outcomes.sparkSession)
        except Exception as error:
            self.failure = error
            raise
        self._untold.append(report)

    def _write_status(self, spark: SparkSession, report: BatchReport) -> None:
        """Leave what others ask for beside the checkpoint: nothing is decided by it."""
        status: dict[str, Any] = {
            "batch_id": report.batch_id,
            "seconds": round(report.seconds, 3),
            "written_at_ms": time.time_ns() // 1_000_000,
            "horizon_ms": report.horizon_ms,
            "pending": sum(self._pending.values()),
            "counts": dict(report.counts),
        }
        write_json(spark, checkpoint_file(self._settings.storage, STATUS_FILE), status)


def _stop_between_batches(query: StreamingQuery, limit_s: float = 600) -> None:
    """Stop a query when no batch is under way: stopped in one, it would print a StackOverflowError of Spark's."""
    deadline = monotonic() + limit_s
    pause = threading.Event()
    while query.isActive and monotonic() < deadline:
        status = query.status
        if not status["isTriggerActive"] or status["message"].startswith(_BETWEEN_BATCHES):
            break
        pause.wait(0.005)
    with suppress(StreamingQueryException):
        query.stop()
