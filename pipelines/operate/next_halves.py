"""Makes the halves that a replay sends, of the rows of `discarded`, and names those that it cannot send."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pyarrow as pa
from pydantic import ValidationError
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F

from halfway.pipelines.operate.earlier_replays import Candidates, Identity
from halfway.pipelines.storage.delta_tables import read_table
from halfway.schemas.errors import HalfwayError, SettingsError
from halfway.schemas.headers import HeaderList
from halfway.schemas.records import HalfHeaders, RecordError, encode_key
from halfway.schemas.settings import KafkaSettings, Settings, StorageSettings
from halfway.schemas.tables import Table

_PARTITION_BYTES = 32 * 1024 * 1024


class NextHalf(NamedTuple):
    """The next incarnation of a discarded message."""

    identity: Identity
    body: bytes
    discarded_ms: int
    headers_at: Callable[[int], HeaderList]
    """Makes its headers, signed at a time in ms if its group has a key."""

    def at(self, now_ms: int) -> tuple[int, HeaderList]:
        """Return its time, which is not before the discard, as a later replay looks for it, and its headers."""
        at_ms = max(now_ms, self.discarded_ms)
        return at_ms, self.headers_at(at_ms)


@dataclass(frozen=True)
class NotReplayedMessage:
    """A message that a replay has not resent, and why."""

    transaction_id: str
    producer_group: str
    why: str


class NotReplayed:
    """The messages that a replay has named as not resent, or as resent in vain."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """Store who gets a sentence about each."""
        self.say = say
        self.messages: list[NotReplayedMessage] = []

    def add(self, identity: Identity, why: str, *, in_vain: bool = False) -> None:
        """Name a message, which was sent in vain or not at all."""
        self.say(f"{identity.transaction_id} {'was sent in vain' if in_vain else 'is not sent'}: {why}")
        self.messages.append(NotReplayedMessage(*identity, f"sent in vain: {why}" if in_vain else why))


def next_halves(spark: SparkSession, settings: Settings, candidates: Candidates, not_replayed: NotReplayed) -> Iterator[NextHalf]:
    """Yield the halves to send, and name those that cannot be sent: the others do not wait for one.

    `candidates` are those still to come: each is taken out when its row is read. One that the caller takes out
    meanwhile is left out.
    """
    rows = iter(_rows(spark, settings.storage, candidates))
    # Once none is to come, the rest of the table is not waited for.
    while candidates and (row := next(rows, None)) is not None:
        identity = Identity(row["transaction_id"], row["producer_group"])
        discarded = candidates.pop(identity, None)
        if discarded is None:
            continue
        if row["body"] is None:
            not_replayed.add(identity, "its body was erased (`halfway erase`)")
            continue
        headers_at = partial(next_headers, row, settings.kafka)
        try:
            headers_at(discarded.discarded_ms)
        except HalfwayError as error:
            # The incarnation may be the largest one, the headers that it has in addition too much, or the key of the
            # group may be missing.
            not_replayed.add(identity, str(error))
            continue
        if len(row["body"]) > settings.resolution.max_body_bytes:
            # The job would quarantine the half.
            not_replayed.add(identity, f"its body has {len(row['body'])} bytes, over resolution.max_body_bytes: raise it")
            continue
        yield NextHalf(identity, bytes(row["body"]), discarded.discarded_ms, headers_at)


def _rows(spark: SparkSession, storage: StorageSettings, candidates: Candidates) -> Iterator[Row]:
    """Stream the rows of `discarded` to send, with their bodies, one partition at a time."""
    spark.conf.set("spark.sql.files.maxPartitionBytes", str(_PARTITION_BYTES))
    pointers = pa.table(
        {
            "transaction_id": pa.array([identity.transaction_id for identity in candidates], pa.string()),
            "producer_group": pa.array([identity.producer_group for identity in candidates], pa.string()),
            "incarnation": pa.array([row.incarnation for row in candidates.values()], pa.int32()),
            "half_partition": pa.array([row.half_partition for row in candidates.values()], pa.int32()),
            "half_offset": pa.array([row.half_offset for row in candidates.values()], pa.int64()),
        }
    )
    chosen = F.broadcast(spark.createDataFrame(pointers))
    rows = read_table(spark, storage, Table.DISCARDED).join(chosen, pointers.column_names)
    names = ("transaction_id", "topic", "queue_id", "tags", "keys", "body", "properties", "producer_group", "incarnation")
    return rows.select(*names, F.unix_millis("born_at").alias("born_at_ms")).toLocalIterator()


def next_headers(row: Row, kafka: KafkaSettings, at_ms: int) -> HeaderList:
    """Return the headers of a discarded message's next incarnation. They keep all but an immunity.

    A half of before 1970, on a topic with CreateTime, had none: no header can say its time.

    Raises:
        RecordError: the headers break the contract, such as an incarnation above the largest one.
        SettingsError: signing is required, and there is no key for the group, or it may not send to the topic any more.
    """
    try:
        headers = HalfHeaders(
            real_topic=row["topic"],
            producer_group=row["producer_group"],
            queue_id=row["queue_id"],
            tags=row["tags"],
            keys=row["keys"],
            born_at_ms=row["born_at_ms"] if (row["born_at_ms"] or 0) >= 0 else None,
            incarnation=row["incarnation"] + 1,
            properties=row["properties"] or {},
        )
    except ValidationError as error:
        raise RecordError.from_validation(error) from None
    keyring = kafka.signing.keyring_of(row["producer_group"])
    if keyring is not None and (problem := keyring.topic_problem(row["producer_group"], row["topic"])):
        raise SettingsError(f"{problem}, says kafka.signing.topics")
    key, body = encode_key(row["transaction_id"]), bytes(row["body"])
    return headers.signed(key, body, kafka.half_topic, keyring, at_ms).to_headers()
