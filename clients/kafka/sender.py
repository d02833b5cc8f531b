"""Sends records to Kafka: librdkafka's idempotent producer behind a bounded queue, and the delivery reports."""

import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from halfway.clients.kafka.client_log import ClientLog
from halfway.clients.kafka.config import PRODUCER_OPTIONS, librdkafka_config
from halfway.clients.kafka.diagnosis import WRONG_LOGIN, alter_topic, missing_right, missing_topics, tls_problem
from halfway.schemas.errors import KafkaUnavailableError, QueueFullError, SendError
from halfway.schemas.records import Record
from halfway.schemas.settings import KafkaSettings

log = logging.getLogger(__name__)

OnDelivery = Callable[[KafkaError | None, Any], None]
"""Called with the error of a record, or None, and with librdkafka's `Message`."""

_BUFFER_KBYTES = 256 * 1024
_POLL_S = 0.1
_FULL_QUEUE_WAIT_S = 0.05
_MAX_RENEWAL_S = 10.0
_PROBE_MS = 500
_NEW_TOPIC_MS = 3_000
"""How long a topic may be unknown before its records fail: it may be made at this moment. librdkafka waits 30 s."""
_NO_TOPIC = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)
NOT_STORED = frozenset(
    (
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.INVALID_REQUIRED_ACKS,
        KafkaError.POLICY_VIOLATION,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._PURGE_QUEUE,
    )
)
"""Errors that occur before a record is appended. After any other error the topic may hold the record."""


class Sender:
    """librdkafka's idempotent producer, and the thread that serves its delivery reports.

    librdkafka declares an idempotent producer dead after an error that it cannot repair, such as a sequence that the
    broker has lost. All its records fail from then on, so the thread replaces it by a new one.

    Args:
        settings: where Kafka is, and how to log in.
        max_in_flight: how many records may wait for their acknowledgement.
        send_timeout_ms: when an unacknowledged record fails, and how long `send` waits for room in a full queue.
        linger_ms: how long a record waits for others to share its request.
        max_body_bytes: the size of the largest body.
        on_served: called by the sender's thread each time that it has looked for delivery reports.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        max_in_flight: int,
        send_timeout_ms: int,
        linger_ms: int,
        max_body_bytes: int,
        on_served: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the producer, which connects in the background.

        Raises:
            KafkaUnavailableError: librdkafka rejects the settings, such as a CA file that does not exist.
        """
        self._settings, self._on_served = settings, on_served
        self._refusal: str | None = None
        self._has_delivered = False
        self._log = ClientLog()
        self._config: dict[str, Any] = {
            **librdkafka_config(settings, self._log),
            **PRODUCER_OPTIONS,
            "error_cb": self._on_error,
            "stats_cb": self._on_statistics,
            "linger.ms": linger_ms,
            "message.timeout.ms": send_timeout_ms,
            # Sooner than a record times out, which would look like a broker that does not answer.
            "topic.metadata.propagation.max.ms": min(_NEW_TOPIC_MS, send_timeout_ms // 2),
            "queue.buffering.max.messages": max_in_flight,
            "queue.buffering.max.kbytes": max(_BUFFER_KBYTES, 2 * max_body_bytes // 1024),
        }
        try:
            self._producer = Producer(self._config)
        except KafkaException as error:
            raise KafkaUnavailableError(f"cannot use Kafka with these settings: {error.args[0].str()}") from None
        self._fatal: KafkaError | None = None
        """Why the last producer died, until a new one works."""
        self._renew_at_s: float | None = None
        self._renewals = 0
        self._dead: list[Producer] = []
        self._send_timeout_s = send_timeout_ms / 1000
        self._stopping = threading.Event()
        self._room, self._waiting = threading.Condition(), 0
        # Not by `join`: before Python 3.13 an exception of a signal handler in it makes a thread seem to have ended.
        self._has_ended = threading.Event()
        threading.Thread(target=self._run, name="halfway-sender", daemon=True).start()

    def send(self, topic: str, record: Record, on_delivery: OnDelivery) -> None:
        """Queue a record. If the queue is full, wait for room, up to `send_timeout_ms`.

        Args:
            topic: the topic to append it to.
            record: its partition follows from its key.
            on_delivery: called by the sender's thread once the record is acknowledged or has failed.

        Raises:
            QueueFullError: there was no room in time. The record is not sent.
            SendError: librdkafka rejects the record, or Kafka the connection, or the producer is dead and not replaced
                yet. The record is not sent.
        """
        deadline_s = time.monotonic() + self._send_timeout_s
        if self.is_refused():
            self.look_again()
        while not self.try_send(topic, record, on_delivery):
            if time.monotonic() >= deadline_s:
                raise self.queue_full()
            with self._room:
                self._waiting += 1
                self._room.wait(_FULL_QUEUE_WAIT_S)
                self._waiting -= 1

    def try_send(self, topic: str, record: Record, on_delivery: OnDelivery) -> bool:
        """Queue a record, and return True; return False if the queue is full. Waits for nothing.

        Raises:
            SendError: librdkafka rejects the record, or the producer is dead and not replaced yet.
        """
        if not self._has_delivered:
            on_delivery = self._noting_success(on_delivery)
        try:
            self._producer.produce(topic, record.value, record.key, headers=list(record.headers), on_delivery=on_delivery)
        except BufferError:
            return False
        except KafkaException as error:
            raise SendError(f"the record was not sent: {self.explain(topic, self._fatal or error.args[0])}") from error
        return True

    def queue_full(self) -> QueueFullError:
        """Return the error for a record that found no room within `send_timeout_ms`."""
        return QueueFullError(
            f"the queue stayed full for {self._send_timeout_s:g} s ({len(self._producer)} records wait for Kafka): check that "
            "Kafka can be reached, send less at once, or raise max_in_flight"
        )

    def is_refused(self) -> bool:
        """Return True if Kafka has refused the connection, for a reason that may be gone by now."""
        return not self._has_delivered and self._refusal not in (None, WRONG_LOGIN)

    def look_again(self) -> None:
        """Look whether Kafka still refuses the connection: librdkafka may report it only once. May take seconds.

        Raises:
            SendError: it does.
        """
        self._refusal = tls_problem(self._settings.as_librdkafka_dict())
        if self._refusal:
            raise SendError(f"the record was not sent: {self._refusal}")

    def works(self) -> bool:
        """Return False from the death of a producer until its replacement has registered with Kafka."""
        return self._fatal is None

    def has_delivered(self) -> bool:
        """Return True once Kafka has acknowledged a record."""
        return self._has_delivered

    def explain(self, topic: str, error: KafkaError) -> str:
        """Return why a record for `topic` was not delivered and, where that is known, what to do."""
        if error.code() == KafkaError._PURGE_QUEUE:
            if self._refusal:
                return self._refusal
            error = self._fatal or error
        if error.code() in (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED):
            return missing_right(self._settings.security.login, "Write", "topic", topic)
        if error.code() in _NO_TOPIC:
            return missing_topics([topic])
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            return f"it is over the topic's max.message.bytes: {alter_topic(topic, 'max.message.bytes', '…')}"
        if error.code() == KafkaError._MSG_TIMED_OUT:
            servers = self._settings.servers()
            return f"timed out: no acknowledgement within {self._send_timeout_s:g} s, send_timeout_ms; check that {servers} can be reached"
        return str(error)

    def _on_error(self, error: KafkaError) -> None:
        """Log a connection error. If waiting cannot help and nothing was ever delivered, fail what is queued."""
        self._log.error(error)
        # librdkafka retries a single failed connection. It reports "all brokers are down" if none is left.
        if self._has_delivered or error.code() == KafkaError._TRANSPORT:
            return
        is_login = error.code() == KafkaError._AUTHENTICATION
        refusal = WRONG_LOGIN if is_login else tls_problem(self._settings.as_librdkafka_dict())
        if refusal:
            self._refusal = refusal
            self._producer.purge(in_flight=False, blocking=False)

    def _noting_success(self, on_delivery: OnDelivery) -> OnDelivery:
        def report(error: KafkaError | None, message: Message) -> None:
            if error is None:
                self._has_delivered = True
            on_delivery(error, message)

        return report

    def close(self, deadline_s: float) -> bool:
        """Deliver what is queued. If that takes too long, the thread goes on in the background.

        Args:
            deadline_s: the time by `time.monotonic()` at which to stop waiting.

        Returns:
            True if each record was delivered or failed in time.
        """
        # Not by flush: it goes on to call callbacks after the one that raises a fatal error, and loses their reports.
        self._stopping.set()
        self._has_ended.wait(max(0.0, deadline_s - time.monotonic()))
        # Once the thread has ended, it has served all: what librdkafka queues then are errors, such as of connections.
        return self._has_ended.is_set() or self._left() == 0

    def _left(self) -> int:
        """Return how many records are neither delivered nor failed."""
        return sum(map(len, [*self._dead, self._producer]))

    def _run(self) -> None:
        try:
            self._poll()
        finally:
            self._has_ended.set()

    def _poll(self) -> None:
        while not self._stopping.is_set() or self._left() > 0:
            try:
                self._serve_dead()
                if self._renew_at_s is not None and time.monotonic() >= self._renew_at_s:
                    self._renew()
                served = self._producer.poll(_POLL_S)
                if served and self._waiting:
                    with self._room:
                        self._room.notify(served)
            except KafkaException as error:
                self._note_death(error.args[0])
            except Exception:
                log.exception("event=delivery_report_failed")
            self._on_served()

    def _serve_dead(self) -> None:
        for dead in self._dead:
            with suppress(KafkaException):
                dead.poll(0)
        self._dead = [dead for dead in self._dead if len(dead)]

    def _note_death(self, error: KafkaError) -> None:
        """Plan a new producer: at once, and if that one dies too, later and later."""
        self._fatal = error
        delay_s = min(_MAX_RENEWAL_S, 2.0 ** min(self._renewals, 10) - 1)
        self._renew_at_s = time.monotonic() + delay_s
        log.error("event=producer_failed error=%r new_one_in_s=%g", str(error), delay_s)

    def _renew(self) -> None:
        """Replace the dead producer. What it has in flight is still reported."""
        self._renew_at_s = None
        self._renewals += 1
        # Only the statistics tell when a producer has registered with Kafka and may send.
        new = Producer({**self._config, "statistics.interval.ms": _PROBE_MS})
        self._dead.append(self._producer)
        self._producer = new

    def _on_statistics(self, text: str) -> None:
        """Note that a new producer works. One that died stays registered, with its error in the statistics."""
        if self._fatal is None:
            return
        statistics = json.loads(text)
        if statistics["eos"]["idemp_state"] == "Assigned" and "fatal" not in statistics:
            self._fatal, self._renewals = None, 0
            log.warning("event=producer_replaced")


def place_of(message: Message) -> tuple[int, int, int]:
    """Return partition, offset and timestamp, in ms since 1970 UTC, of a record whose report has arrived."""
    return cast(int, message.partition()), cast(int, message.offset()), message.timestamp()[1]


class DeliveryReport:
    """The delivery report of one record. librdkafka calls it, and one thread waits for it."""

    __slots__ = ("_arrived", "at_ms", "error", "has_arrived", "offset", "partition")

    def __init__(self) -> None:
        """Expect one report."""
        # A bare lock, held until the report arrives: with an Event, 8 threads send a fifth less.
        self._arrived = threading.Lock()
        self._arrived.acquire()
        self.has_arrived = False
        self.error: KafkaError | None = None
        self.partition = self.offset = self.at_ms = -1

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        """Store the report and wake the thread that waits."""
        self.error = error
        self.partition, self.offset, self.at_ms = place_of(message)
        self.has_arrived = True
        self._arrived.release()

    def wait(self, limit_s: float) -> bool:
        """Wait for the report. Return False if it does not arrive within `limit_s`."""
        return self._arrived.acquire(timeout=limit_s)
