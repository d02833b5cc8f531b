"""Sends the traffic of `halfway demo` with the real client, and defines its expected outcome.

Topic, tags, keys and the outcome by index modulo 3 are those of RocketMQ's example TransactionProducer.
"""

import secrets
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from types import TracebackType
from typing import NamedTuple, Self

from confluent_kafka import Message

from halfway.clients.messages import CheckRequest, HalfMessage
from halfway.clients.producer import TransactionProducer
from halfway.pipelines.kafka.writer import RecordWriter
from halfway.schemas.headers import DELAY_HEADERS, LocalTransactionState
from halfway.schemas.outcomes import Reason
from halfway.schemas.records import HalfHeaders, OpHeaders, encode_key
from halfway.schemas.settings import Settings

TOPIC = "TopicTest1234"
TAGS = ("TagA", "TagB", "TagC", "TagD", "TagE")
ORDERS_GROUP = "demo-orders"
SILENT_GROUP = "demo-silent"
STRANGER_GROUP = "demo-stranger"
SILENT_MESSAGES = 2
_EVERY_BYTE = bytes(range(256))
_LOCAL_OUTCOMES = (LocalTransactionState.UNKNOWN, LocalTransactionState.COMMIT, LocalTransactionState.ROLLBACK)
_CLOSE_LIMIT_S = 15.0


class TransactionEnd(StrEnum):
    """How a transaction ends."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"
    DISCARDED = "discarded"


@dataclass(frozen=True)
class DemoCounts:
    """The outcome of one demo, found or expected: numbers of transactions, and of records for `quarantined`."""

    committed: int = 0
    rolled_back: int = 0
    checked: int = 0
    """Transactions with at least one check request, however they ended."""
    discarded: int = 0
    quarantined: int = 0
    pending: int = 0


class PlannedTransaction(NamedTuple):
    """A transaction to send. `outcome` is the first answer of its local transaction."""

    transaction_id: str
    body: bytes
    tags: str
    keys: str
    group: str = ORDERS_GROUP
    outcome: LocalTransactionState = LocalTransactionState.UNKNOWN
    end: TransactionEnd = TransactionEnd.COMMITTED


class RecordPosition(NamedTuple):
    """The position of a record in Kafka."""

    topic: str
    partition: int
    offset: int


class OrderListener:
    """Derives answers from the transaction's id, so that any instance of the group, also a later demo's, is right."""

    def execute_local_transaction(self, message: HalfMessage, arg: PlannedTransaction) -> LocalTransactionState:  # noqa: ARG002
        """Return the planned outcome. The job asks about UNKNOWN later."""
        return arg.outcome

    def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState:
        """Return how the local transaction ended. A transaction that was unknown has committed by now."""
        index = message.transaction_id.rpartition("-")[2]
        is_rolled_back = index.isdecimal() and _local_outcome(int(index)) is LocalTransactionState.ROLLBACK
        return LocalTransactionState.ROLLBACK if is_rolled_back else LocalTransactionState.COMMIT


class SilentListener:
    """Answers UNKNOWN to everything."""

    def execute_local_transaction(self, message: HalfMessage, arg: object) -> LocalTransactionState:  # noqa: ARG002
        """Return UNKNOWN."""
        return LocalTransactionState.UNKNOWN

    def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState:  # noqa: ARG002
        """Return UNKNOWN."""
        return LocalTransactionState.UNKNOWN


class Traffic:
    """The traffic of one demo. A thread sends it, and both producers answer checks until the context ends.

    All transaction ids begin with `prefix`, which is unique to the demo, so that topics and tables may hold other data.
    """

    def __init__(self, settings: Settings, messages: int) -> None:
        """Plan `messages` transactions and the special ones. Does not connect."""
        self._settings = settings
        self.prefix = f"demo-{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}-"
        self.stranger_id = f"{self.prefix}stranger"
        self.delayed_id = f"{self.prefix}delayed"
        self.planned = self._plan(messages)
        self.quarantined = (Reason.GROUP_MISMATCH, Reason.DELAY_NOT_SUPPORTED, Reason.MISSING_KEY)
        self.sent = 0
        """How many of `planned` are sent, in its order."""
        self.keyless: RecordPosition | None = None
        """The position of the record without a key, once it is sent."""
        self.failure: Exception | None = None
        self._orders = TransactionProducer(settings.kafka, ORDERS_GROUP, OrderListener())
        self._silent = TransactionProducer(settings.kafka, SILENT_GROUP, SilentListener())
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="demo-traffic", daemon=True)

    def expected(self) -> DemoCounts:
        """Return the outcome that the demo must have."""
        ends = [planned.end for planned in self.planned.values()]
        return DemoCounts(
            committed=ends.count(TransactionEnd.COMMITTED),
            rolled_back=ends.count(TransactionEnd.ROLLED_BACK),
            checked=sum(planned.outcome is LocalTransactionState.UNKNOWN for planned in self.planned.values()),
            discarded=ends.count(TransactionEnd.DISCARDED),
            quarantined=len(self.quarantined),
            pending=0,
        )

    @property
    def is_sent(self) -> bool:
        """True if everything is sent."""
        return self.sent == len(self.planned)

    def __enter__(self) -> Self:
        """Start to send and to answer checks."""
        self._orders.start()
        self._silent.start()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop sending and leave the consumer groups."""
        self._stopping.set()
        for producer in (self._orders, self._silent):
            producer.close(_CLOSE_LIMIT_S)
        self._thread.join(_CLOSE_LIMIT_S)

    def _plan(self, messages: int) -> dict[str, PlannedTransaction]:
        numbered = [
            PlannedTransaction(
                f"{self.prefix}{index}",
                f"Hello Halfway {index}".encode(),
                TAGS[index % len(TAGS)],
                f"KEY{index}",
                outcome=_local_outcome(index),
                end=TransactionEnd.ROLLED_BACK if _local_outcome(index) is LocalTransactionState.ROLLBACK else TransactionEnd.COMMITTED,
            )
            for index in range(messages)
        ]
        stranger = PlannedTransaction(self.stranger_id, _EVERY_BYTE, TAGS[0], "KEY-stranger")
        # The silent ones go last: before they are discarded, the job would ask about a rollback that it has missed.
        silent = [
            PlannedTransaction(
                f"{self.prefix}silent{n}",
                f"Hello silence {n}".encode(),
                TAGS[1],
                f"KEY-silent{n}",
                SILENT_GROUP,
                end=TransactionEnd.DISCARDED,
            )
            for n in range(SILENT_MESSAGES)
        ]
        return {planned.transaction_id: planned for planned in (*numbered, stranger, *silent)}

    def _run(self) -> None:
        try:
            for planned in self.planned.values():
                if self._stopping.is_set():
                    return
                self._send(planned)
        except Exception as error:
            self.failure = error

    def _send(self, planned: PlannedTransaction) -> None:
        producer = self._orders if planned.group == ORDERS_GROUP else self._silent
        producer.send_in_transaction(
            TOPIC, planned.body, transaction_id=planned.transaction_id, tags=planned.tags, keys=planned.keys, arg=planned
        )
        if planned.transaction_id == self.stranger_id:
            self._send_wrong_records()
        self.sent += 1

    def _send_wrong_records(self) -> None:
        """Send what a correct client never sends: another group's verdict, a delayed half, a record without a key."""
        kafka, writer = self._settings.kafka, RecordWriter(self._settings.kafka)
        verdict = OpHeaders(action=LocalTransactionState.ROLLBACK, producer_group=STRANGER_GROUP)
        half = HalfHeaders(real_topic=TOPIC, producer_group=ORDERS_GROUP)
        writer.put(kafka.op_topic, encode_key(self.stranger_id), None, [*verdict.to_headers()])
        writer.put(kafka.half_topic, encode_key(self.delayed_id), b"Hello later", [*half.to_headers(), (DELAY_HEADERS[0], b"3")])
        writer.put(kafka.half_topic, None, b"Hello whoever", [], on_delivered=self._note_keyless)
        writer.flush()

    def _note_keyless(self, record: Message) -> None:
        self.keyless = RecordPosition(self._settings.kafka.half_topic, record.partition() or 0, record.offset() or 0)


def _local_outcome(index: int) -> LocalTransactionState:
    return _LOCAL_OUTCOMES[index % len(_LOCAL_OUTCOMES)]
