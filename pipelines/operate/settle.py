"""Settles a transaction by hand, with an op record as its producer would send it."""

import getpass
import shlex
import socket
from dataclasses import dataclass

from confluent_kafka import Message
from pydantic import ValidationError

from halfway.pipelines.kafka.writer import RecordWriter, verify_topic_writable
from halfway.schemas.errors import SettingsError
from halfway.schemas.headers import LocalTransactionState
from halfway.schemas.records import OpHeaders, RecordError, encode_key
from halfway.schemas.settings import KafkaSettings


@dataclass(frozen=True)
class Target:
    """The transaction to settle. An op must name the group and the incarnation of its half (R11, R13)."""

    transaction_id: str
    producer_group: str
    incarnation: int
    is_signed: bool = False
    """Its half is signed, so that the job refuses an op that is not."""


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


def settle(kafka: KafkaSettings, target: Target, action: LocalTransactionState, remark: str | None = None) -> SentOp:
    """Send COMMIT or ROLLBACK, and wait until Kafka acknowledges. The job applies it if it is the first verdict (R2).

    Args:
        kafka: where Kafka is, the names of the topics, and the keys that sign records.
        target: the transaction.
        action: the verdict.
        remark: the reason. The name of the user is put before it.

    Raises:
        RecordError: the id or the group breaks the contract (docs/contract.md).
        SettingsError: the half is signed, or records must be, and there is no key for the group.
        KafkaUnavailableError: Kafka does not accept the record.
    """
    who = f"by hand, by {by_whom()}"
    text = f"{who}: {remark}" if remark else who
    try:
        op = OpHeaders(action=action, producer_group=target.producer_group, incarnation=target.incarnation, remark=text)
    except ValidationError as error:
        raise RecordError.from_validation(error) from None
    keyring = kafka.signing.keyring_of(target.producer_group)
    if target.is_signed and not (keyring is not None and keyring.has(target.producer_group)):
        raise SettingsError(
            f"the half is signed, and kafka.signing.keys has no key for group {target.producer_group} here, so that the job would refuse "
            "the op: give this command the job's settings (if the group's key was removed for good, --group sends the op unsigned)"
        )
    headers = op.signed(target.transaction_id, kafka.op_topic, keyring).to_headers()
    placed: list[tuple[int, int]] = []

    def note(message: Message) -> None:
        placed.append((message.partition() or 0, message.offset() or 0))

    verify_topic_writable(kafka, kafka.op_topic)
    writer = RecordWriter(kafka)
    writer.put(kafka.op_topic, encode_key(target.transaction_id), None, headers, on_delivered=note)
    writer.flush()
    [(partition, offset)] = placed
    return SentOp(target.transaction_id, target.producer_group, target.incarnation, action, kafka.op_topic, partition, offset)


def argument_of(transaction_id: str) -> str:
    """Return an id as an argument of a command that a shell runs. Its producer has chosen it."""
    return f"{'-- ' if transaction_id.startswith('-') else ''}{shlex.quote(transaction_id)}"


def by_whom() -> str:
    """Return who runs this command: `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # The user of a container may have no name.
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
