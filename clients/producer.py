"""Sends transactional messages (docs/contract.md): the half, the local transaction, the op with its outcome."""

import contextlib
import ctypes
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, cast

from confluent_kafka import KafkaError, KafkaException, Message

from halfway.clients.check_threads import Answers
from halfway.clients.checks import CheckAnswerer
from halfway.clients.kafka.sender import NOT_STORED, DeliveryReport, Sender
from halfway.clients.listener import Answer, TransactionListener, ask, log_unknown, remark_of
from halfway.clients.messages import CheckRequest, HalfMessage, SendResult, refuse_reserved
from halfway.clients.verdicts import KnownVerdicts
from halfway.schemas.errors import ForkedProducerError, ProducerClosedError, SendError
from halfway.schemas.headers import LocalTransactionState
from halfway.schemas.records import OpHeaders, Record, encode_key
from halfway.schemas.settings import KafkaSettings

log = logging.getLogger(__name__)

DEFAULT_MAX_BODY_BYTES = 4 * 1024 * 1024
CLOSE_GRACE_S = 5.0
"""How long `close` waits for Kafka, in addition to `send_timeout_ms`."""
_REPORT_GRACE_S = 10.0


class TransactionProducer:
    """Sends transactional messages for one producer group, and answers the group's checks.

    Threads may share a producer. Make one per process and group. It connects on `start`, on entering `with`, or on the
    first send.

    Args:
        settings: where Kafka is, how to log in, and the names of the topics.
        group: the producer group. Its instances answer each other's checks, so they must share their durable data.
        listener: runs and checks the local transactions.
        max_in_flight: how many records may wait for their acknowledgement. At this number a send waits for room, up to
            `send_timeout_ms`.
        send_timeout_ms: when an unacknowledged record fails.
        check_threads: how many checks are answered at once.
        max_open_checks: how many checks may be read and not yet answered.
        max_body_bytes: the size of the largest body. The job refuses bodies above its `resolution.max_body_bytes`.
        linger_ms: how long a record waits for others to share its request. 0 is the quickest, because each send waits
            for its half. Records that arrive while requests are under way share the next one in any case. From a
            thousand transactions/s on, 2 to 5 save the broker a third to a half of its work.
        session_timeout_ms: when Kafka gives a dead instance's checks to another one.

    Raises:
        ValueError: the group is empty, or a number is too small.
        SettingsError: `settings` names no Kafka, or requires signed ops and has no key for the group.

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
        """Store the configuration. Does not connect."""
        if min(max_in_flight, send_timeout_ms, check_threads, max_open_checks, max_body_bytes, session_timeout_ms) < 1 or linger_ms < 0:
            raise ValueError("sizes, threads and time-outs must be at least 1, linger_ms at least 0")
        HalfMessage(transaction_id="-", topic="-", body=b"", producer_group=group).headers()
        settings.servers()
        self._keyring = settings.signing.keyring_of(group)
        self._settings, self._group, self._listener = settings, group, listener
        self._max_in_flight, self._send_timeout_ms, self._linger_ms = max_in_flight, send_timeout_ms, linger_ms
        self._max_body_bytes = max_body_bytes
        self._verdicts = KnownVerdicts()
        self._pid: int | None = None
        self._changed = threading.Condition()
        self._sending = 0
        self._is_closed = False
        self._is_complete: bool | None = None
        self._lost_an_op = False
        self._in_listener = threading.local()
        self._sender: Sender | None = None
        self._checks = CheckAnswerer(
            settings,
            group,
            Answers(self._look_up, self._send_answer, self._can_send),
            threads=check_threads,
            max_open=max_open_checks,
            session_timeout_ms=session_timeout_ms,
        )

    def start(self) -> None:
        """Connect in the background and start to answer checks. A second call does nothing.

        Raises:
            KafkaUnavailableError: librdkafka rejects the settings, such as a CA file that does not exist.
            ProducerClosedError: the producer is closed, or was started before this process was forked.
        """
        self._start_once()

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

        First all in-sync replicas store the half. Then the listener runs in this thread. Then the op with its answer is
        queued for Kafka. If the answer is UNKNOWN, or the op is lost, a check asks the listener again.

        Args:
            topic: where the message goes once it is committed.
            body: opaque bytes.
            transaction_id: 1 to 255 bytes of UTF-8; a random id if None. Never use an id again, not even after a
                SendError: the ROLLBACK of the first half would settle the second one too (R2).
            tags: RocketMQ's tags.
            keys: RocketMQ's keys.
            properties: the user's own headers.
            queue_id: passed on with the message.
            immunity_s: the seconds before the first check, in place of the job's `transactionTimeOut` (R4).
            incarnation: above 0 to resend a discarded message (R12).
            arg: passed to `execute_local_transaction`.

        Returns:
            The partition and offset of the half, and the listener's answer.

        Raises:
            ValueError: an argument breaks the contract (docs/contract.md). Nothing was sent.
            QueueFullError: the queue of `max_in_flight` records stayed full for `send_timeout_ms`. Nothing was sent and
                the local transaction was not run. The id may be used again.
            SendError: Kafka has not stored the half, or has not confirmed it. The local transaction was not run.
            KafkaUnavailableError: the first send starts the producer, and librdkafka rejects the settings.
            ProducerClosedError: the producer is closed, or was started before this process was forked.
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
        with self._counted_send() as sender:
            report = self._store_half(sender, message, record)
            answer = self._execute(message, arg)
            self._send_op(sender, message, answer)
        return SendResult(message.transaction_id, report.partition, report.offset, answer.state)

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuse new sends, wait for running sends and checks, deliver all queued records, and disconnect.

        A second call, from any thread, waits for the first. If Kafka is gone or librdkafka hangs, the rest goes on in
        daemon threads, which do not keep the process alive. In a process that was forked from the one that started the
        producer, it does nothing.

        Args:
            timeout_s: the longest time to wait. None waits until the application's listeners end, and then for Kafka,
                at most `send_timeout_ms` and 5 s.

        Returns:
            True if all of it was done in time. Otherwise checks ask for the missing outcomes.

        Raises:
            RuntimeError: a listener calls it. It would wait for itself.
        """
        if self._is_the_parents():
            return True
        if getattr(self._in_listener, "depth", 0) or self._checks.is_answering_here():
            raise RuntimeError("close() cannot be called by a listener, because it waits until the listener ends")
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
        """Start the producer."""
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the producer without a time limit."""
        self.close()

    def _finish(self, deadline_s: float | None) -> bool:
        """Wait for the running sends, then for the checks, then deliver the records that both have queued."""
        self._lost_an_op = False
        with self._changed:
            sends_done = self._changed.wait_for(
                lambda: self._sending == 0, None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            )
        if self._sender is None:
            return True
        listeners_done = self._checks.stop(deadline_s)
        limit_s = time.monotonic() + self._send_timeout_ms / 1000 + CLOSE_GRACE_S
        limit_s = limit_s if deadline_s is None else min(limit_s, deadline_s)
        has_left = self._checks.leave(limit_s)
        delivered = self._sender.close(limit_s) and not self._lost_an_op
        is_complete = sends_done and listeners_done and has_left and delivered
        if not is_complete:
            log.error("event=close_incomplete sends=%s checks=%s delivered=%s", sends_done, listeners_done and has_left, delivered)
        return is_complete

    def _is_the_parents(self) -> bool:
        """Return True in a forked process: the threads and connections are the parent's.

        Takes no lock, because another thread of the parent may have held it during the fork.
        """
        return self._pid not in (None, os.getpid())

    def _start_once(self) -> Sender:
        if self._is_the_parents():
            raise ForkedProducerError(
                f"the producer of group {self._group!r} was started by process {self._pid}, from which this one was forked: "
                "make a new one in each process"
            )
        with self._changed:
            if self._is_closed:
                raise ProducerClosedError(f"the producer of group {self._group!r} is closed: make a new one to send")
            if self._sender is None:
                self._sender = Sender(
                    self._settings,
                    max_in_flight=self._max_in_flight,
                    send_timeout_ms=self._send_timeout_ms,
                    linger_ms=self._linger_ms,
                    max_body_bytes=self._max_body_bytes,
                )
                try:
                    self._checks.start()
                except BaseException:
                    self._sender.close(0.0)
                    self._sender = None
                    raise
                self._pid = os.getpid()
                _started.add(self)
            return self._sender

    @contextlib.contextmanager
    def _counted_send(self) -> Iterator[Sender]:
        """Count a running send, so that `close` can wait for it."""
        self._start_once()
        with self._changed:
            sender = self._start_once()  # It may be closed by now.
            self._sending += 1
        try:
            yield sender
        finally:
            with self._changed:
                self._sending -= 1
                if self._sending == 0:
                    self._changed.notify_all()

    def _store_half(self, sender: Sender, message: HalfMessage, record: Record) -> DeliveryReport:
        """Send the half and wait for its acknowledgement. If a failed half may be stored nevertheless, roll it back."""
        if len(message.body) > self._max_body_bytes:
            raise SendError(f"the half was not sent: its body has {len(message.body)} bytes, max_body_bytes is {self._max_body_bytes}")
        report = DeliveryReport()
        sender.send(self._settings.half_topic, record, report)
        try:
            arrived = report.wait(self._send_timeout_ms / 1000 + _REPORT_GRACE_S)
        except BaseException:  # Such as Ctrl-C. The local transaction was not run.
            self._roll_back(sender, message, "the send was interrupted")
            raise
        if arrived and report.error is None:
            return report
        cause = sender.explain(self._settings.half_topic, report.error) if arrived and report.error is not None else "no delivery report"
        text = f"the half of transaction {message.transaction_id!r} failed ({cause}); its local transaction was not run"
        if report.error is not None and report.error.code() in NOT_STORED:
            raise SendError(text) from KafkaException(report.error)
        self._roll_back(sender, message, cause)
        raise SendError(f"{text}. The half may be stored, so a ROLLBACK was sent: try again with a new transaction id") from (
            KafkaException(report.error) if report.error is not None else None
        )

    def _execute(self, message: HalfMessage, arg: object) -> Answer:
        depth = getattr(self._in_listener, "depth", 0)
        self._in_listener.depth = depth + 1
        try:
            answer = ask(self._listener.execute_local_transaction, message, arg)
        finally:
            self._in_listener.depth = depth
        self._verdicts.note(message, answer.state)
        return answer

    def _send_op(self, sender: Sender, message: HalfMessage, answer: Answer) -> None:
        """Queue the op. If it is lost, the caller gets no error: a check asks again."""
        log_unknown(message, 0, answer)
        op = OpHeaders(action=answer.state, producer_group=self._group, incarnation=message.incarnation, remark=answer.remark)
        headers = op.signed(message.transaction_id, self._keyring).to_headers()

        def log_failure(error: KafkaError | SendError | None, _: Message | None = None) -> None:
            if error is not None:
                self._lost_an_op = True
                cause = sender.explain(self._settings.op_topic, error) if isinstance(error, KafkaError) else error
                log.warning("event=op_not_sent transaction_id=%r state=%s error=%s", message.transaction_id, answer.state, cause)

        try:
            sender.send(self._settings.op_topic, Record(encode_key(message.transaction_id), None, headers), log_failure)
        except SendError as error:
            log_failure(error)

    def _roll_back(self, sender: Sender, message: HalfMessage, cause: str) -> None:
        self._verdicts.note(message, LocalTransactionState.ROLLBACK)
        self._send_op(sender, message, Answer(LocalTransactionState.ROLLBACK, remark_of(f"the half was not acknowledged: {cause}")))

    def _can_send(self) -> bool:
        return self._sender is not None and self._sender.works()

    def _look_up(self, request: CheckRequest) -> Answer:
        """Return what is known of a transaction, or else ask the listener."""
        known = self._verdicts.of(request)
        if known is not None:
            return Answer(known)
        # sys.exit() in a listener must not end the thread: later checks wait for it.
        answer = ask(self._listener.check_local_transaction, request, catch=BaseException)
        self._verdicts.note(request, answer.state)
        return answer

    def _send_answer(self, request: CheckRequest, answer: Answer, on_delivered: Callable[[KafkaError | None], None]) -> None:
        """Queue the op that answers a check. Raise if it cannot be queued."""
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
        cast(Sender, self._sender).send(self._settings.op_topic, record, lambda error, _: on_delivered(error))


def _keep_in_child() -> None:
    """Keep the parent's producers alive in a forked process.

    librdkafka's threads are not forked, and its destructor would wait for them, at the latest when the process exits.
    """
    for producer in _started:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(producer))


_started: "weakref.WeakSet[TransactionProducer]" = weakref.WeakSet()
if hasattr(os, "register_at_fork"):  # Windows does not fork.
    os.register_at_fork(after_in_child=_keep_in_child)
