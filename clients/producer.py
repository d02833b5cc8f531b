"""The transactional producer (design §7): a half, the local transaction, an op with what became of it."""

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, cast

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from clients.checks import CheckAnswerer, librdkafka_config
from clients.listener import Answer, TransactionListener, ask, remark_of
from clients.message import CheckRequest, HalfMessage, SendResult, refuse_reserved
from schemas.errors import ProducerClosedError, SendError
from schemas.headers import RECORD_OVERHEAD_BYTES, LocalTransactionState
from schemas.messages import OpHeaders, Record, encode_key
from schemas.settings import KafkaSettings

log = logging.getLogger(__name__)

DEFAULT_MAX_BODY_BYTES = 4 * 1024 * 1024
_BUFFER_KBYTES = 256 * 1024
_POLL_S = 0.1
_FULL_QUEUE_WAIT_S = 0.05
_REPORT_GRACE_S = 10.0
_SURELY_NOT_STORED = frozenset(
    (
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.INVALID_REQUIRED_ACKS,
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.POLICY_VIOLATION,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
    )
)
"""Refusals before anything is appended. After every other failure the half may lie in the topic, and a ROLLBACK is sent."""


class _Outbox:
    """librdkafka's producer, and the thread that serves its delivery reports."""

    def __init__(self, config: Mapping[str, Any], send_timeout_ms: int) -> None:
        self._producer = Producer(dict(config))
        self._send_timeout_s = send_timeout_ms / 1000
        self._stopping = threading.Event()
        self._room, self._waiting = threading.Condition(), 0
        self._poller = threading.Thread(target=self._poll, name="halfway-outbox", daemon=True)
        self._poller.start()

    def put(self, topic: str, record: Record, on_delivery: Callable[[KafkaError | None, Message], None]) -> None:
        """Queue a record, waiting for room in a full queue as long as a send may take.

        Raises:
            SendError: there was no room in time, or librdkafka refuses the record. It is certainly not sent.
        """
        deadline_s = time.monotonic() + self._send_timeout_s
        while True:
            try:
                self._producer.produce(topic, record.value, record.key, headers=list(record.headers), on_delivery=on_delivery)
                return
            except BufferError:
                if time.monotonic() >= deadline_s:
                    raise SendError(
                        f"{len(self._producer)} records wait to be sent and none got through in {self._send_timeout_s:g} s: is Kafka "
                        "in reach? Send from fewer threads, or raise max_in_flight"
                    ) from None
                with self._room:
                    self._waiting += 1
                    self._room.wait(_FULL_QUEUE_WAIT_S)
                    self._waiting -= 1
            except KafkaException as error:
                raise SendError(f"not sent: {error.args[0]}") from error

    def close(self, deadline_s: float | None) -> bool:
        """Deliver what is queued; return whether all of it was, or failed, in time. The thread goes on with what is left."""
        left = self._producer.flush(-1 if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
        self._stopping.set()
        if left == 0:
            self._poller.join()
        return left == 0

    def _poll(self) -> None:
        while not (self._stopping.is_set() and len(self._producer) == 0):
            try:
                served = self._producer.poll(_POLL_S)
                if served and self._waiting:
                    with self._room:
                        self._room.notify(served)
            except Exception:
                log.exception("event=delivery_report_failed")


class _Report:
    """The delivery report of one record, waited for by one thread."""

    __slots__ = ("_arrived", "error", "offset", "partition")

    def __init__(self) -> None:
        # A bare lock, held until the report comes: with an Event 8 threads send a fifth less.
        self._arrived = threading.Lock()
        self._arrived.acquire()
        self.error: KafkaError | None = None
        self.partition = self.offset = -1

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        self.error = error
        self.partition, self.offset = cast(int, message.partition()), cast(int, message.offset())
        self._arrived.release()

    def wait(self, limit_s: float) -> bool:
        return self._arrived.acquire(timeout=limit_s)


class TransactionProducer:
    """Sends transactional messages for one producer group, and answers the checks of its group.

    Threads may share one; make one a process and group. It connects when it is entered, started or first used.

    Args:
        settings: where Kafka is, and how its topics are called.
        group: the producer group. Its instances answer each other's checks: all must know the same durable state.
        listener: runs and checks the local transactions.
        max_in_flight: how many records may wait for their acknowledgement; beyond, a send waits for room.
        send_timeout_ms: after how long an unacknowledged record counts as failed.
        check_threads: how many checks are answered at once.
        max_open_checks: how many checks are read ahead of their answers.
        max_body_bytes: the largest body; not above the job's `resolution.max_body_bytes`, or the job refuses what was sent.
        linger_ms: how long a record waits for others to share its request with. Every sender waits for its half, so that 0 is
            quickest; records that come while requests are under way share the next one all the same.
        session_timeout_ms: after how long Kafka gives a dead instance's checks to another one.

    Raises:
        ValueError: the group is empty, or a number is below 1.
        SettingsError: `settings` names no Kafka.

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
        self._settings, self._group, self._listener = settings, group, listener
        self._max_in_flight, self._send_timeout_ms, self._linger_ms = max_in_flight, send_timeout_ms, linger_ms
        self._max_body_bytes, self._message_bytes = max_body_bytes, max_body_bytes + RECORD_OVERHEAD_BYTES
        self._changed = threading.Condition()
        self._sending = 0
        self._is_closed = False
        self._is_complete: bool | None = None
        self._lost_an_op = False
        self._in_listener = threading.local()
        self._outbox: _Outbox | None = None
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

        A second call, from whichever thread, waits for the first.

        Args:
            timeout_s: when to stop waiting; None waits for the listeners, and for Kafka no longer than `send_timeout_ms`.

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
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            sends_done = self._changed.wait_for(lambda: self._sending == 0, left_s)
        if self._outbox is None:
            return True
        checks_done = self._checks.finish(deadline_s)
        delivered = self._outbox.close(deadline_s) and not self._lost_an_op
        if not (sends_done and checks_done and delivered):
            log.error("event=close_incomplete sends=%s checks=%s delivered=%s", sends_done, checks_done, delivered)
        return sends_done and checks_done and delivered

    def _started(self) -> _Outbox:
        with self._changed:
            if self._is_closed:
                raise ProducerClosedError(f"the producer of group {self._group!r} was closed; make a new one to send")
            if self._outbox is None:
                self._outbox = _Outbox(self._config(), self._send_timeout_ms)
                self._checks.start()
            return self._outbox

    def _config(self) -> dict[str, Any]:
        return {
            **librdkafka_config(self._settings),
            "acks": "all",
            "enable.idempotence": True,
            # Java's default; all that is sent for one id, by whichever client, lies in one partition (design §2).
            "partitioner": "murmur2_random",
            "linger.ms": self._linger_ms,
            "message.timeout.ms": self._send_timeout_ms,
            "message.max.bytes": self._message_bytes,
            "queue.buffering.max.messages": self._max_in_flight,
            "queue.buffering.max.kbytes": max(_BUFFER_KBYTES, 2 * self._message_bytes // 1024),
        }

    @contextlib.contextmanager
    def _send(self) -> Iterator[_Outbox]:
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

    def _store_half(self, outbox: _Outbox, message: HalfMessage, record: Record) -> _Report:
        """Send the half and wait until it is acknowledged; if it may be stored in spite of a failure, roll it back."""
        if len(message.body) > self._max_body_bytes:
            raise SendError(f"the body has {len(message.body)} bytes, max_body_bytes is {self._max_body_bytes}: the half was not sent")
        report = _Report()
        outbox.put(self._settings.half_topic, record, report)
        try:
            arrived = report.wait(self._send_timeout_ms / 1000 + _REPORT_GRACE_S)
        except BaseException:  # Ctrl-C: the local transaction was not run.
            self._roll_back(outbox, message, "interrupted")
            raise
        if arrived and report.error is None:
            return report
        cause = str(report.error) if arrived else "no delivery report"
        text = f"the half of transaction {message.transaction_id!r} failed ({cause}); its local transaction was not run"
        if report.error is not None and report.error.code() in _SURELY_NOT_STORED:
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

    def _end(self, outbox: _Outbox, message: HalfMessage, answer: Answer) -> None:
        """Queue the op. Its loss is no error for the caller: a check asks again."""
        _log_unknown(message, 0, answer)
        headers = OpHeaders(
            action=answer.state, producer_group=self._group, incarnation=message.incarnation, remark=answer.remark
        ).to_headers()

        def log_failure(error: object, _: Message | None = None) -> None:
            if error is not None:
                self._lost_an_op = True
                log.warning("event=op_not_sent transaction_id=%r state=%s error=%s", message.transaction_id, answer.state, error)

        try:
            outbox.put(self._settings.op_topic, Record(encode_key(message.transaction_id), None, headers), log_failure)
        except SendError as error:
            log_failure(error)

    def _roll_back(self, outbox: _Outbox, message: HalfMessage, cause: str) -> None:
        self._end(outbox, message, Answer(LocalTransactionState.ROLLBACK, remark_of(f"the half was not acknowledged: {cause}")))

    def _send_answer(self, request: CheckRequest, answer: Answer, on_delivered: Callable[[KafkaError | None], None]) -> None:
        """Queue the op that answers a check."""
        _log_unknown(request, request.check_times, answer)
        op = OpHeaders(
            action=answer.state,
            producer_group=self._group,
            incarnation=request.incarnation,
            from_check=True,
            check_times=request.check_times,
            remark=answer.remark,
        )
        record = Record(encode_key(request.transaction_id), None, op.to_headers())
        cast(_Outbox, self._outbox).put(self._settings.op_topic, record, lambda error, _: on_delivered(error))


def _log_unknown(message: HalfMessage, check_times: int, answer: Answer) -> None:
    """Log why a listener gave no proper answer; what it was asked about is not logged."""
    if answer.state is LocalTransactionState.UNKNOWN and answer.remark is not None:
        log.warning(
            "event=listener_gave_no_answer transaction_id=%r check=%d error=%s",
            message.transaction_id,
            check_times,
            type(answer.error).__name__ if answer.error else "no_state",
            exc_info=answer.error,
        )
