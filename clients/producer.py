"""The transactional producer (design §7): a half, the local transaction, an op with what became of it."""

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, cast

from confluent_kafka import KafkaError, KafkaException, Message

from halfway.clients.checks import CheckAnswerer
from halfway.clients.kafka.sender import SURELY_NOT_STORED, Outbox, Report
from halfway.clients.listener import Answer, TransactionListener, ask, log_unknown, remark_of
from halfway.clients.messages import CheckRequest, HalfMessage, SendResult, refuse_reserved
from halfway.schemas.errors import ProducerClosedError, SendError
from halfway.schemas.headers import RECORD_OVERHEAD_BYTES, LocalTransactionState
from halfway.schemas.records import OpHeaders, Record, encode_key
from halfway.schemas.settings import KafkaSettings

log = logging.getLogger(__name__)

DEFAULT_MAX_BODY_BYTES = 4 * 1024 * 1024
CLOSE_GRACE_S = 5.0
"""How long `close` waits, beyond `send_timeout_ms`, for Kafka to let go of it."""
_REPORT_GRACE_S = 10.0


class TransactionProducer:
    """Sends transactional messages for one producer group, and answers the checks of its group.

    Threads may share one; make one a process and group. It connects when it is entered, started or first used.

    Args:
        settings: where Kafka is, and how its topics are called.
        group: the producer group. Its instances answer each other's checks: all must know the same durable state.
        listener: runs and checks the local transactions.
        max_in_flight: how many records may wait for their acknowledgement; beyond, a send waits for room, up to `send_timeout_ms`.
        send_timeout_ms: after how long an unacknowledged record counts as failed.
        check_threads: how many checks are answered at once.
        max_open_checks: how many checks are read ahead of their answers.
        max_body_bytes: the largest body; not above the job's `resolution.max_body_bytes`, or the job refuses what was sent.
        linger_ms: how long a record waits for others to share its request with. Every sender waits for its half, so that 0 is
            quickest; records that come while requests are under way share the next one all the same. From a thousand transactions/s
            on, 2 to 5 take a third to a half off the broker's work.
        session_timeout_ms: after how long Kafka gives a dead instance's checks to another one.

    Raises:
        ValueError: the group is empty, or a number is below 1.
        SettingsError: `settings` names no Kafka, or asks for signed ops and has no key for the group.

    Example:
        with TransactionProducer(settings.kafka, "order-service", Orders()) as producer:
            result = producer.send_in_transaction("orders", body, keys="order-17", arg=order)
    """

    def __init__(
        self,
        settings: KafkaSettings,
        group: str,
        listener: TransactionListener,
        *,
        max_in_flight: int = 10_000,
        send_timeout_ms: int = 30_000,
        check_threads: int = 1,
        max_open_checks: int = 256,
        max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
        linger_ms: int = 0,
        session_timeout_ms: int = 10_000,
    ) -> None:
        """Take note of everything; nothing is sent or connected."""
        if min(max_in_flight, send_timeout_ms, check_threads, max_open_checks, max_body_bytes, session_timeout_ms) < 1 or linger_ms < 0:
            raise ValueError("sizes, threads and time-outs are at least 1, linger_ms at least 0")
        HalfMessage(transaction_id="-", topic="-", body=b"", producer_group=group).headers()
        settings.servers()
        self._keyring = settings.signing.keyring_of(group)
        self._settings, self._group, self._listener = settings, group, listener
        self._max_in_flight, self._send_timeout_ms, self._linger_ms = max_in_flight, send_timeout_ms, linger_ms
        self._max_body_bytes, self._message_bytes = max_body_bytes, max_body_bytes + RECORD_OVERHEAD_BYTES
        self._changed = threading.Condition()
        self._sending = 0
        self._is_closed = False
        self._is_complete: bool | None = None
        self._lost_an_op = False
        self._in_listener = threading.local()
        self._outbox: Outbox | None = None
        self._checks = CheckAnswerer(
            settings,
            group,
            listener,
            self._send_answer,
            threads=check_threads,
            max_open=max_open_checks,
            session_timeout_ms=session_timeout_ms,
            message_bytes=self._message_bytes,
        )

    def start(self) -> None:
        """Connect, in the background, and start to answer checks; a second call does nothing.

        Raises:
            ProducerClosedError: it was closed.
        """
        self._started()

    def send_in_transaction(
        self,
        topic: str,
        body: bytes,
        *,
        transaction_id: str | None = None,
        tags: str | None = None,
        keys: str | None = None,
        properties: Mapping[str, str] | None = None,
        queue_id: int = 0,
        immunity_s: int | None = None,
        incarnation: int = 0,
        arg: Any = None,
    ) -> SendResult:
        """Send a message that becomes readable if, and only if, the local transaction commits.

        The half is stored by all replicas in sync, then the listener runs in this thread, then what it says is queued for Kafka.
        Should that be lost, or be UNKNOWN, the listener is asked by a check.

        Args:
            topic: where the message goes once committed.
            body: opaque bytes.
            transaction_id: 1 to 255 bytes of UTF-8; a random one if None. Never use one again, also not after a SendError: its
                ROLLBACK would settle the second half too (R2).
            tags: RocketMQ's tags.
            keys: RocketMQ's keys.
            properties: the user's own headers.
            queue_id: handed on with the message.
            immunity_s: how many seconds to wait before the first check, instead of the job's `transactionTimeOut`.
            incarnation: above 0 to send anew what was discarded.
            arg: handed to `execute_local_transaction`.

        Returns:
            Where the half lies, and what the listener said.

        Raises:
            ValueError: an argument is not what design §2 allows; nothing was sent.
            QueueFullError: `max_in_flight` records wait, and none got through in `send_timeout_ms`. Nothing was sent or run: send less,
                or later; the id may be used again.
            SendError: the half could not be stored, or that is not known. The local transaction was not run.
            ProducerClosedError: the producer was closed.
        """
        refuse_reserved(properties or {})
        message = HalfMessage(
            transaction_id=uuid.uuid4().hex if transaction_id is None else transaction_id,
            topic=topic,
            body=body if isinstance(body, bytes) else bytes(memoryview(body)),
            producer_group=self._group,
            queue_id=queue_id,
            tags=tags,
            keys=keys,
            properties=dict(properties or {}),
            immunity_s=immunity_s,
            born_at_ms=time.time_ns() // 1_000_000,
            incarnation=incarnation,
        )
        record = message.to_record()
        with self._send() as outbox:
            report = self._store_half(outbox, message, record)
            answer = self._execute(message, arg)
            self._end(outbox, message, answer)
        return SendResult(message.transaction_id, report.partition, report.offset, answer.state)

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuse further sends, wait for those under way and for running checks, deliver everything, and disconnect.

        A second call, from whichever thread, waits for the first. Where Kafka is gone, or librdkafka hangs, what is left goes on in
        threads that do not keep the process from ending.

        Args:
            timeout_s: when to stop waiting, whatever is under way. None waits for listeners as long as they run: they are the
                application's; and after them for Kafka no longer than `send_timeout_ms` and 5 s.

        Returns:
            Whether all of it was done, and in time. What was not is asked for by checks.

        Raises:
            RuntimeError: a listener calls it, which would wait for itself.
        """
        if getattr(self._in_listener, "depth", 0) or self._checks.is_answering_here():
            raise RuntimeError("close() cannot be called by a listener: it waits until the listener is done")
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            if self._is_closed:
                self._changed.wait_for(lambda: self._is_complete is not None, timeout_s)
                return bool(self._is_complete)
            self._is_closed = True
        is_complete = False
        try:
            is_complete = self._finish(deadline_s)
        finally:
            with self._changed:
                self._is_complete = is_complete
                self._changed.notify_all()
        return is_complete

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close, waiting as long as it takes."""
        self.close()

    def _finish(self, deadline_s: float | None) -> bool:
        """Let sends end, then checks, then what both of them queued be delivered."""
        self._lost_an_op = False
        with self._changed:
            sends_done = self._changed.wait_for(
                lambda: self._sending == 0, None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            )
        if self._outbox is None:
            return True
        listeners_done = self._checks.stop(deadline_s)
        limit_s = time.monotonic() + self._send_timeout_ms / 1000 + CLOSE_GRACE_S
        limit_s = limit_s if deadline_s is None else min(limit_s, deadline_s)
        has_left = self._checks.leave(limit_s)
        delivered = self._outbox.close(limit_s) and not self._lost_an_op
        is_complete = sends_done and listeners_done and has_left and delivered
        if not is_complete:
            log.error("event=close_incomplete sends=%s checks=%s delivered=%s", sends_done, listeners_done and has_left, delivered)
        return is_complete

    def _started(self) -> Outbox:
        with self._changed:
            if self._is_closed:
                raise ProducerClosedError(f"the producer of group {self._group!r} was closed; make a new one to send")
            if self._outbox is None:
                self._outbox = Outbox(
                    self._settings,
                    max_in_flight=self._max_in_flight,
                    send_timeout_ms=self._send_timeout_ms,
                    linger_ms=self._linger_ms,
                    message_bytes=self._message_bytes,
                )
                self._checks.start()
            return self._outbox

    @contextlib.contextmanager
    def _send(self) -> Iterator[Outbox]:
        """Count a send, so that `close` can wait for it."""
        with self._changed:
            outbox = self._started()
            self._sending += 1
        try:
            yield outbox
        finally:
            with self._changed:
                self._sending -= 1
                if self._sending == 0:
                    self._changed.notify_all()

    def _store_half(self, outbox: Outbox, message: HalfMessage, record: Record) -> Report:
        """Send the half and wait until it is acknowledged; if it may be stored in spite of a failure, roll it back."""
        if len(message.body) > self._max_body_bytes:
            raise SendError(f"the body has {len(message.body)} bytes, max_body_bytes is {self._max_body_bytes}: the half was not sent")
        report = Report()
        outbox.put(self._settings.half_topic, record, report)
        try:
            arrived = report.wait(self._send_timeout_ms / 1000 + _REPORT_GRACE_S)
        except BaseException:  # Ctrl-C: the local transaction was not run.
            self._roll_back(outbox, message, "interrupted")
            raise
        if arrived and report.error is None:
            return report
        cause = outbox.cause(self._settings.half_topic, report.error) if arrived and report.error is not None else "no delivery report"
        text = f"the half of transaction {message.transaction_id!r} failed ({cause}); its local transaction was not run"
        if report.error is not None and report.error.code() in SURELY_NOT_STORED:
            raise SendError(text) from KafkaException(report.error)
        self._roll_back(outbox, message, cause)
        raise SendError(f"{text}. It may be stored, so a ROLLBACK was sent: use a new transaction id to try again") from (
            KafkaException(report.error) if report.error is not None else None
        )

    def _execute(self, message: HalfMessage, arg: object) -> Answer:
        depth = getattr(self._in_listener, "depth", 0)
        self._in_listener.depth = depth + 1
        try:
            return ask(self._listener.execute_local_transaction, message, arg)
        finally:
            self._in_listener.depth = depth

    def _end(self, outbox: Outbox, message: HalfMessage, answer: Answer) -> None:
        """Queue the op. Its loss is no error for the caller: a check asks again."""
        log_unknown(message, 0, answer)
        op = OpHeaders(action=answer.state, producer_group=self._group, incarnation=message.incarnation, remark=answer.remark)
        headers = op.signed(message.transaction_id, self._keyring).to_headers()

        def log_failure(error: KafkaError | SendError | None, _: Message | None = None) -> None:
            if error is not None:
                self._lost_an_op = True
                cause = outbox.cause(self._settings.op_topic, error) if isinstance(error, KafkaError) else error
                log.warning("event=op_not_sent transaction_id=%r state=%s error=%s", message.transaction_id, answer.state, cause)

        try:
            outbox.put(self._settings.op_topic, Record(encode_key(message.transaction_id), None, headers), log_failure)
        except SendError as error:
            log_failure(error)

    def _roll_back(self, outbox: Outbox, message: HalfMessage, cause: str) -> None:
        self._end(outbox, message, Answer(LocalTransactionState.ROLLBACK, remark_of(f"the half was not acknowledged: {cause}")))

    def _send_answer(self, request: CheckRequest, answer: Answer, on_delivered: Callable[[KafkaError | None], None]) -> None:
        """Queue the op that answers a check."""
        log_unknown(request, request.check_times, answer)
        op = OpHeaders(
            action=answer.state,
            producer_group=self._group,
            incarnation=request.incarnation,
            from_check=True,
            check_times=request.check_times,
            remark=answer.remark,
        )
        record = Record(encode_key(request.transaction_id), None, op.signed(request.transaction_id, self._keyring).to_headers())
        cast(Outbox, self._outbox).put(self._settings.op_topic, record, lambda error, _: on_delivered(error))
