"""The job: one streaming query from the half and op topics to the tables and the check topic (decision 5)."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming import StreamingQuery

from halfway.pipelines.kafka.admin import Admin, admin_client, topic_ids
from halfway.pipelines.kafka.cut_logs import verify_not_cut
from halfway.pipelines.kafka.range_reader import OffsetRange
from halfway.pipelines.kafka.rights import FETCH_GROUP, JOB_GROUPS, job_rights, verify_rights
from halfway.pipelines.kafka.tick_records import last_ticks, other_jobs
from halfway.pipelines.kafka.topic_scan import deleted_before_ms, retained_ranges
from halfway.pipelines.kafka.topic_setup import verify_topics
from halfway.pipelines.resolve.batch_outcomes import max_undivided
from halfway.pipelines.resolve.failures import explain
from halfway.pipelines.resolve.groups import GroupWatch
from halfway.pipelines.resolve.report import BatchReport
from halfway.pipelines.resolve.sent_checks import SentChecks
from halfway.pipelines.resolve.sinks import BatchWriter
from halfway.pipelines.resolve.sources import former_records_to_read, read_records, unread_records
from halfway.pipelines.resolve.ticks import TickPublisher
from halfway.pipelines.runtime.collector import without_collector
from halfway.pipelines.runtime.session import is_submitted
from halfway.pipelines.storage.batch_settings import settings_of_batches
from halfway.pipelines.storage.delta_tables import upgrade_tables
from halfway.pipelines.storage.file_systems import local_path, on_local_disk, read_text, verify_local_folder_writable, write_text
from halfway.pipelines.storage.first_start import TopicFacts, begin_checkpoint
from halfway.pipelines.storage.lineage import BatchOrigin, appended_in, verify_lineage
from halfway.pipelines.storage.locks import job_lock
from halfway.pipelines.storage.manifest import STATUS_FILE, Manifest, checkpoint_file
from halfway.pipelines.storage.ownership import Ownership, read_ownership, verify_ownership, verify_same_topics
from halfway.pipelines.storage.state_reader import HadoopFiles, bucket_state, partitions_of_state
from halfway.schemas.batch_status import BatchStatus
from halfway.schemas.errors import HalfwayError, JobFailedError, KafkaUnavailableError, OwnershipError, StateFormatError
from halfway.schemas.events import PACKED_EVENTS_SCHEMA
from halfway.schemas.headers import Source
from halfway.schemas.settings import KafkaSettings, Settings, StorageSettings
from halfway.transforms.bucket import Bucket
from halfway.transforms.by_batch import ByBatch
from halfway.transforms.decoding import DecoderConfig
from halfway.transforms.operator import bucket_function, resolve_events
from halfway.transforms.packing import Takeover, pack_events, to_records
from halfway.transforms.rules import rules_of

log = logging.getLogger(__name__)

QUERY_NAME = "halfway"
# Spark's default file manager starts a process four times for each file that it puts in place on a local disk, 8 ms
# each. The default also notices a second job; on a local disk a lock keeps that one away (decision 6).
_LOCAL_FILE_MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
_STOP_LIMIT_S = 600
_BETWEEN_BATCHES = ("Waiting for next trigger", "Waiting for data to arrive", "Getting offsets", "No new data")


class ResolveJob:
    """One run of the job."""

    def __init__(self, settings: Settings, *, adopt: bool = False, on_batch: Callable[[BatchReport], None] | None = None) -> None:
        """Prepare a run. Connects to nothing.

        Args:
            settings: the job's settings.
            adopt: take over existing tables with a new checkpoint (decision 6).
            on_batch: receives the report of each batch, shortly after it is done, in the thread of `run`.
        """
        self._settings = settings
        self._adopt = adopt
        self._on_batch = on_batch
        self._stop = threading.Event()
        self._reports: deque[BatchReport] = deque()
        """Reports of batches that are not handed on yet."""
        self._sent = SentChecks(settings.resolution.transactionCheckInterval)
        self._groups: GroupWatch | None = None
        self._ticks: TickPublisher | None = None
        """Both are None where no ticks are published."""
        self.failure: Exception | None = None
        self.is_running = False
        """True from the start of the query on. Until then a run that is killed has done nothing."""

    @property
    def is_stopping(self) -> bool:
        """Return True once `stop` was called."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Ask the job to end after the batch that is under way. A signal handler may call it."""
        self._stop.set()

    def run(self, session: Callable[[], SparkSession]) -> None:
        """Run until stopped, or until everything waiting is resolved (`available_now`).

        Args:
            session: makes the Spark session. Called after the checks that are quick.

        Raises:
            SettingsError: records are signed, and the job has no key.
            TopicError: a topic is missing, keeps records too short (R17), or takes no request for the largest half.
            AccessError: this user lacks a right, at the start or later.
            OwnershipError: checkpoint, tables and settings do not belong together.
            CheckpointInUseError: another job runs on this checkpoint, or another process holds a table's lock.
            RecordsLostError: Kafka has lost records that the job had not read, or has others in the place of read ones.
            StateDamagedError: the checkpoint's state cannot be read.
            KafkaUnavailableError: Kafka cannot be reached at the start, or did not answer a batch.
            RecordTooLargeError: a topic refuses a record.
            SetupError: a disk is full, or a folder or a table cannot be made.
            JobFailedError: a batch failed, for a reason that Spark gives and the log has; a new run repeats it.
        """
        settings = self._settings
        if self._adopt and settings.kafka.starting_offsets != "earliest":
            raise OwnershipError(
                "--adopt reads the topics from the earliest record, so that nothing pending is lost: set kafka.starting_offsets to earliest"
            )
        settings.kafka.signing.keyring_of_job()
        # The first batch comes after Spark's start, up to minutes later: its user sees meanwhile what runs where.
        storage = settings.storage
        places = (settings.kafka.servers(), storage.checkpoint, storage.catalog_schema or storage.warehouse)
        log.info("event=start kafka=%s checkpoint=%s tables=%s", *places)
        if not is_submitted() and "HADOOP_CONF_DIR" not in os.environ:  # else a path without a scheme may be elsewhere
            _verify_folders_writable(storage)
        with job_lock(settings.storage):
            client = admin_client(settings.kafka)
            self._verify_rights(client)
            verify_topics(client, settings, adopt=self._adopt)
            spark = session()
            log.info("event=reading_tables effect=nothing_is_read_from_kafka_yet")
            ownership = read_ownership(spark, settings.storage)
            ids = topic_ids(client, (settings.kafka.half_topic, settings.kafka.op_topic))
            verify_ownership(settings, ownership, ids, adopt=self._adopt)
            _warn_of_other_jobs(client, settings.kafka, ownership)
            manifest = ownership.complete_manifest or self._begin(spark, ownership, ids)
            upgrade_tables(spark, settings.storage)
            held: Sequence[BatchOrigin] = ()
            if ownership.query_id is not None:  # this is not the very first start
                held = verify_lineage(spark, settings.storage, manifest, ownership.last_batch_id)
                self._verify_not_cut(spark, client)
            with self._ticking(spark, client, manifest.query_id):
                self._run_query(spark, client, manifest, held)

    @contextmanager
    def _ticking(self, spark: SparkSession, client: Admin, query_id: str) -> Iterator[None]:
        """Publish ticks until the block ends, or for `available_now` one before it; none without an interval."""
        settings = self._settings
        if settings.resolution.tick_interval == 0:
            yield
            return
        ticks = TickPublisher(settings, client, self._sent, query_id)
        groups = GroupWatch(spark, settings.kafka, settings.resolution.transactionCheckInterval, ticks.now_ms)
        self._take_up_status(spark, groups)
        ticks.absent_groups, ticks.known_s = groups.absent, groups.known_s
        self._groups, self._ticks = groups, ticks
        groups.start()
        try:
            if settings.trigger.available_now:
                ticks.publish_first()
            else:
                ticks.start()
            yield
        finally:
            ticks.stop()
            groups.close()

    def _take_up_status(self, spark: SparkSession, groups: GroupWatch) -> None:
        """Take up which checks the last run has sent, and which groups Kafka had."""
        text = read_text(spark, checkpoint_file(self._settings.storage, STATUS_FILE))
        status = BatchStatus.parse(text)
        if status is not None:
            groups.take_up(status.groups_listed_ms_ago)
            self._sent.take_up(status.sent_checks, time.time_ns() // 1_000_000 - status.written_at_ms)
        elif text is not None:
            log.warning("event=status_file_not_read effect=checks_count_half_an_interval_after_the_first_batch")

    def _begin(self, spark: SparkSession, found: Ownership, ids: Mapping[str, str]) -> Manifest:
        """Do what only the first start of a checkpoint does."""
        kafka = self._settings.kafka
        before_ms = deleted_before_ms(kafka, kafka.half_topic) if found.tables else 0
        return begin_checkpoint(spark, self._settings, found, TopicFacts(ids, before_ms, self._ends))

    def _retained(self) -> dict[str, dict[int, OffsetRange]]:
        """Return the offsets that Kafka holds of the half and op topics."""
        kafka = self._settings.kafka
        return retained_ranges(kafka, [kafka.half_topic, kafka.op_topic], FETCH_GROUP)

    def _ends(self) -> dict[str, dict[int, int]]:
        """Return where the half and op topics end."""
        return {topic: {number: offsets.end for number, offsets in of_topic.items()} for topic, of_topic in self._retained().items()}

    def _verify_not_cut(self, spark: SparkSession, client: Admin) -> None:
        kafka, stored = self._settings.kafka, bucket_state(spark, self._settings.storage)
        if stored is None or not stored.rows:
            return
        with suppress(StateFormatError):  # the query says what is damaged
            clock = Bucket.decode(*stored.rows[0]).clock
            last_ms = {kafka.half_topic: clock.last_ms(Source.HALF), kafka.op_topic: clock.last_ms(Source.OP)}
            try:
                verify_not_cut(kafka, client, stored.read_to, last_ms)
            except KafkaUnavailableError as error:
                raise explain(error, self._settings) or error from None

    def _verify_rights(self, client: Admin) -> None:
        verify_rights(client, job_rights(self._settings.kafka), **JOB_GROUPS)

    def _explain_lost_right(self, client: Admin) -> None:
        """Raise an error that names a right taken away while the job ran: Spark's own message is a page long."""
        try:
            self._verify_rights(client)
        except KafkaUnavailableError as error:
            log.warning("event=rights_not_known cause=%r", str(error))

    def _run_query(self, spark: SparkSession, client: Admin, manifest: Manifest, held: Sequence[BatchOrigin]) -> None:
        writer = BatchWriter(self._settings, manifest, appended_in(HadoopFiles(spark, self._settings.storage)), held)
        query = self._start(spark, manifest, writer)
        self.is_running = True
        log.info("event=query_started")
        try:
            while query.isActive and not self._stop.is_set():
                # Does not wait for the event: a signal handler in this thread that sets it could hang on its lock.
                time.sleep(0.2)
                self._hand_on_reports(query)
                verify_same_topics(self._settings.storage, manifest, self._ticks.topic_ids if self._ticks else {})
            if query.isActive:
                stop_between_batches(query)
            query.awaitTermination()
        except OwnershipError:  # A topic was recreated. What a batch may skip now, an adoption reads.
            stop_between_batches(query)
            raise
        except StreamingQueryException as error:
            self._explain_lost_right(client)
            failure = self.failure or error
            explained = explain(failure, self._settings)
            if isinstance(explained, JobFailedError):
                log.error("event=query_failed", exc_info=failure)  # once the session has ended, it has no text
            raise explained or failure from None
        finally:
            writer.close()
            self._hand_on_reports(query, ended=True)

    def _hand_on_reports(self, query: StreamingQuery, *, ended: bool = False) -> None:
        """Hand on the reports of finished batches. Spark tells the backlog after a batch, not within it."""
        progress = query.lastProgress if self._reports else None
        done_id = -1 if progress is None else progress.batchId
        while self._reports and (ended or self._reports[0].batch_id <= done_id):
            report = self._reports.popleft()
            report.unread = unread_records(progress)
            if self._on_batch is not None:
                self._on_batch(report)

    def _start(self, spark: SparkSession, manifest: Manifest, batches: BatchWriter) -> StreamingQuery:
        settings, kafka = self._settings, self._settings.kafka
        wanted, fixed = settings.state.shuffle_partitions, partitions_of_state(spark, settings.storage)
        if fixed not in (None, wanted):
            log.warning("event=setting_without_effect name=state.shuffle_partitions checkpoint_has=%d", fixed)
        by_batch = settings_of_batches(spark, settings)
        # Each reading task generates and compiles code for 0.1 s of CPU before its first record: no more tasks than
        # there is work for.
        read = read_records(spark, kafka, manifest.starting_offsets).coalesce(wanted)
        records = to_records(read, kafka.op_topic, digests=kafka.signing.keyring() is not None)
        taken_at = {Source.HALF: manifest.taken_at.get(kafka.half_topic, {}), Source.OP: manifest.taken_at.get(kafka.op_topic, {})}
        decoder_of = partial(DecoderConfig.of, kafka=kafka, taken_at=taken_at[Source.HALF], job=manifest.query_id)
        decoding = ByBatch([(first, decoder_of(resolution)) for first, resolution in by_batch])
        former = former_records_to_read(spark, settings, manifest, self._retained)
        pack = without_collector(pack_events(decoding, manifest.bucket_keys, bytes.fromhex(manifest.bucket_secret), former))
        packs = records.mapInArrow(pack, from_arrow_schema(PACKED_EVENTS_SCHEMA))
        rules = ByBatch([(first, rules_of(resolution)) for first, resolution in by_batch])
        slots = spark.sparkContext.defaultParallelism
        takeover = Takeover(taken_at, manifest.copied_until_ms, sorted(kafka.signing.keys))
        function = without_collector(bucket_function(rules, slots, max_undivided(manifest.buckets), takeover))
        outcomes = resolve_events(packs, function)
        if on_local_disk(spark, settings.storage.checkpoint) is not None:
            spark.conf.set("spark.sql.streaming.checkpointFileManagerClass", _LOCAL_FILE_MANAGER)
        writer = outcomes.writeStream.queryName(QUERY_NAME).option("checkpointLocation", settings.storage.checkpoint)
        writer = writer.outputMode("append").foreachBatch(partial(self._write_batch, batches))
        if settings.trigger.available_now:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=f"{settings.trigger.interval} milliseconds").start()

    def _write_batch(self, writer: BatchWriter, outcomes: DataFrame, batch_id: int) -> None:
        try:
            report = writer.write(outcomes, batch_id)
            if report.horizon_ms is not None:
                self._sent.add(report.horizon_ms, any_due=report.any_due)
            self._write_status(outcomes.sparkSession, report, writer)
            writer.use_pause(outcomes.sparkSession)
        except Exception as error:
            self.failure = error
            raise
        self._reports.append(report)
        if self._ticks is not None:
            self._ticks.pace.note_batch()

    def _write_status(self, spark: SparkSession, report: BatchReport, writer: BatchWriter) -> None:
        """Write the file that `halfway status`, the demo and the next start read."""
        status = BatchStatus(
            batch_id=report.batch_id,
            seconds=round(report.seconds, 3),
            written_at_ms=time.time_ns() // 1_000_000,
            horizon_ms=report.horizon_ms,
            pending=report.pending,
            counts=report.counts,
            appended=writer.appended,
            appended_before=writer.appended_before,
            sent_checks=self._sent.status(),
            groups_listed_ms_ago=self._groups.listed_ms_ago() if self._groups else {},
        )
        write_text(spark, checkpoint_file(self._settings.storage, STATUS_FILE), status.to_json())


def stop_between_batches(query: StreamingQuery) -> None:
    """Stop a query while no batch is under way. Stopped in the middle of one, Spark prints a StackOverflowError."""
    deadline_s = time.monotonic() + _STOP_LIMIT_S
    while query.isActive and time.monotonic() < deadline_s:
        status = query.status
        if not status["isTriggerActive"] or status["message"].startswith(_BETWEEN_BATCHES):
            break
        time.sleep(0.005)
    with suppress(StreamingQueryException):
        query.stop()


def _warn_of_other_jobs(client: Admin, kafka: KafkaSettings, ownership: Ownership) -> None:
    """Warn of a job of another checkpoint on the same topics, as of one that was started in another folder."""
    with suppress(HalfwayError):
        for told in other_jobs(last_ticks(client, kafka), ownership.queries()):
            log.warning("event=another_job cause=%r", told)


def _verify_folders_writable(storage: StorageSettings) -> None:
    """Refuse folders that cannot be written before Spark starts, which would say so a minute later in its own words."""
    places = {"storage.checkpoint": storage.checkpoint}
    if not storage.catalog_schema:
        places["storage.warehouse"] = storage.warehouse
    for name, uri in places.items():
        folder = local_path(uri)
        if folder is not None:
            verify_local_folder_writable(name, folder)
