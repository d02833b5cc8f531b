"""Settles a transaction by hand, with an op record as its producer would send it."""

import getpass
import socket
from dataclasses import dataclass

import pyarrow.compute as pc
from confluent_kafka import Message
from pydantic import ValidationError
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from halfway.pipelines.kafka.writer import RecordWriter, verify_topic_writable
from halfway.pipelines.storage.delta_tables import read_table, table_exists
from halfway.pipelines.storage.state_reader import StoredState, read_state
from halfway.schemas.errors import NotPendingError
from halfway.schemas.headers import LocalTransactionState
from halfway.schemas.outcomes import Phase
from halfway.schemas.records import OpHeaders, RecordError, encode_key
from halfway.schemas.settings import KafkaSettings, StorageSettings
from halfway.schemas.tables import Table
from halfway.transforms.views.pending import phase_of, view_pending


@dataclass(frozen=True)
class Target:
    """The transaction to settle. An op must name the group and the incarnation of its half (R11, R13)."""

    transaction_id: str
    producer_group: str
    incarnation: int


@dataclass(frozen=True)
class SentOp:
    """An op record and its position in Kafka."""

    transaction_id: str
    producer_group: str
    incarnation: int
    action: LocalTransactionState
    topic: str
    partition: int
    offset: int


def find_pending(spark: SparkSession, storage: StorageSettings, transaction_id: str) -> Target:
    """Look up a pending transaction in the state.

    Raises:
        NotPendingError: the transaction is not pending. The message says what is known about it.
    """
    stored = read_state(spark, storage)
    pending = view_pending(stored.rows).transactions
    for row in pending.filter(pc.equal(pending["transaction_id"], transaction_id)).to_pylist():
        return Target(transaction_id, row["producer_group"], row["incarnation"])
    known = _what_is_known(spark, storage, stored, transaction_id)
    raise NotPendingError(f"the transaction {transaction_id} is not pending: {known}")


def settle(kafka: KafkaSettings, target: Target, action: LocalTransactionState, remark: str | None = None) -> SentOp:
    """Send COMMIT or ROLLBACK, and wait until Kafka acknowledges. The job applies it if it is the first verdict (R2).

    Args:
        kafka: where Kafka is, the names of the topics, and the keys that sign ops.
        target: the transaction.
        action: the verdict.
        remark: the reason. The name of the user is put before it.

    Raises:
        RecordError: the id or the group breaks the contract (docs/contract.md).
        SettingsError: signing is on, and there is no key for the group.
        KafkaUnavailableError: Kafka does not accept the record.
    """
    by_whom = f"by hand, by {_user()}@{socket.gethostname()}"
    text = f"{by_whom}: {remark}" if remark else by_whom
    try:
        op = OpHeaders(action=action, producer_group=target.producer_group, incarnation=target.incarnation, remark=text)
    except ValidationError as error:
        raise RecordError.from_validation(error) from None
    keyring = kafka.signing.keyring_of(target.producer_group)
    headers = op.signed(target.transaction_id, keyring).to_headers()
    placed: list[tuple[int, int]] = []

    def note(message: Message) -> None:
        placed.append((message.partition() or 0, message.offset() or 0))

    verify_topic_writable(kafka, kafka.op_topic)
    writer = RecordWriter(kafka)
    writer.put(kafka.op_topic, encode_key(target.transaction_id), None, headers, on_delivered=note)
    writer.flush()
    [(partition, offset)] = placed
    return SentOp(target.transaction_id, target.producer_group, target.incarnation, action, kafka.op_topic, partition, offset)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # The user of a container may have no name.
        return "unknown"


def _what_is_known(spark: SparkSession, storage: StorageSettings, stored: StoredState, transaction_id: str) -> str:
    """Return what the tables, or else the state, say about a transaction that is not pending."""

    def latest(table: Table, *columns: str | Column) -> list[object] | None:
        if not table_exists(spark, storage, table):
            return None
        rows = read_table(spark, storage, table).where(F.col("transaction_id") == transaction_id)
        first = rows.orderBy(F.col("incarnation").desc()).select("incarnation", *columns).first()
        return list(first) if first is not None else None

    committed = latest(Table.MESSAGES, F.date_format("committed_at", "yyyy-MM-dd HH:mm:ss"))
    if committed is not None:
        return f"it was committed at {committed[1]} UTC, see the table messages"
    discarded = latest(Table.DISCARDED, "reason", "check_times")
    phase = phase_of(stored.rows, transaction_id)
    if discarded is not None and phase in (None, Phase.DISCARDED):
        _, reason, check_times = discarded
        return f"it was discarded ({reason}, after {check_times} checks): `halfway replay {transaction_id}` resends it"
    if phase is Phase.ROLLED_BACK:
        return "it was rolled back"
    if phase is not None:
        return f"it was settled as {phase.name}"
    if stored.batch_id is None:
        return f"the checkpoint {storage.checkpoint} has no batch yet; with --group and --incarnation the op is sent without a lookup"
    return (
        f"up to batch {stored.batch_id} its half was not read, or it was rolled back and is forgotten; with --group and --incarnation "
        "the op is sent without a lookup"
    )
