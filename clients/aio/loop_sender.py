"""Sends records from an event loop: nothing here waits for Kafka or for a lock, except coroutines."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

from confluent_kafka import KafkaError, KafkaException, Message

from halfway.clients.group_records import GroupRecords, StoredHalf
from halfway.clients.kafka.sender import OnDelivery, Sender, place_of
from halfway.clients.messages import HalfMessage
from halfway.schemas.errors import SendError
from halfway.schemas.records import Record

_AT_ONCE = 16
"""How many tasks are woken in one turn of the loop. Each then sends its op and maybe its next half, and other tasks
have their turn after 2 ms instead of 20."""


class LoopReport:
    """The delivery report of one half. The sender's thread calls it, and a task awaits it."""

    __slots__ = ("_arrived", "at_ms", "error", "future", "has_arrived", "is_queued", "offset", "partition")

    def __init__(self, future: "asyncio.Future[None]", arrived: "deque[LoopReport]") -> None:
        """Expect one report. It is appended to `arrived`."""
        self.future, self._arrived = future, arrived
        self.is_queued = self.has_arrived = False
        self.error: KafkaError | None = None
        self.partition = self.offset = self.at_ms = -1

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        """Store the report. The loop is called once for all that arrive together."""
        self.error = error
        self.partition, self.offset, self.at_ms = place_of(message)
        self.has_arrived = True
        self._arrived.append(self)


class _Waiting:
    """A record that found the queue full. A task awaits `queued` if it is a half."""

    __slots__ = ("is_queued", "on_delivery", "queued", "record", "topic")

    def __init__(self, topic: str, record: Record, on_delivery: OnDelivery, queued: "asyncio.Future[None] | None" = None) -> None:
        self.topic, self.record, self.on_delivery, self.queued = topic, record, on_delivery, queued
        self.is_queued = False


class LoopSender:
    """A `Sender` as an event loop needs it. All methods are the loop's, except those that say otherwise.

    Args:
        send_timeout_ms: how long a half waits for room in a full queue. An op waits for as long as it takes.
    """

    def __init__(self, send_timeout_ms: int) -> None:
        """Connect to nothing yet."""
        self._send_timeout_s = send_timeout_ms / 1000
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sender: Sender | None = None
        self._arrived: deque[LoopReport] = deque()
        self._backlog: deque[_Waiting] = deque()
        self._has_no_backlog = threading.Event()
        self._has_no_backlog.set()

    def bind(self, loop: asyncio.AbstractEventLoop, sender: Sender) -> None:
        """Use a connection from `loop`."""
        self._loop, self._sender = loop, sender

    def on_served(self) -> None:
        """Wake the loop, once for all reports that have arrived. The sender's thread calls it."""
        if (self._arrived or self._backlog) and self._loop is not None:
            with suppress(RuntimeError):  # The loop is closed, so that nobody waits.
                self._loop.call_soon_threadsafe(self._drain)

    def flush(self, deadline_s: float) -> bool:
        """Wait until every record has room, or until a time by `time.monotonic()`. Return True if every one has."""
        return self._has_no_backlog.wait(max(0.0, deadline_s - time.monotonic()))

    def explain(self, topic: str, error: KafkaError) -> str:
        """Return why a record for `topic` was not delivered and, where that is known, what to do."""
        return self._connection().explain(topic, error)

    def send(self, topic: str, record: Record, on_delivery: OnDelivery) -> None:
        """Queue an op. If the queue is full, it waits for room. The caller waits for nothing.

        Raises:
            SendError: librdkafka rejects the record, or the producer is dead and not replaced yet.
        """
        if self._backlog or not self._connection().try_send(topic, record, on_delivery):
            self._backlog.append(_Waiting(topic, record, on_delivery))
            self._has_no_backlog.clear()

    async def store_halves(
        self, records: GroupRecords, messages: Sequence[HalfMessage], consequence: str, advice: str = ""
    ) -> list[StoredHalf]:
        """Sign halves, send them, and wait for them, as `GroupRecords.store_halves` does for a thread."""
        if records.signs_long(messages):
            messages, halves = await asyncio.to_thread(records.to_send, messages)
        else:
            messages, halves = records.to_send(messages)
        reports: list[LoopReport] = []
        try:
            for half in halves:
                reports.append(LoopReport(asyncio.get_running_loop().create_future(), self._arrived))
                await self.send_half(records.half_topic, half, reports[-1])
            await self._reported(reports, records.report_limit_s)
        except BaseException as error:
            queued = [message for message, report in zip(messages, reports, strict=False) if report.is_queued]
            records.interrupted(self, queued, error)
            raise
        return records.confirmed(self, messages, reports, consequence, advice)

    async def send_half(self, topic: str, record: Record, report: LoopReport) -> None:
        """Queue a half. If the queue is full, wait for room, up to `send_timeout_ms`.

        `report.is_queued` says whether it is queued, also after an error or a cancellation.

        Raises:
            QueueFullError: there was no room in time.
            SendError: librdkafka rejects the record, or Kafka the connection, or the producer is dead and not replaced
                yet.
        """
        sender = self._connection()
        if sender.is_refused():
            await asyncio.to_thread(sender.look_again)
        if not self._backlog and sender.try_send(topic, record, report):
            report.is_queued = True
            return
        waiting = _Waiting(topic, record, report, asyncio.get_running_loop().create_future())
        self._backlog.append(waiting)
        self._has_no_backlog.clear()
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await cast("asyncio.Future[None]", waiting.queued)
        except TimeoutError:
            if not waiting.is_queued:  # It may be, in the same turn of the loop.
                raise sender.queue_full() from None
        finally:
            # A cancellation may come after the record was queued.
            report.is_queued = waiting.is_queued
            if not report.is_queued:
                self._forget(waiting)

    @staticmethod
    async def _reported(reports: Sequence[LoopReport], limit_s: float) -> None:
        """Wait until all reports have arrived, at most `limit_s`. `has_arrived` of each says whether it has."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                for report in reports:
                    await report.future

    def _connection(self) -> Sender:
        return cast(Sender, self._sender)

    def _drain(self) -> None:
        """Wake tasks whose halves are acknowledged, a few in each turn of the loop, and use the room that there is."""
        for _ in range(min(len(self._arrived), _AT_ONCE)):
            report = self._arrived.popleft()
            if not report.future.done():
                report.future.set_result(None)
        while self._backlog and self._resend(self._backlog[0]):
            self._backlog.popleft()
        if not self._backlog:
            self._has_no_backlog.set()
        if self._arrived:
            cast(asyncio.AbstractEventLoop, self._loop).call_soon(self._drain)

    def _resend(self, waiting: _Waiting) -> bool:
        """Return False if there is no room. An error is told to whoever waits."""
        try:
            if not self._connection().try_send(waiting.topic, waiting.record, waiting.on_delivery):
                return False
        except SendError as error:
            if waiting.queued is None:
                cause = cast(KafkaException, error.__cause__)
                waiting.on_delivery(cause.args[0], None)
            elif not waiting.queued.done():
                waiting.queued.set_exception(error)
        else:
            waiting.is_queued = True
            if waiting.queued is not None and not waiting.queued.done():
                waiting.queued.set_result(None)
        return True

    def _forget(self, waiting: _Waiting) -> None:
        with suppress(ValueError):
            self._backlog.remove(waiting)
        if not self._backlog:
            self._has_no_backlog.set()
