"""Plays a simulated history on a real Kafka, Spark and Delta, and compares what both have left.

The records come to their places at their times, and the real job runs where the simulated one ran. Then the tables must
hold the same rows, and the check topic the same requests.
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from confluent_kafka import Producer
from confluent_kafka.admin import NewPartitions
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import TimestampType

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.admin import partition_counts
from halfway.pipelines.local.broker import LocalBroker
from halfway.pipelines.resolve import sinks
from halfway.pipelines.resolve.job import ResolveJob
from halfway.pipelines.resolve.sinks import BatchWriter
from halfway.pipelines.runtime.java import SHORT_LIVED_JVM
from halfway.pipelines.runtime.session import spark_session
from halfway.pipelines.storage import first_start
from halfway.pipelines.storage.delta_tables import read_table
from halfway.schemas.errors import HalfwayError
from halfway.schemas.headers import HALF_LOST
from halfway.schemas.outcomes import Kind
from halfway.schemas.settings import Settings
from halfway.schemas.tables import TABLE_SCHEMAS, Table
from tests.chaos.evidence import end_offsets
from tests.simulation.history import CHECK, HALF, OP, Record
from tests.simulation.storage import Offsets
from tests.simulation.tape import BackUp, Deletion, Event, LostCommit, MorePartitions, Restore, Run, TapedWorld, TransactionEnd
from tests.simulation.world import PARTITIONS
from tests.support.kafka_topics import delete_records, make_create_time_topics, patient_admin, topic_settings, unique_topics
from tests.support.partition_records import topic_records
from tests.support.waiting import until

_LIMIT_S = 60.0
_LONGEST_TRANSACTION_MS = 900_000
_JVM_OPTIONS = f"{SHORT_LIVED_JVM} -Dspark.sql.codegen.cache.maxEntries=2000"
"""Each run of the job is short: see tests/conftest.py."""


def playable(first_seed: int, count: int) -> Iterator[TapedWorld]:
    """Yield simulated histories, from a seed on, that a real job can live through."""
    seed = first_seed
    while count:
        world = TapedWorld(seed)
        world.run()
        if not world.cannot_be_played:
            count -= 1
            yield world
        seed += 1


def differences(taped: TapedWorld, spark: SparkSession, broker: LocalBroker, folder: Path) -> list[str]:
    """Play a simulated history, and return what is not the same in the end."""
    return RealWorld(taped, spark, broker, folder).differences()


def on_this_machine(first_seed: int, count: int) -> Iterator[tuple[TapedWorld, list[str]]]:
    """Start a broker and Spark, and play histories there. Yield each with its differences."""
    os.environ.setdefault("SPARK_SUBMIT_OPTS", _JVM_OPTIONS)
    with TemporaryDirectory(prefix="halfway-real-") as folder:
        broker = LocalBroker(Path(folder) / "broker")
        broker.start()
        try:
            spark = spark_session(load_settings(environ={}, overrides={"state.shuffle_partitions": 1}))
            for taped in playable(first_seed, count):
                yield taped, differences(taped, spark, broker, Path(folder) / str(taped.seed))
        finally:
            broker.stop()


class _KilledError(Exception):
    """The job is killed at a step."""


class RealWorld:
    """Topics on a broker, tables and checkpoints in a folder, and the job, to which a simulated history happens."""

    def __init__(self, taped: TapedWorld, spark: SparkSession, broker: LocalBroker, folder: Path) -> None:
        self._taped, self._spark, self._folder = taped, spark, folder
        self._settings = load_settings(environ={}, overrides=unique_topics(broker))
        self._topics = {HALF: self._settings.kafka.half_topic, OP: self._settings.kafka.op_topic}
        make_create_time_topics(self._settings, PARTITIONS)
        self._producer = Producer({"bootstrap.servers": self._settings.kafka.servers(), "acks": "all"})
        self._transactional: Producer | None = None
        self._open_tx: int | None = None
        self._notices: list[Record] = []
        """The simulated job's notices of lost halves that the real one has not sent yet."""
        self._found: list[str] = []

    def differences(self) -> list[str]:
        """Let everything happen in its order. Return what is not the same in the end."""
        records = [record for record in self._taped.history.records if record.topic != CHECK]
        self._notices = [record for record in records if record.header(HALF_LOST)]
        happened: list[Record | Event] = [*(record for record in records if not record.header(HALF_LOST)), *self._taped.tape]
        for each in sorted(happened, key=attrgetter("seq")):
            match each:
                case Record():
                    self._send(each)
                case Run():
                    self._run(each)
                case TransactionEnd():
                    self._end_transaction(each)
                case Deletion():
                    self._delete(each.first)
                case MorePartitions():
                    self._add_partition(each)
                case BackUp():
                    self._copy(each.path, "backup")
                case Restore():
                    self._copy("backup", each.path)
                case LostCommit():
                    self._lose_commit(each)
        for table in Table:
            self._compare(str(table), self._simulated_rows(table), self._real_rows(table))
        # They are sent at least once.
        self._compare("check requests", {*self._simulated_checks()}, {*self._real_checks()})
        return self._found

    # Kafka.

    def _send(self, record: Record) -> None:
        """Send a record to its place, with its time."""
        producer = self._producer
        if record.tx is not None:
            producer = self._of_transaction(record.tx)
        placed: list[int] = []

        def delivered(error: Any, message: Any) -> None:
            assert error is None, error
            placed.append(message.offset())

        headers: Any = list(record.headers)
        topic, at_ms = self._topics[record.topic], record.at_ms
        producer.produce(
            topic, record.value, record.key, partition=record.partition, timestamp=at_ms, headers=headers, on_delivery=delivered
        )
        producer.flush(_LIMIT_S)
        assert placed == [record.offset], f"{record} is at {placed}"

    def _of_transaction(self, tx: int) -> Producer:
        """Return the producer of a transaction, and begin it."""
        if self._transactional is None:
            own = {"transactional.id": self._topics[HALF], "transaction.timeout.ms": _LONGEST_TRANSACTION_MS}
            self._transactional = Producer({"bootstrap.servers": self._settings.kafka.servers(), **own})
            self._transactional.init_transactions(_LIMIT_S)
        if self._open_tx != tx:
            self._transactional.begin_transaction()
            self._open_tx = tx
        return self._transactional

    def _end_transaction(self, end: TransactionEnd) -> None:
        """Commit or abort, and wait until the partitions hold the end."""
        if self._transactional is None or self._open_tx is None:
            return
        self._open_tx = None
        if end.is_commit:
            self._transactional.commit_transaction(_LIMIT_S)
        else:
            self._transactional.abort_transaction(_LIMIT_S)
        until(lambda: all(self._ends()[place] == offset for place, offset in end.ends.items()), "the end of the transaction")

    def _ends(self) -> Offsets:
        topics = self._topics.items()
        return {(topic, number): end for topic, name in topics for number, end in end_offsets(self._settings, name).items()}

    def _delete(self, first: Offsets) -> None:
        for topic, name in self._topics.items():
            delete_records(self._settings.kafka, name, {number: offset for (of, number), offset in first.items() if of == topic and offset})

    def _add_partition(self, more: MorePartitions) -> None:
        name, client = self._topics[more.topic], patient_admin(self._settings.kafka)
        [made] = client.create_partitions([NewPartitions(name, more.count)]).values()
        made.result(_LIMIT_S)
        until(lambda: partition_counts(client, [name])[name] == more.count, "the partition")
        self._producer.list_topics(name, _LIMIT_S)

    # The disk.

    def _copy(self, source: str, target: str) -> None:
        """Put a copy of a checkpoint in the place of another one. One that was never written is an empty one."""
        source_folder, target_folder = self._path(source), self._path(target)
        shutil.rmtree(target_folder, ignore_errors=True)
        if source_folder.exists():
            shutil.copytree(source_folder, target_folder)

    def _lose_commit(self, lost: LostCommit) -> None:
        for name in (f"{lost.batch_id}", f".{lost.batch_id}.crc"):
            (self._path(lost.path) / "commits" / name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / name.strip("/")

    # The job.

    def _run(self, run: Run) -> None:
        """Run the job over everything that it has not read, and kill it where the simulated one was killed."""
        ended = ""
        with (
            self._dies_at(run.killed_at, run.killed_at_time),
            patch.object(first_start, "uuid", SimpleNamespace(uuid4=lambda: run.query_id)),
        ):
            try:
                ResolveJob(self._settings_of(run), adopt=run.is_adopting).run(lambda: self._spark)
            except _KilledError:
                ended = "killed"
            except HalfwayError as error:
                ended = type(error).__name__
        # Killed after it has written that the batch is done, a job leaves what one leaves that ends.
        expected = run.refusal or ("killed" if run.killed_at not in ("", "commit") else "")
        if ended != expected:
            self._found.append(f"the run at {run.seq} ended by {ended or 'itself'}, and was to end by {expected or 'itself'}: {run}")

    def _settings_of(self, run: Run) -> Settings:
        places = {"storage.warehouse": str(self._folder / "warehouse"), "storage.checkpoint": str(self._path(run.path))}
        shape = {"state.buckets": 2, "state.shuffle_partitions": 1, "resolution.tick_interval": 0, "trigger.available_now": True}
        return load_settings(environ={}, overrides={**topic_settings(self._settings.kafka), **places, **shape, **run.settings})

    @contextmanager
    def _dies_at(self, step: str, time: int) -> Iterator[None]:
        """Let the job die the given time that it reaches a step, and place its notices of lost halves."""
        write, send_checks, append_once = BatchWriter.write, BatchWriter._send_checks, sinks.append_once
        left = {step: time}

        def reach(name: str) -> None:
            left[name] = left.get(name, 0) - 1
            if left[name] == 0:
                raise _KilledError(name)

        def written(writer: BatchWriter, packs: Any, batch_id: int) -> Any:
            reach("offsets")
            report = write(writer, packs, batch_id)
            reach("before commit")
            return report

        def appended(rows: Any, storage: Any, table: Table, *others: Any, **named: Any) -> None:
            reach(f"before {table}")
            append_once(rows, storage, table, *others, **named)
            reach(f"after {table}")

        def sent(writer: BatchWriter, outcomes: Any) -> Any:
            if not outcomes.rows[Kind.CHECK]:
                return send_checks(writer, outcomes)
            reach("before check")
            lost = send_checks(writer, outcomes)
            reach("after checks")
            return lost

        def notify(_: BatchWriter, pointers: Sequence[tuple[str, int, int]]) -> None:
            for _ in pointers:
                self._send(self._notices.pop(0))
            reach("after notices")

        with ExitStack() as stack:
            replaced = {"write": written, "_send_checks": sent, "_notify_lost": notify}
            for name, new in replaced.items():
                stack.enter_context(patch.object(BatchWriter, name, new))
            stack.enter_context(patch.object(sinks, "append_once", appended))
            yield

    # What is left.

    def _simulated_rows(self, table: Table) -> list[str]:
        return [_told(row.values) for row in self._taped.history.rows if row.table == table]

    def _real_rows(self, table: Table) -> list[str]:
        if not (self._folder / "warehouse" / table).exists():
            return []
        frame = read_table(self._spark, self._settings_of(Run(0, {}, "none", False)).storage, table)
        is_time = {each.name for each in TABLE_SCHEMAS[table] if isinstance(each.dataType, TimestampType)}
        columns = [F.unix_millis(name).alias(name) if name in is_time else F.col(name) for name in frame.columns]
        simulated_name = {name: topic for topic, name in self._topics.items()}
        rows = [row.asDict() for row in frame.select(columns).collect()]
        for row in rows if table is Table.QUARANTINE else ():
            row["source_topic"] = simulated_name[row["source_topic"]]
        return [_told(row) for row in rows]

    def _simulated_checks(self) -> list[str]:
        sent = [record for record in self._taped.history.records if record.topic == CHECK]
        return [_told_check(record.key, record.value, record.headers) for record in sent]

    def _real_checks(self) -> list[str]:
        sent = topic_records(self._settings.kafka.servers(), self._settings.kafka.check_topic)
        return [_told_check(record.key(), record.value(), record.headers() or ()) for record in sent]

    def _compare(self, what: str, simulated: Iterable[str], real: Iterable[str]) -> None:
        in_both = Counter(simulated) & Counter(real)
        for side, those in (("simulated", simulated), ("real", real)):
            self._found += [f"{what}: {side} only: {each}" for each in (Counter(those) - in_both).elements()]


def _told(row: Mapping[str, Any]) -> str:
    """Return a row as a text that is the same for the same values."""
    return str({name: _plain(row[name]) for name in sorted(row)})


def _plain(value: Any) -> Any:
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, dict):
        return sorted(value.items())
    # The headers of a refused record: pairs, rows of Spark, or structs of Arrow.
    return [_pair(*each.values()) if isinstance(each, dict) else _pair(*each) for each in value] if isinstance(value, list) else value


def _pair(name: str, value: bytes | None) -> tuple[str, bytes | None]:
    return name, None if value is None else bytes(value)


def _told_check(key: bytes | None, value: bytes | None, headers: Iterable[tuple[str, bytes | None]]) -> str:
    return str((key, value or b"", sorted(headers)))
