"""Erases what one transaction's producer sent, wherever it can be erased, and says what remains (docs/security.md)."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from halfway.pipelines.kafka.admin import admin_client
from halfway.pipelines.kafka.range_reader import READ_UNCOMMITTED
from halfway.pipelines.kafka.topic_rules import UNLIMITED
from halfway.pipelines.kafka.topic_scan import TopicScan
from halfway.pipelines.kafka.topic_setup import inspect_topics
from halfway.pipelines.operate.find_pending import did_you_mean
from halfway.pipelines.operate.settle import argument_of, by_whom
from halfway.pipelines.storage.compaction import vacuum_at_once, verify_vacuum_possible
from halfway.pipelines.storage.delta_tables import restore_append_only, stored_tables
from halfway.pipelines.storage.erasure import erase_rows, note_erasure, old_files_kept_ms, rows_to_erase
from halfway.pipelines.storage.locks import replay_lock
from halfway.pipelines.storage.state_reader import StoredState, read_state
from halfway.schemas.errors import HalfwayError, NotErasableError
from halfway.schemas.headers import PGROUP
from halfway.schemas.records import headers_of
from halfway.schemas.settings import KafkaSettings, Settings, StorageSettings
from halfway.schemas.tables import ERASURES_SCHEMA, Table
from halfway.transforms.views.pending import view_pending


@dataclass(frozen=True)
class Remains:
    """A topic that may hold the body. Kafka deletes whole segments, so it may do so later than `until_ms`."""

    topic: str
    until_ms: int | None
    """None if the topic keeps its records for ever, or if it is not known how long."""
    note: str


@dataclass(frozen=True)
class Erasure:
    """What was erased, or would be (`dry_run`), and what remains."""

    transaction_id: str
    producer_group: str | None
    rows: Mapping[str, int]
    """Table → the number of rows whose body was erased by this run, or would be."""
    files_until_ms: int | None
    """From when on `halfway optimize` deletes the files that held them; None if they are deleted, or with `dry_run`."""
    topics: list[Remains]
    dry_run: bool


@dataclass(frozen=True)
class _Found:
    """The rows of a transaction in one table: how many there are, and how many still hold what was sent."""

    rows: int
    filled: int


def erase(
    spark: SparkSession,
    settings: Settings,
    transaction_id: str,
    producer_group: str | None,
    remark: str | None,
    *,
    vacuum: bool,
    dry_run: bool = False,
) -> Erasure:
    """Erase what was sent for one transaction from the tables, with an audit row. Repeating it does nothing twice.

    Args:
        spark: the session that reads the state and changes the tables.
        settings: the job's.
        transaction_id: its id.
        producer_group: its group; None for every group that has used the id.
        remark: the reason, for the audit row.
        vacuum: also delete the files that hold it, at once.
        dry_run: True to erase nothing, and return what would be erased.

    Raises:
        NotErasableError: the transaction is pending, or the job has not read a half of it, or no table holds anything.
        SetupError: `vacuum`, and the tables are not on a local disk.
        TopicError: the half topic is missing.
        AccessError: this user may not read it.
        KafkaUnavailableError: it cannot be read.
        CheckpointInUseError: a replay or another erasure is running.
        OwnershipError: a table of the checkpoint is gone, or elsewhere.
        HalfwayError: the state cannot be read, or the job appends faster than a table can be changed.
    """
    storage = settings.storage
    if vacuum:
        verify_vacuum_possible(spark, storage)
    state = read_state(lambda: spark, storage)
    # A replay that has read the body and not sent it yet would bring it back.
    with replay_lock(storage):
        _verify_settled(state, transaction_id, producer_group)
        _verify_read(settings.kafka, state.read_to, transaction_id, producer_group)
        tables = stored_tables(spark, storage).items()
        found = {table: _find(stored, table, transaction_id, producer_group) for table, stored in tables}
        if not any(each.rows for each in found.values()):
            if ask := did_you_mean((stored for _, stored in tables), transaction_id):
                raise NotErasableError(f"no table holds anything of the transaction {transaction_id}{ask}")
            of_group = "" if producer_group is None else f" that names the group {producer_group} (leave --group out for all)"
            raise NotErasableError(
                f"no table holds anything of the transaction {transaction_id}{of_group}: if it was rolled back, its half is in the topic "
                f"{settings.kafka.half_topic} until Kafka deletes it"
            )
        rows = {str(table): each.filled for table, each in found.items()}
        until_ms = None
        if not dry_run:
            if any(rows.values()):
                # The audit row comes first, so that no erasure is without one.
                at, who = datetime.now(UTC), by_whom()
                values: dict[str, object] = {"erased_at": at, "erased_by": who, "remark": remark, **rows}
                values |= {"transaction_id": transaction_id, "producer_group": producer_group}
                note_erasure(spark, storage, Row(**{name: values[name] for name in ERASURES_SCHEMA.names}))
            until_ms = _erase(spark, storage, transaction_id, producer_group, rows, vacuum=vacuum)
        remains = list(_remains(settings, is_refused=found[Table.QUARANTINE].rows > 0))
        return Erasure(transaction_id, producer_group, rows, until_ms, remains, dry_run)


def _erase(
    spark: SparkSession, storage: StorageSettings, transaction_id: str, producer_group: str | None, rows: Mapping[str, int], *, vacuum: bool
) -> int | None:
    """Erase the rows of each table that has some. Return from when on `halfway optimize` deletes the former files."""
    for table in Table:
        if rows[table]:
            erase_rows(spark, storage, table, rows_to_erase(transaction_id, producer_group, table))
        restore_append_only(spark, storage, table)
        if vacuum:
            vacuum_at_once(spark, storage, table)
    kept_ms = max(old_files_kept_ms(spark, storage, table) for table in Table)
    return None if vacuum else time.time_ns() // 1_000_000 + kept_ms


def _verify_settled(state: StoredState, transaction_id: str, producer_group: str | None) -> None:
    """Refuse a transaction that is pending: its body is still needed, and would come to the tables later."""
    pending = view_pending(state.rows).find(transaction_id)
    if pending is not None and producer_group in (None, pending["producer_group"]):
        raise NotErasableError(
            f"the transaction {transaction_id} of the group {pending['producer_group']} is pending: settle it first, with "
            f"`halfway rollback {argument_of(transaction_id)}`, and erase it when the job has read that"
        )


def _verify_read(kafka: KafkaSettings, read_to: Mapping[str, Mapping[int, int]], transaction_id: str, producer_group: str | None) -> None:
    """Refuse a transaction with an unread half, such as a replay: its body would come to the tables."""
    # Also what the job cannot read yet, behind an open transaction or in it.
    with TopicScan.open(kafka, kafka.half_topic, READ_UNCOMMITTED) as scan:
        for record in scan.beyond(read_to.get(kafka.half_topic, {})):
            if record.key() != transaction_id.encode():
                continue
            groups = [value for name, value in headers_of(record) or () if name == PGROUP and value]
            if producer_group is None or not groups or producer_group.encode() in groups:
                raise NotErasableError(
                    f"the topic {kafka.half_topic} holds a half of the transaction {transaction_id} that the job has not read: let it "
                    "read on, and erase the transaction when it is settled"
                )


def _find(stored: DataFrame, table: Table, transaction_id: str, producer_group: str | None) -> _Found:
    mine = F.col("transaction_id") == F.lit(transaction_id)
    to_erase = F.coalesce(rows_to_erase(transaction_id, producer_group, table), F.lit(False))
    if producer_group is not None and table is Table.QUARANTINE:
        # A record names its group in a header. One that holds nothing may have been erased before.
        mine &= to_erase | (F.col("headers").isNull() & F.col("value").isNull())
    elif producer_group is not None:
        mine &= F.col("producer_group") == F.lit(producer_group)
    [row] = stored.where(mine).agg(F.count("*"), F.count(F.when(to_erase, 1))).collect()
    return _Found(*row)


def _remains(settings: Settings, *, is_refused: bool) -> Iterator[Remains]:
    """Yield the topics that may hold the body. None is compacted, so that no tombstone can delete a record.

    What was rolled back has left no row, such as a replay, or another use of the id, and may be as young as the last
    record that the job has read. So all check topics count, from now on: a group may have used another one before.

    Args:
        settings: the job's.
        is_refused: a record of the id was refused, which may be an op.
    """
    kafka = settings.kafka
    topics = (kafka.half_topic, *kafka.all_check_topics(), *([kafka.op_topic] if is_refused else []))
    now_ms = time.time_ns() // 1_000_000
    kept_ms, problem = _kept_ms(settings)
    for topic in topics:
        if topic not in kept_ms:
            yield Remains(topic, None, f"for as long as its retention.ms says, which is not known: {problem}")
        elif kept_ms[topic] == UNLIMITED:
            yield Remains(topic, None, "for ever: its retention.ms is -1")
        else:
            yield Remains(topic, now_ms + kept_ms[topic], "or later, because Kafka deletes whole segments")


def _kept_ms(settings: Settings) -> tuple[dict[str, int], str]:
    """Return how long topics keep their records, or why that is not known."""
    try:
        return {report.topic: report.retention_ms for report in inspect_topics(admin_client(settings.kafka), settings)}, "no such topic"
    except HalfwayError as error:
        return {}, str(error)
