"""Sends transactional messages (docs/contract.md): the half, the local transaction, the op with its outcome."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, cast

from confluent_kafka import KafkaError

from halfway.clients.check_threads import Answers, CheckThreads
from halfway.clients.check_workers import CheckWorkers
from halfway.clients.group_records import ANOTHER_ID, StoredHalf
from halfway.clients.instance import DEFAULT_MAX_BODY_BYTES, GroupInstance, ProducerLimits
from halfway.clients.listener import Answer, Arg_contra, TransactionListener, ask, verify_listener
from halfway.clients.messages import CheckRequest, HalfMessage, SendResult
from halfway.clients.open_checks import OpenChecks
from halfway.clients.transaction import LocalTransaction, TransactionDatabase, TransactionSource
from halfway.schemas.settings import KafkaSettings


class TransactionProducer(Generic[Arg_contra]):
    """Sends transactional messages for one producer group, and answers the group's checks.

    Threads may share a producer. Make one per process and group. It connects on `start`, on entering `with`, or on the
    first send.

    Args:
        settings: where Kafka is, how to log in, and the names of the topics.
        group: the producer group. Its instances answer each other's checks, so they must share their durable data.
        listener: holds the local transactions in the service's database (`SqlTransactions`), or runs and checks them
            (a `TransactionListener`).
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
        TypeError: `listener` is neither a listener nor a database of this kind of producer.
        ValueError: the group is empty, or a number is too small.
        SettingsError: `settings` names no Kafka, or requires signatures and has no key for the group.

    Example:
        with TransactionProducer(settings.kafka, "order-service", SqlTransactions(engine)) as producer:
            with producer.transaction() as tx:
                tx.execute(insert(orders).values(item="apples"))
                tx.send("orders", body, keys="order-17")
    """

    def __init__(
        self,
        settings: KafkaSettings,
        group: str,
        listener: TransactionListener[Arg_contra] | TransactionDatabase,
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
        limits = ProducerLimits(
            max_in_flight=max_in_flight,
            send_timeout_ms=send_timeout_ms,
            checks_at_once=check_threads,
            max_open_checks=max_open_checks,
            max_body_bytes=max_body_bytes,
            linger_ms=linger_ms,
            session_timeout_ms=session_timeout_ms,
        )
        self._listener = listener
        self._database = listener if isinstance(listener, TransactionDatabase) else None
        if self._database is None:
            verify_listener(listener, takes_coroutines=False)
        answers = Answers(self._look_up, self._send_answer)
        self._instance = self._make_instance(settings, group, limits, lambda checks: CheckThreads(group, answers, checks, check_threads))
        self._records = self._instance.records

    def start(self) -> None:
        """Connect in the background and start to answer checks. A second call does nothing.

        Raises:
            KafkaUnavailableError: librdkafka rejects the settings, such as a CA file that does not exist.
            ProducerClosedError: the producer is closed, or was started before this process was forked.
        """
        self._instance.start()

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
        arg: Arg_contra = None,  # type: ignore[assignment]  # what a listener without an `arg` gets
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
            keys: RocketMQ's keys. They order nothing: no order is promised between transactions.
            properties: the user's own headers.
            queue_id: passed on with the message.
            immunity_s: the seconds before the first check, in place of the job's `transactionTimeOut` (R4).
            incarnation: above 0 to resend a discarded message (R12).
            arg: passed to `execute_local_transaction`.

        Returns:
            Where and when the half was stored, and the listener's answer.

        Raises:
            ValueError: an argument breaks the contract (docs/contract.md). Nothing was sent.
            QueueFullError: the queue of `max_in_flight` records stayed full for `send_timeout_ms`. Nothing was sent and
                the local transaction was not run. The id may be used again.
            SendError: Kafka has not stored the half, or has not confirmed it. The local transaction was not run.
            KafkaUnavailableError: the first send starts the producer, and librdkafka rejects the settings.
            ProducerClosedError: the producer is closed, or was started before this process was forked.
            TypeError: the producer has a database in place of a listener.
        """
        if self._database is not None:
            raise TypeError("this producer has a database in place of a listener: send in a block, `with producer.transaction() as tx`")
        with self._records.telemetry.sending(topic):
            message = self._instance.message(
                topic,
                body,
                transaction_id,
                properties,
                queue_id=queue_id,
                tags=tags,
                keys=keys,
                immunity_s=immunity_s,
                incarnation=incarnation,
            )
            with self._instance.sending(threading.get_ident()) as sender:
                advice = ANOTHER_ID if transaction_id is not None else ""
                [half] = self._records.store_halves(sender, [message], "its local transaction was not run", advice)
                answer = self._execute(half.message, arg)
                self._records.send_op(sender, half.message, answer)
        return half.result(answer.state)

    @contextlib.contextmanager
    def transaction(self, using: Any = None) -> Iterator[LocalTransaction]:
        """Run a block in one transaction of the service's database. Its messages become readable if it commits.

        At the end of the block all in-sync replicas store the halves. Then the transaction's row and the business data
        commit together. Then the ops with COMMIT are queued for Kafka; if one is lost, a check asks the database. If
        the block raises an exception, everything is rolled back and nothing was sent.

        Args:
            using: with SQLAlchemy, a `Session` or `Connection` whose transaction the block uses and commits; None for a
                new connection.

        Yields:
            The transaction, to execute statements and to add messages.

        Raises:
            SendError: Kafka has not stored a half, or has not confirmed it. The database is rolled back.
            RolledBackError: a check came first, or the block has ended the transaction itself. The database is rolled
                back: run the block again.
            OutcomeUnknownError: the answer to the commit was lost, and the database cannot be asked.
            Exception: of the block, or of the database. The database is rolled back.
            KafkaUnavailableError: the first send starts the producer, and librdkafka rejects the settings.
            ProducerClosedError: the producer is closed, or was started before this process was forked.
            TypeError: the producer has a listener in place of a database, or another block is to end the transaction.
        """
        if self._database is None:
            raise TypeError("this producer has a listener: give it SqlTransactions(...) in its place, or use send_in_transaction")
        telemetry = self._records.telemetry
        with telemetry.sending("transaction"), self._instance.sending(threading.get_ident()) as sender:
            store = partial(self._records.store_halves, sender)
            block = LocalTransaction(self._database, using, self._records, sender, store)
            try:
                with telemetry.local_transaction():
                    yield block
                block.finish()
            except BaseException as error:
                block.fail(error)
                raise
            self._database.clean_up(using)

    def on_commit(self, session: Any) -> LocalTransaction:
        """Return the transaction of a SQLAlchemy `Session`, to add messages that `session.commit()` sends.

        For services that commit their sessions elsewhere, as web frameworks do. `session.commit()` then does what the
        end of a block does, and raises the same errors, but one: where the answer to the commit is lost, it raises the
        database's error also if the row says that it is committed, or cannot be asked. Roll the session back or close
        it after an error; `results` has the state then. Messages of a transaction that is rolled back are forgotten.

        Args:
            session: a `Session` whose database is the one of this producer.

        Raises:
            KafkaUnavailableError: the first send starts the producer, and librdkafka rejects the settings.
            ProducerClosedError: the producer is closed, or was started before this process was forked.
            RolledBackError: the session goes on after a deadlock of MariaDB, which has rolled back what it wrote.
            TypeError: the producer has a listener in place of a database, it is no session, or it is in a savepoint.

        Example:
            session.add(order)
            producer.on_commit(session).send("orders", body)
            session.commit()
        """
        if self._database is None:
            raise TypeError("this producer has a listener: give it SqlTransactions(...) in its place")

        def store(messages: Sequence[HalfMessage], consequence: str) -> list[StoredHalf]:
            with self._instance.sending(threading.get_ident()) as sender:
                return self._records.store_halves(sender, messages, consequence)

        sender = self._instance.start()

        def make(source: TransactionSource) -> LocalTransaction:
            return LocalTransaction(source, session, self._records, sender, store)

        return self._database.on_commit(session, self._instance, make)

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
        return self._instance.close(threading.get_ident(), timeout_s)

    def __enter__(self) -> Self:
        """Start the producer."""
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the producer without a time limit."""
        self.close()

    def _make_instance(
        self, settings: KafkaSettings, group: str, limits: ProducerLimits, make_workers: Callable[[OpenChecks], CheckWorkers]
    ) -> GroupInstance:
        return GroupInstance(settings, group, limits, make_workers)

    def _execute(self, message: HalfMessage, arg: Arg_contra) -> Answer:
        with self._records.telemetry.local_transaction():
            answer = ask(cast(TransactionListener[Arg_contra], self._listener).execute_local_transaction, message, arg)
        self._records.verdicts.note(message, answer.state)
        return answer

    def _look_up(self, request: CheckRequest) -> Answer:
        """Return what is known of a transaction, or else ask the listener."""
        known = self._records.verdicts.of(request)
        if known is not None:
            return Answer(known)
        # sys.exit() in a listener must not end the thread: later checks wait for it.
        with self._records.telemetry.check(request):
            answer = ask(self._listener.check_local_transaction, request, catch=BaseException)
        self._records.verdicts.note(request, answer.state)
        return answer

    def _send_answer(self, request: CheckRequest, answer: Answer, on_delivered: Callable[[KafkaError | None], None]) -> None:
        self._records.send_answer(self._instance.sender, request, answer, on_delivered)
