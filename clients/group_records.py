"""Sends the halves and ops of one producer group, and decides what a failed half means (docs/contract.md)."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, Unpack

from confluent_kafka import KafkaError, KafkaException, Message

from halfway.clients.kafka.sender import NOT_STORED, DeliveryReport, OnDelivery, Sender
from halfway.clients.listener import Answer, log_unknown, remark_of
from halfway.clients.messages import CheckRequest, HalfMessage, MessageFields, SendResult, refuse_reserved
from halfway.clients.telemetry import OpSpan, telemetry_of
from halfway.clients.verdicts import KnownVerdicts
from halfway.schemas.errors import SendError
from halfway.schemas.headers import SIGNED_WINDOW_MS, LocalTransactionState
from halfway.schemas.records import OpHeaders, Record, encode_key
from halfway.schemas.settings import KafkaSettings

log = logging.getLogger(__name__)

_REPORT_GRACE_S = 10.0
_QUICKLY_HASHED_BYTES = 256 * 1024
ANOTHER_ID = ": send it again under another transaction id"
"""What to do about a half in doubt whose id the caller has chosen. The ROLLBACK would settle a second half too (R2)."""


class Sends(Protocol):
    """What queues records: a `Sender`, or a `LoopSender`, which waits for nothing."""

    def send(self, topic: str, record: Record, on_delivery: OnDelivery, /) -> None:
        """Queue a record, or raise a SendError. `on_delivery` learns what became of it."""

    def explain(self, topic: str, error: KafkaError, /) -> str:
        """Return why a record for `topic` was not delivered."""


class Report(Protocol):
    """What Kafka has said of one record."""

    has_arrived: bool
    error: KafkaError | None
    partition: int
    offset: int
    at_ms: int


class StoredHalf(NamedTuple):
    """A half that all in-sync replicas have, as it was signed."""

    message: HalfMessage
    partition: int
    offset: int
    at_ms: int

    def result(self, state: LocalTransactionState) -> SendResult:
        """Return the result of its send."""
        return SendResult(self.message.transaction_id, self.partition, self.offset, self.at_ms, state)


class GroupRecords:
    """The halves and ops of one producer group. Threads may share it.

    Args:
        settings: the names of the topics, and the group's key.
        group: the producer group.
        send_timeout_ms: when an unacknowledged record fails.
        max_body_bytes: the size of the largest body.

    Raises:
        SettingsError: `settings` requires signatures and has no key for the group.
    """

    def __init__(self, settings: KafkaSettings, group: str, *, send_timeout_ms: int, max_body_bytes: int) -> None:
        """Store the configuration. Does not connect."""
        self._keyring = settings.signing.keyring_of(group)
        self.group, self._max_body_bytes = group, max_body_bytes
        self.half_topic, self._op_topic = settings.half_topic, settings.op_topic
        self.report_limit_s = send_timeout_ms / 1000 + _REPORT_GRACE_S
        """When a report that has not arrived will not arrive any more."""
        self.verdicts = KnownVerdicts()
        self.telemetry = telemetry_of(settings, group)
        self.lost_an_op = False
        """True once an op was not sent or not acknowledged."""

    def message(
        self,
        transaction_id: str,
        topic: str,
        body: bytes,
        properties: Mapping[str, str] | None,
        born_at_ms: int,
        **fields: Unpack[MessageFields],
    ) -> HalfMessage:
        """Return the half of a send, in the caller's trace. `HalfMessage.headers` validates it.

        Raises:
            ValueError: a property has a name that it must not have.
        """
        refuse_reserved(properties or {})
        return HalfMessage(
            transaction_id=transaction_id,
            topic=topic,
            body=body,
            producer_group=self.group,
            properties={**self.telemetry.headers(), **(properties or {})},
            born_at_ms=born_at_ms,
            **fields,
        )

    def verify(self, message: HalfMessage) -> None:
        """Refuse a message that could not be sent.

        Raises:
            RecordError: a field breaks the contract (docs/contract.md). It is a ValueError too.
            SendError: the body is too large.
        """
        self._verify_body(message)
        message.to_record()

    def _verify_body(self, message: HalfMessage) -> None:
        if len(message.body) > self._max_body_bytes:
            what = f"its body has {len(message.body)} bytes, and the producer's argument max_body_bytes is {self._max_body_bytes}"
            raise SendError(f"the half was not sent: {what}")

    def to_send(self, messages: Sequence[HalfMessage]) -> tuple[list[HalfMessage], list[Record]]:
        """Return halves, signed now if the group has a key, and their records. Kafka must get them soon (R14).

        Raises:
            RecordError: a field breaks the contract (docs/contract.md). It is a ValueError too.
            SendError: a body is too large.
        """
        for message in messages:
            self._verify_body(message)
        if self._keyring is not None:
            now_ms = time.time_ns() // 1_000_000
            messages = [message.signed(self.half_topic, self._keyring, now_ms) for message in messages]
        return list(messages), [message.to_record() for message in messages]

    def signs_long(self, messages: Sequence[HalfMessage]) -> bool:
        """Return True if `to_send` takes milliseconds, because large bodies are hashed."""
        return self._keyring is not None and sum(len(message.body) for message in messages) > _QUICKLY_HASHED_BYTES

    def store_halves(self, sender: Sender, messages: Sequence[HalfMessage], consequence: str, advice: str = "") -> list[StoredHalf]:
        """Sign halves, send them, and wait until all in-sync replicas have all of them.

        If one fails, those that are stored, or may be, are rolled back.

        Args:
            sender: the connection.
            messages: the halves, of one local transaction.
            consequence: what a failure means for the local transaction, for the error.
            advice: what to do if a half that failed may be stored, for the error.

        Returns:
            The halves as they are stored.

        Raises:
            ValueError: a field breaks the contract (docs/contract.md). Nothing was sent.
            QueueFullError: the queue stayed full.
            SendError: Kafka has not stored a half, or has not confirmed it.
        """
        messages, to_send = self.to_send(messages)
        reports: list[DeliveryReport] = []
        try:
            for record in to_send:
                report = DeliveryReport()
                sender.send(self.half_topic, record, report)
                reports.append(report)
            deadline_s = time.monotonic() + self.report_limit_s
            for report in reports:
                report.wait(max(0.0, deadline_s - time.monotonic()))
        except BaseException as error:  # Such as Ctrl-C, or a full queue. The local transaction does not commit.
            self.interrupted(sender, messages[: len(reports)], error)
            raise
        return self.confirmed(sender, messages, reports, consequence, advice)

    def interrupted(self, sender: Sends, messages: Sequence[HalfMessage], error: BaseException) -> None:
        """Roll back halves that were queued when an error, a signal or a cancellation came."""
        cause = str(error) if isinstance(error, SendError) else "the send was interrupted"
        self.roll_back(sender, messages, f"the half was not acknowledged: {cause}")

    def confirmed(
        self, sender: Sends, messages: Sequence[HalfMessage], reports: Sequence[Report], consequence: str, advice: str
    ) -> list[StoredHalf]:
        """Return the halves that are stored. If one has failed, roll back those that are stored, or may be.

        Args:
            sender: the connection.
            messages: the halves, of one local transaction.
            reports: the report of each.
            consequence: what a failure means for the local transaction, for the error.
            advice: what to do if a half that failed may be stored, for the error.

        Raises:
            SendError: Kafka has not stored a half, or has not confirmed it.
        """
        failures = [
            (message, report.error)
            for message, report in zip(messages, reports, strict=True)
            if not report.has_arrived or report.error is not None
        ]
        if failures:
            raise self._failed(sender, messages, failures, consequence, advice)
        self._refuse_other_clock(sender, messages, reports, consequence)
        return [
            StoredHalf(message, report.partition, report.offset, report.at_ms) for message, report in zip(messages, reports, strict=True)
        ]

    def _refuse_other_clock(self, sender: Sends, messages: Sequence[HalfMessage], reports: Sequence[Report], consequence: str) -> None:
        """Refuse halves that the job will refuse: Kafka has stored them too long before or after they were signed."""
        for message, report in zip(messages, reports, strict=True):
            if message.signed_at_ms is not None and abs(message.signed_at_ms - report.at_ms) > SIGNED_WINDOW_MS:
                cause = f"Kafka stored it {report.at_ms - message.signed_at_ms} ms after it was signed, at most {SIGNED_WINDOW_MS}"
                self.roll_back(sender, messages, f"the half is not valid: {cause}")
                what = "set the clocks of this machine and the brokers right, and send_timeout_ms below 5 min"
                raise SendError(f"the half of transaction {message.transaction_id!r} is not valid ({cause}); {consequence}: {what}")

    def _failed(
        self,
        sender: Sends,
        messages: Sequence[HalfMessage],
        failures: Sequence[tuple[HalfMessage, KafkaError | None]],
        consequence: str,
        advice: str,
    ) -> SendError:
        """Roll back what may be stored, and return the error for the first half that failed."""
        errors = {message.transaction_id: error for message, error in failures}
        message, error = failures[0]
        cause = sender.explain(self.half_topic, error) if error is not None else "no delivery report"
        text = f"the half of transaction {message.transaction_id!r} failed ({cause}); {consequence}"
        maybe_stored = [found for found in messages if not _is_refused(errors.get(found.transaction_id))]
        self.roll_back(sender, maybe_stored, f"the half was not acknowledged: {cause}")
        if message in maybe_stored:
            text += f". The half may be stored, so a ROLLBACK is queued{advice}"
        failure = SendError(text)
        failure.__cause__ = KafkaException(error) if error is not None else None
        return failure

    def send_op(self, sender: Sends, message: HalfMessage, answer: Answer) -> SendError | None:
        """Queue the op, or return why it is not queued. If it is lost, the caller gets no error: a check asks again."""
        span, record = self._op(message, answer)

        def delivered(error: KafkaError | None, _: Message) -> None:
            span.end(error)
            if error is not None:
                self._note_lost(message, answer, sender.explain(self._op_topic, error))

        try:
            sender.send(self._op_topic, record, delivered)
        except SendError as error:
            span.end(error)
            self._note_lost(message, answer, str(error))
            return error
        return None

    def _note_lost(self, message: HalfMessage, answer: Answer, cause: str) -> None:
        self.lost_an_op = True
        log.warning("event=op_not_sent transaction_id=%r state=%s error=%r", message.transaction_id, answer.state, cause)

    def settle(self, sender: Sends, messages: Sequence[HalfMessage], answer: Answer) -> None:
        """Queue the same op for each message of a local transaction.

        Each may wait `send_timeout_ms` for room in the queue, and the database's locks may be held: once one could not
        be queued, the others are not tried, and checks ask for them.
        """
        failure: SendError | None = None
        for message in messages:
            self.verdicts.note(message, answer.state)
            if failure is None:
                failure = self.send_op(sender, message, answer)
            else:
                self._note_lost(message, answer, str(failure))

    def roll_back(self, sender: Sends, messages: Sequence[HalfMessage], why: str) -> None:
        """Queue a ROLLBACK of each. Their local transaction has not committed, and never will."""
        self.settle(sender, messages, Answer(LocalTransactionState.ROLLBACK, remark_of(why)))

    def send_answer(self, sender: Sends, request: CheckRequest, answer: Answer, on_delivered: Callable[[KafkaError | None], None]) -> None:
        """Queue the op that answers a check.

        Raises:
            SendError: it cannot be queued.
        """
        self.telemetry.answered(answer)
        span, record = self._op(request, answer, request.check_times)

        def delivered(error: KafkaError | None, _: Message) -> None:
            span.end(error)
            on_delivered(error)

        try:
            sender.send(self._op_topic, record, delivered)
        except SendError as error:
            span.end(error)
            raise

    def _op(self, message: HalfMessage, answer: Answer, check_times: int | None = None) -> tuple[OpSpan, Record]:
        """Return an op's span, which has begun, and its record. With `check_times` it answers that check."""
        log_unknown(message, check_times or 0, answer)
        span = self.telemetry.op(message, answer.state)
        op = OpHeaders(
            action=answer.state,
            producer_group=self.group,
            incarnation=message.incarnation,
            from_check=None if check_times is None else True,
            check_times=check_times,
            remark=answer.remark,
            half_signature=message.signature,
            **span.headers,
        )
        headers = op.signed(message.transaction_id, self._op_topic, self._keyring).to_headers()
        return span, Record(encode_key(message.transaction_id), None, headers)


def _is_refused(error: KafkaError | None) -> bool:
    """Return True if Kafka has certainly not stored a record."""
    return error is not None and error.code() in NOT_STORED
