"""Writes the relay's Kafka transactions: messages and bookmark together, or nothing."""

import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from halfway.clients.kafka.client_log import ClientLog
from halfway.clients.kafka.config import PRODUCER_OPTIONS, librdkafka_config
from halfway.clients.kafka.diagnosis import missing_right
from halfway.pipelines.kafka.writer import record_bytes, too_large
from halfway.pipelines.relay.leader_election import relay_id
from halfway.pipelines.relay.positions import PositionRecord, Refusal
from halfway.pipelines.relay.route import RelayedRecord
from halfway.schemas.errors import AccessError
from halfway.schemas.settings import Settings

_POLL_S = 0.05
_RETRY_S = 0.1
_BUFFER_KBYTES = 1024 * 1024
_DELIVERY_SHARE = 0.5
_TOO_LARGE = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE, KafkaError.INVALID_MSG_SIZE)
_PURGED = (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)
"""What the end of a transaction says of the messages that it has taken back."""
_REFUSALS = {
    **dict.fromkeys(_TOO_LARGE, Refusal.TOO_LARGE),
    KafkaError.UNKNOWN_TOPIC_OR_PART: Refusal.NO_TOPIC,
    KafkaError._UNKNOWN_TOPIC: Refusal.NO_TOPIC,
    KafkaError._UNKNOWN_PARTITION: Refusal.NO_TOPIC,
    KafkaError.TOPIC_EXCEPTION: Refusal.NO_TOPIC,
    KafkaError.TOPIC_AUTHORIZATION_FAILED: Refusal.NO_RIGHT,
    KafkaError.POLICY_VIOLATION: Refusal.OTHER,
    KafkaError.INVALID_RECORD: Refusal.OTHER,
    KafkaError.INVALID_TIMESTAMP: Refusal.OTHER,
    KafkaError._MSG_TIMED_OUT: Refusal.UNAVAILABLE,
    KafkaError.NOT_ENOUGH_REPLICAS: Refusal.UNAVAILABLE,
}
"""What a topic may answer to a message. Any other error is of the connection or of the transaction."""


class RefusedError(Exception):
    """A topic refuses a message. Nothing of the transaction was written."""

    def __init__(self, record: RelayedRecord, refusal: Refusal, cause: str, *, is_alone: bool) -> None:
        """Store the message, the reason, and if the message was sent alone."""
        super().__init__(cause)
        self.record, self.refusal, self.cause, self.is_alone = record, refusal, cause, is_alone


class TransactionLostError(Exception):
    """The transaction did not end, or another relay has ended it. Only the bookmark in Kafka tells what was written."""


class _FirstFailure:
    """Keeps the first failure of a transaction. librdkafka holds it meanwhile, so it must not hold the producer."""

    def __init__(self) -> None:
        self.failure: tuple[RelayedRecord, KafkaError, bool] | None = None
        """The record, the error, and whether the record was sent alone."""

    def of(self, record: RelayedRecord, *, is_alone: bool) -> Callable[[KafkaError | None, Message], None]:
        """Return the callback for one record."""

        def report(error: KafkaError | None, _: Message) -> None:
            if error is not None and self.failure is None and error.code() not in _PURGED:
                self.failure = (record, error, is_alone)

        return report


class RelayProducer:
    """A transactional producer. Kafka lets one of a name write: the last that was made.

    Args:
        settings: the relay's name and time-out, and where Kafka is.
    """

    def __init__(self, settings: Settings) -> None:
        """Fence every earlier producer of this name. What it left open is aborted.

        Raises:
            AccessError: this user may not use the transactional id.
            TransactionLostError: Kafka does not answer in time, or refuses.
        """
        self._user, self._id = settings.kafka.security.login, relay_id(settings.kafka, settings.relay.name)
        self._limit_s = settings.relay.transaction_timeout / 1000
        self._first = _FirstFailure()
        options: dict[str, Any] = {
            **librdkafka_config(settings.kafka, ClientLog()),
            **PRODUCER_OPTIONS,
            "client.id": self._id,
            "transactional.id": self._id,
            "transaction.timeout.ms": settings.relay.transaction_timeout,
            # A delivery must fail early enough to abort the transaction before that times out.
            "message.timeout.ms": int(settings.relay.transaction_timeout * _DELIVERY_SHARE),
            "linger.ms": 1,
            # librdkafka would never take a record that is larger than its buffer.
            "queue.buffering.max.kbytes": _BUFFER_KBYTES,
        }
        options["request.timeout.ms"] = min(options["request.timeout.ms"], options["message.timeout.ms"])
        options["socket.timeout.ms"] = min(options["socket.timeout.ms"], options["message.timeout.ms"])
        self._producer = Producer(options)
        self._finish(self._producer.init_transactions)

    def write(self, records: Iterable[RelayedRecord], alone: Collection[str], topic: str, positions: Iterable[PositionRecord]) -> None:
        """Write messages and positions in one transaction.

        Args:
            records: the messages, in order.
            alone: the Kafka topics whose messages are sent one by one. A refusal then is of that message; librdkafka
                otherwise sends many in one batch, which a topic refuses as a whole.
            topic: the relay's own topic.
            positions: the records for it.

        Raises:
            RefusedError: a topic refuses a message. Nothing was written.
            TransactionLostError: it did not end, or this producer was fenced. Make a new one.
        """
        self._first = _FirstFailure()
        try:
            self._producer.begin_transaction()
            for record in records:
                is_alone = record.topic in alone
                if is_alone:
                    self._wait()
                self._produce(record, is_alone=is_alone)
                if is_alone:
                    self._wait()
                if self._first.failure is not None:
                    break
            for position in positions:
                self._put(topic, position.value, position.key)
            self._wait()
        except KafkaException as error:
            self._give_up(error.args[0])
        if self._first.failure is not None:
            self._give_up(self._first.failure[1])
        try:
            self._finish(self._producer.commit_transaction, may_abort=True)
        except KafkaException as error:
            self._give_up(error.args[0])

    def mark_end(self, topic: str) -> int:
        """Write a record to the relay's own topic, abort its transaction, and return the offset after the record.

        All that earlier producers of this name have written there is before it. A leader that was cut off still answers
        readers by what it knew, but it cannot acknowledge a record.

        Raises:
            TransactionLostError: the record was not written, or this producer was fenced. Make a new one.
            AccessError: this user may not use the transactional id.
        """
        self._first = _FirstFailure()
        reported: list[KafkaError | Message] = []

        def report(error: KafkaError | None, record: Message) -> None:
            reported.append(record if error is None else error)

        try:
            self._producer.begin_transaction()
            self._put(topic, b"", self._id, on_delivery=report)
            self._wait()
            if any(isinstance(each, KafkaError) for each in reported):
                self._finish(self._producer.commit_transaction, may_abort=True)  # It fails, and says why; the report may say "purged".
            self._finish(self._producer.abort_transaction)
        except KafkaException as error:
            self._give_up(error.args[0])
        offsets = [each.offset() for each in reported if not isinstance(each, KafkaError)]
        if not offsets or offsets[0] is None:  # librdkafka may not learn the offset of a record that it had to send twice.
            raise TransactionLostError(f"Kafka does not tell where {topic} ends")
        return offsets[0] + 1

    def close(self) -> None:
        """Forget what is in flight. Kafka aborts an open transaction."""
        self._producer.purge()
        # Serves their reports: those that are never served keep their records for ever.
        self._producer.poll(0)

    def _produce(self, record: RelayedRecord, *, is_alone: bool) -> None:
        report = self._first.of(record, is_alone=is_alone)
        try:
            self._put(record.topic, record.value, record.key, partition=record.partition, headers=list(record.headers), on_delivery=report)
        except KafkaException as error:
            if error.args[0].code() not in _REFUSALS:
                raise
            self._first.failure = (record, error.args[0], True)

    def _put(self, *record: Any, **more: Any) -> None:
        """Queue a record; wait while librdkafka's queue is full, unless a topic has refused a message."""
        while self._first.failure is None:
            try:
                return self._producer.produce(*record, **more)
            except BufferError:
                self._producer.poll(_POLL_S)
        return None

    def _wait(self) -> None:
        """Wait until each record is delivered, or one has failed. Message time-outs limit it."""
        while len(self._producer) and self._first.failure is None:
            self._producer.poll(_POLL_S)

    def _give_up(self, error: KafkaError) -> None:
        """Abort the transaction.

        Raises:
            RefusedError: a topic has refused a message.
            TransactionLostError: for any other reason.
        """
        if error.fatal():
            raise TransactionLostError(str(error))
        # librdkafka takes no message after a refusal, also before it has reported the refusal: this serves the report.
        self._finish(self._producer.abort_transaction)
        if self._first.failure is None or self._first.failure[1].code() not in _REFUSALS:
            raise TransactionLostError(str(error))
        record, failure, is_alone = self._first.failure
        refusal = _REFUSALS[failure.code()]
        raise RefusedError(record, refusal, self._cause(record, refusal, failure), is_alone=is_alone)

    def _cause(self, record: RelayedRecord, refusal: Refusal, failure: KafkaError) -> str:
        if refusal is Refusal.TOO_LARGE:
            return too_large(record.topic, record_bytes(record.key, record.value, record.headers))
        if refusal is Refusal.NO_RIGHT:
            return missing_right(self._user, "Write", "topic", record.topic)
        return f"topic {record.topic} does not take it: {failure.str()}"

    def _finish(self, step: Callable[[float], None], *, may_abort: bool = False) -> None:
        """Call one of librdkafka's transaction steps until it is done.

        Raises:
            KafkaException: it failed, and the transaction may be aborted, if `may_abort`.
            TransactionLostError: it failed for good, or Kafka does not answer in time.
            AccessError: this user may not use the transactional id.
        """
        deadline_s = time.monotonic() + self._limit_s
        while True:
            try:
                step(max(0.1, deadline_s - time.monotonic()))
            except KafkaException as error:
                failure: KafkaError = error.args[0]
                if failure.code() == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
                    raise AccessError(missing_right(self._user, "Write", "transactional-id", self._id)) from None
                if may_abort and failure.txn_requires_abort():
                    raise
                if not failure.retriable() or time.monotonic() >= deadline_s:
                    raise TransactionLostError(str(failure)) from None
                time.sleep(_RETRY_S)
            else:
                return
