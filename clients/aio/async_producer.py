"""Sends transactional messages from an event loop: the half, the local transaction, the op with its outcome."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, cast

from confluent_kafka import KafkaError

from halfway.clients.aio.async_listener import AsyncTransactionListener, ask_in_loop
from halfway.clients.aio.async_transaction import AsyncLocalTransaction, AsyncTransactionDatabase, to_its_end
from halfway.clients.aio.check_tasks import CheckTasks, LoopAnswers
from halfway.clients.aio.loop_sender import LoopSender
from halfway.clients.check_workers import CheckWorkers
from halfway.clients.group_records import ANOTHER_ID, StoredHalf
from halfway.clients.instance import DEFAULT_MAX_BODY_BYTES, GroupInstance, ProducerLimits
from halfway.clients.listener import Answer, Arg_contra, verify_listener
from halfway.clients.messages import CheckRequest, HalfMessage, SendResult
from halfway.clients.open_checks import OpenChecks
from halfway.clients.transaction import LocalTransaction, TransactionSource, unscoped
from halfway.schemas.records import type_of
from halfway.schemas.settings import KafkaSettings


class AsyncTransactionProducer(Generic[Arg_contra]):
    """Sends transactional messages for one producer group from asyncio, and answers the group's checks in coroutines.

    The tasks of one event loop share a producer. Make one per process and group. It connects on `start`, on entering
    `async with`, or on the first send.

    A task may be cancelled at any time (docs/transactions.md#asyncio). Before the commit is tried, everything is rolled
    back. A commit that was tried runs to its end, its ops are sent, and the task is cancelled after it.

    Args:
        settings: where Kafka is, how to log in, and the names of the topics.
        group: the producer group. Its instances answer each other's checks, so they must share their durable data.
        listener: holds the local transactions in the service's database (`AsyncSqlTransactions`), or runs and checks
            them (an `AsyncTransactionListener`).
        max_in_flight: how many records may wait for their acknowledgement. At this number a send waits for room, up to
            `send_timeout_ms`.
        send_timeout_ms: when an unacknowledged record fails.
        checks_at_once: how many checks are answered at once.
        max_open_checks: how many checks may be read and not yet answered.
        max_body_bytes: the size of the largest body. The job refuses bodies above its `resolution.max_body_bytes`.
        linger_ms: how long a record waits for others to share its request.
        session_timeout_ms: when Kafka gives a dead instance's checks to another one.

    Raises:
        TypeError: `listener` is neither a listener nor a database of this kind of producer.
        ValueError: the group is empty, or a number is too small.
        SettingsError: `settings` names no Kafka, or requires signatures and has no key for the group.

    Example:
        async with AsyncTransactionProducer(settings.kafka, "order-service", AsyncSqlTransactions(engine)) as producer:
            async with producer.transaction() as tx:
                await tx.execute(insert(orders).values(item="apples"))
                tx.send("orders", body, keys="order-17")
    """

    def __init__(
        self,
        settings: KafkaSettings,
        group: str,
        listener: AsyncTransactionListener[Arg_contra] | AsyncTransactionDatabase,
        *,
        max_in_flight: int = 10_000,
        send_timeout_ms: int = 30_000,
        checks_at_once: int = 16,
        max_open_checks: int = 256,
        max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
        linger_ms: int = 0,
        session_timeout_ms: int = 10_000,
    ) -> None:
        """Store the configuration. Does not connect."""
        limits = ProducerLimits(
            max_in_flight=max_in_flight,
            send_timeout_ms=send_timeout_ms,
            checks_at_once=checks_at_once,
            max_open_checks=max_open_checks,
            max_body_bytes=max_body_bytes,
            linger_ms=linger_ms,
            session_timeout_ms=session_timeout_ms,
        )
        self._listener = listener
        self._database = listener if isinstance(listener, AsyncTransactionDatabase) else None
        if self._database is None:
            verify_listener(listener, takes_coroutines=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_bound = False
        self._starting: asyncio.Task[None] | None = None
        self._sender = LoopSender(send_timeout_ms)
        answers = LoopAnswers(self._look_up, self._send_answer, self._own_loop)
        self._instance = self._make_instance(settings, group, limits, lambda checks: CheckTasks(answers, checks, checks_at_once))
        self._records = self._instance.records

    async def start(self) -> None:
        """Connect in the background and start to answer checks. A second call does nothing.

        Raises:
            KafkaUnavailableError: librdkafka rejects the settings, such as a CA file that does not exist.
            ProducerClosedError: the producer is closed, or was started before this process was forked.
            RuntimeError: another event loop has started it.
        """
        loop = asyncio.get_running_loop()
        if self._loop is loop and self._is_bound:
            self._instance.start()  # It may be closed, or this process forked.
            return
        is_starting = self._starting is not None and not self._starting.done()
        if self._loop not in (None, loop) and (is_starting or self._instance.is_started()) and not self._instance.is_forked():
            raise RuntimeError("the producer belongs to another event loop: make a new one in each loop")
        self._loop = loop
        if self._starting is None or self._starting.cancelled():  # as by a service that cancels all tasks
            self._starting = loop.create_task(self._connect())
        await asyncio.shield(self._starting)

    async def send_in_transaction(
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

        First all in-sync replicas store the half. Then the listener runs in this task. Then the op with its answer is
        queued for Kafka. If the answer is UNKNOWN, or the op is lost, a check asks the listener again. If the task is
        cancelled before the listener runs, a ROLLBACK is queued; while it runs, nothing, and a check asks.

        Arguments and result are those of `TransactionProducer.send_in_transaction`.

        Raises:
            ValueError: an argument breaks the contract (docs/contract.md). Nothing was sent.
            QueueFullError: the queue of `max_in_flight` records stayed full for `send_timeout_ms`. Nothing was sent and
                the local transaction was not run. The id may be used again.
            SendError: Kafka has not stored the half, or has not confirmed it. The local transaction was not run.
            KafkaUnavailableError: the first send starts the producer, and librdkafka rejects the settings.
            ProducerClosedError: the producer is closed, or was started before this process was forked.
            RuntimeError: another event loop has started it.
            TypeError: the producer has a database in place of a listener.
        """
        if self._database is not None:
            raise TypeError("this producer has a database in place of a listener: use `async with producer.transaction() as tx`")
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
            await self.start()
            with self._instance.sending(asyncio.current_task()):
                advice = ANOTHER_ID if transaction_id is not None else ""
                [half] = await self._sender.store_halves(self._records, [message], "its local transaction was not run", advice)
                with self._records.telemetry.local_transaction():
                    execute = cast(AsyncTransactionListener[Arg_contra], self._listener).execute_local_transaction
                    answer = await ask_in_loop(execute, half.message, arg)
                self._records.verdicts.note(half.message, answer.state)
                self._records.send_op(self._sender, half.message, answer)
        return half.result(answer.state)

    @contextlib.asynccontextmanager
    async def transaction(self, using: Any = None) -> AsyncIterator[AsyncLocalTransaction]:
        """Run a block in one transaction of the service's database. Its messages become readable if it commits.

        At the end of the block all in-sync replicas store the halves. Then the transaction's row and the business data
        commit together. Then the ops with COMMIT are queued for Kafka; if one is lost, a check asks the database. If
        the block raises an exception or is cancelled, everything is rolled back.

        Args:
            using: an `AsyncSession` or `AsyncConnection` whose transaction the block uses and commits; None for a new
                connection.

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
            RuntimeError: another event loop has started it.
            TypeError: the producer has a listener in place of a database, or another block is to end the transaction.
        """
        database = self._database
        if database is None:
            raise TypeError("this producer has a listener: give it AsyncSqlTransactions(...) in its place, or use send_in_transaction")

        def store(messages: Sequence[HalfMessage], consequence: str) -> list[StoredHalf]:
            return database.wait_for(self._sender.store_halves(self._records, messages, consequence))

        telemetry = self._records.telemetry
        await self.start()
        with telemetry.sending("transaction"), self._instance.sending(asyncio.current_task()):
            # The first id takes a second connection, to look the mark up: many blocks that begin at once could wait for
            # each other's in the pool.
            await database.run(database.database.new_id)
            async with database.connection(using) as connection:
                begin = (LocalTransaction, database.database, connection, self._records, self._sender, store)
                block = await database.run(*begin)
                try:
                    with telemetry.local_transaction():
                        yield AsyncLocalTransaction(block, connection)
                    await database.run(block.prepare)
                    await to_its_end(database.run(block.conclude))
                except BaseException as error:
                    await to_its_end(database.run(block.fail, error))
                    raise
            await database.run(database.database.clean_up, using)

    async def on_commit(self, session: Any) -> AsyncLocalTransaction:
        """Return the transaction of an `AsyncSession`, to add messages that `await session.commit()` sends.

        For services that commit their sessions elsewhere, as web frameworks do. The commit then does what the end of a
        block does, and raises the same errors, but one: where the answer to the commit is lost, it raises the
        database's error also if the row says that it is committed, or cannot be asked. Roll the session back or close
        it after an error; `results` has the state then. Messages of a transaction that is rolled back are forgotten. A
        commit that is cancelled may be done: closing the session looks it up.

        Args:
            session: an `AsyncSession` whose database is the one of this producer.

        Raises:
            KafkaUnavailableError: the first send starts the producer, and librdkafka rejects the settings.
            ProducerClosedError: the producer is closed, or was started before this process was forked.
            RolledBackError: the session goes on after a deadlock of MariaDB, which has rolled back what it wrote.
            RuntimeError: another event loop has started it.
            TypeError: the producer has a listener in place of a database, it is no session, or it is in a savepoint.

        Example:
            session.add(order)
            (await producer.on_commit(session)).send("orders", body)
            await session.commit()
        """
        database = self._database
        if database is None:
            raise TypeError("this producer has a listener: give it AsyncSqlTransactions(...) in its place")
        session = unscoped(session)
        if not hasattr(session, "sync_session"):
            raise TypeError(f"{type_of(session)} is no AsyncSession of SQLAlchemy: use a block, `async with producer.transaction()`")

        def store(messages: Sequence[HalfMessage], consequence: str) -> list[StoredHalf]:
            with self._instance.sending(asyncio.current_task()):
                return database.wait_for(self._sender.store_halves(self._records, messages, consequence))

        def make(source: TransactionSource) -> LocalTransaction:
            return LocalTransaction(source, session, self._records, self._sender, store)

        await self.start()
        block = await database.run(database.database.on_commit, session.sync_session, self._instance, make)
        return AsyncLocalTransaction(block, session)

    async def close(self, timeout_s: float | None = None) -> bool:
        """Refuse new sends, wait for running sends and checks, deliver all queued records, and disconnect.

        A second call, from any task, waits for the first. If the task is cancelled, the rest goes on in a thread. In a
        process that was forked from the one that started the producer, it does nothing.

        Args:
            timeout_s: the longest time to wait. None waits until the application's listeners end, and then for Kafka,
                at most `send_timeout_ms` and 5 s.

        Returns:
            True if all of it was done in time. Otherwise checks ask for the missing outcomes.

        Raises:
            RuntimeError: a listener calls it, or a block. It would wait for itself.
        """
        task = asyncio.current_task()
        self._instance.refuse_to_wait_for(task)
        return await _in_own_thread(partial(self._instance.close, task, timeout_s))

    async def __aenter__(self) -> Self:
        """Start the producer."""
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the producer without a time limit."""
        await self.close()

    def _make_instance(
        self, settings: KafkaSettings, group: str, limits: ProducerLimits, make_workers: Callable[[OpenChecks], CheckWorkers]
    ) -> GroupInstance:
        sender = self._sender
        return GroupInstance(settings, group, limits, make_workers, on_served=sender.on_served, flush=sender.flush)

    async def _connect(self) -> None:
        """Connect in a thread: librdkafka reads certificates, which takes longer than a loop may stand still.

        The thread goes on if this is cancelled, and checks are answered in this loop then too.
        """
        try:
            await asyncio.to_thread(self._connect_for, self._own_loop())
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._starting = self._loop = None
            raise
        self._is_bound = True

    def _connect_for(self, loop: asyncio.AbstractEventLoop) -> None:
        sender = self._instance.start()
        if self._loop is loop:  # A loop whose start was cancelled may come after the one that began again.
            self._sender.bind(loop, sender)

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        return cast(asyncio.AbstractEventLoop, self._loop)

    async def _look_up(self, request: CheckRequest) -> Answer:
        """Return what is known of a transaction, or else ask the listener."""
        known = self._records.verdicts.of(request)
        if known is not None:
            return Answer(known)
        # sys.exit() in a listener must not end the loop.
        with self._records.telemetry.check(request):
            answer = await ask_in_loop(self._listener.check_local_transaction, request, catch=BaseException)
        self._records.verdicts.note(request, answer.state)
        return answer

    def _send_answer(self, request: CheckRequest, answer: Answer, on_delivered: Callable[[KafkaError | None], None]) -> None:
        self._records.send_answer(self._sender, request, answer, on_delivered)


async def _in_own_thread(function: Callable[[], bool]) -> bool:
    """Run a function in a thread of its own, which does not keep the process alive.

    A thread of the loop's executor could be the last one that a listener waits for.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[bool] = loop.create_future()

    def tell(result: bool, error: BaseException | None) -> None:
        if not done.done():
            done.set_result(result) if error is None else done.set_exception(error)

    def run() -> None:
        result, failure = False, None
        try:
            result = function()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(tell, result, failure)

    threading.Thread(target=run, name="halfway-close", daemon=True).start()
    return await done
