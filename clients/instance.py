"""One instance of a producer group: its connection to Kafka, the checks that it answers, and its life."""

import contextlib
import ctypes
import logging
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Unpack

from halfway.clients.check_workers import CheckWorkers
from halfway.clients.checks import CheckAnswerer
from halfway.clients.group_records import GroupRecords
from halfway.clients.kafka.sender import Sender
from halfway.clients.messages import HalfMessage, MessageFields
from halfway.clients.open_checks import OpenChecks
from halfway.schemas.errors import ForkedProducerError, ProducerClosedError, SettingsError
from halfway.schemas.records import type_of
from halfway.schemas.settings import KafkaSettings

log = logging.getLogger(__name__)

DEFAULT_MAX_BODY_BYTES = 4 * 1024 * 1024
CLOSE_GRACE_S = 5.0
"""How long `close` waits for Kafka, in addition to `send_timeout_ms`."""


@dataclass(frozen=True, kw_only=True)
class ProducerLimits:
    """The sizes and times of a producer, as its `__init__` explains them.

    Raises:
        ValueError: a number is too small.
    """

    max_in_flight: int
    send_timeout_ms: int
    checks_at_once: int
    max_open_checks: int
    max_body_bytes: int
    linger_ms: int
    session_timeout_ms: int

    def __post_init__(self) -> None:
        """Refuse numbers that are too small."""
        numbers = (self.max_in_flight, self.send_timeout_ms, self.checks_at_once, self.max_open_checks, self.max_body_bytes)
        if min(*numbers, self.session_timeout_ms) < 1 or self.linger_ms < 0:
            raise ValueError("sizes, numbers and time-outs must be at least 1, linger_ms at least 0")


class GroupInstance:
    """One instance of a producer group. Threads may share it. It connects on `start`, or on the first send.

    Args:
        settings: where Kafka is, how to log in, and the names of the topics.
        group: the producer group.
        limits: sizes and times.
        make_workers: makes what answers checks.
        on_served: called by the sender's thread each time that it has looked for delivery reports.
        flush: called before the connection is closed, with the time by `time.monotonic()` at which to stop waiting:
            waits until each record is queued, and returns True if each one is.

    Raises:
        ValueError: the group is empty or breaks the contract.
        SettingsError: `settings` names no Kafka, or requires signatures and has no key for the group.
        TypeError: `settings` are no KafkaSettings.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        group: str,
        limits: ProducerLimits,
        make_workers: Callable[[OpenChecks], CheckWorkers],
        *,
        on_served: Callable[[], None] = lambda: None,
        flush: Callable[[float], bool] = lambda _: True,
    ) -> None:
        """Store the configuration. Does not connect."""
        half = HalfMessage(transaction_id="-", topic="-", body=b"", producer_group=group)
        half.headers()  # Refuses a group that no half could name.
        if not isinstance(settings, KafkaSettings):
            raise TypeError(f"a producer takes KafkaSettings, such as load_settings().kafka, not {type_of(settings)}")
        group = half.producer_group  # Of a member of an enumeration, the consumer group would have another name.
        settings.servers()
        self.settings, self.group, self._limits = settings, group, limits
        self._on_served, self._flush = on_served, flush
        self.records = GroupRecords(settings, group, send_timeout_ms=limits.send_timeout_ms, max_body_bytes=limits.max_body_bytes)
        self._pid: int | None = None
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_complete: bool | None = None
        self._closing_thread: int | None = None
        self._callers: list[tuple[object, Hashable]] = []
        """Who is in each running send. Frameworks end the blocks of a thread in any order, and in other threads."""
        self._sender: Sender | None = None
        self._checks = self.make_checks(make_workers)

    def message(
        self,
        topic: str,
        body: bytes,
        transaction_id: str | None,
        properties: Mapping[str, str] | None,
        **fields: Unpack[MessageFields],
    ) -> HalfMessage:
        """Return the half of a send. It is validated here before the first start, and by `GroupRecords.to_send` later.

        Raises:
            ValueError: an argument breaks the contract (docs/contract.md).
        """
        name = uuid.uuid4().hex if transaction_id is None else transaction_id
        message = self.records.message(name, topic, body, properties, time.time_ns() // 1_000_000, **fields)
        if self._sender is None:
            message.to_record()  # Wrong arguments start nothing.
        return message

    def start(self) -> Sender:
        """Connect in the background and start to answer checks. A second call does nothing.

        Raises:
            KafkaUnavailableError: librdkafka rejects the settings, such as a CA file that does not exist.
            ProducerClosedError: the producer is closed, or was started before this process was forked.
            SettingsError: gevent or eventlet has replaced the threads.
        """
        if self.is_forked():
            raise ForkedProducerError(
                f"the producer of group {self.group!r} was started by process {self._pid}, from which this one was forked: "
                "make a new one in each process"
            )
        _refuse_greenlets()
        self._pid = os.getpid()  # A process that is forked while another thread is in here finds the lock held for ever.
        with self._changed:
            if self._is_closed:
                raise ProducerClosedError(f"the producer of group {self.group!r} is closed: make a new one to send")
            if self._sender is None:
                self._sender = self.make_sender()
                try:
                    if self._is_closed:  # by a signal handler, meanwhile
                        raise ProducerClosedError(f"the producer of group {self.group!r} was closed while it started")
                    self._checks.start()
                except BaseException:
                    self._sender.close(0.0)
                    self._sender = None
                    raise
                _started.add(self)
            return self._sender

    def is_started(self) -> bool:
        """Return True if it was started, also once it is closed."""
        return self._sender is not None

    @property
    def sender(self) -> Sender:
        """Return the connection of an instance that was started, also while it closes."""
        if self._sender is None:
            raise ProducerClosedError(f"the producer of group {self.group!r} was not started")
        return self._sender

    @contextlib.contextmanager
    def sending(self, caller: Hashable) -> Iterator[Sender]:
        """Count a running send, so that `close` can wait for it, and refuse to wait for the caller.

        Args:
            caller: the thread or task that sends. It runs the application's code, and its signal handlers may close.

        Raises:
            KafkaUnavailableError, ProducerClosedError: as `start`.
        """
        self.start()
        send = (object(), caller)
        try:
            # One fact, and first: a signal handler may come at any moment, and close.
            self._callers.append(send)
            with self._changed:
                sender = self.start()  # It may be closed by now.
            yield sender
        finally:
            try:  # noqa: SIM105  # A signal could come in the call of `suppress`.
                self._callers.remove(send)
            except ValueError:
                pass  # Ctrl-C came before it was counted.
            with self._changed:
                self._changed.notify_all()

    def refuse_to_wait_for(self, caller: Hashable) -> None:
        """Refuse to let a listener, a block, or a signal handler in one, wait for its own end.

        Raises:
            RuntimeError: the caller is sending, or answers a check.
        """
        if any(each == caller for _, each in list(self._callers)) or self._checks.is_answering_here():
            raise RuntimeError(
                "close() cannot be called by a listener, in a block, or by a signal handler that interrupts a send, because it waits "
                "until they end"
            )

    def is_forked(self) -> bool:
        """Return True in a forked process: the threads and connections are the parent's.

        Takes no lock, because another thread of the parent may have held it during the fork.
        """
        return self._pid not in (None, os.getpid())

    def can_send(self) -> bool:
        """Return False while no answer can be sent."""
        return self._sender is not None and self._sender.works()

    def has_sent(self) -> bool:
        """Return True once Kafka has acknowledged a record."""
        return self._sender is not None and self._sender.has_delivered()

    def close(self, caller: Hashable, timeout_s: float | None) -> bool:
        """Refuse new sends, wait for running sends and checks, deliver all queued records, and disconnect.

        Args:
            caller: the thread or task that waits.
            timeout_s: the longest time to wait. None waits until the application's listeners end, and then for Kafka,
                at most `send_timeout_ms` and 5 s.

        Returns:
            True if all of it was done in time. Otherwise checks ask for the missing outcomes. False too in a signal
            handler that interrupts a `close` of this thread, which goes on after the handler.

        Raises:
            RuntimeError: a listener calls it. It would wait for itself.
        """
        if self.is_forked():
            return True
        self.refuse_to_wait_for(caller)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            if self._closing_thread == threading.get_ident():
                return False
            self._changed.wait_for(lambda: self._closing_thread is None, timeout_s)
            if self._is_complete is not None or self._closing_thread is not None:
                return bool(self._is_complete)
            self._closing_thread, self._is_closed = threading.get_ident(), True
        try:
            # Where Ctrl-C ends it, the next `close` does it again.
            self._is_complete = self._finish(deadline_s)
        finally:
            with self._changed:
                self._closing_thread = None
                self._changed.notify_all()
        return self._is_complete

    def _finish(self, deadline_s: float | None) -> bool:
        """Wait for the running sends, then for the checks, then deliver the records that both have queued."""
        self.records.lost_an_op = False
        with self._changed:
            sends_done = self._changed.wait_for(
                lambda: not self._callers, None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            )
        if self._sender is None:
            return True
        listeners_done = self._checks.stop(deadline_s)
        limit_s = time.monotonic() + self._limits.send_timeout_ms / 1000 + CLOSE_GRACE_S
        limit_s = limit_s if deadline_s is None else min(limit_s, deadline_s)
        has_left = self._checks.leave(limit_s)
        is_queued = self._flush(limit_s)
        delivered = sends_done and self._sender.close(limit_s) and is_queued and not self.records.lost_an_op
        if not sends_done:
            threading.Thread(target=self._close_after_sends, name="halfway-close", daemon=True).start()
        done = {"sends": sends_done, "answers_to_checks": listeners_done and has_left, "acknowledgements": delivered}
        left = ",".join(name for name, is_done in done.items() if not is_done)
        if left:
            log.error("event=close_incomplete left=%r effect=checks_ask_for_missing_outcomes", left)
        return not left

    def _close_after_sends(self) -> None:
        """Serve the reports of sends that `close` has not waited for: without, they would wait for their time limit."""
        with self._changed:
            self._changed.wait_for(lambda: not self._callers)
        self.sender.close(time.monotonic())

    def make_sender(self) -> Sender:
        """Return the connection that sends. A test may put another one in its place."""
        return Sender(
            self.settings,
            max_in_flight=self._limits.max_in_flight,
            send_timeout_ms=self._limits.send_timeout_ms,
            linger_ms=self._limits.linger_ms,
            max_body_bytes=self._limits.max_body_bytes,
            on_served=self._on_served,
        )

    def make_checks(self, make_workers: Callable[[OpenChecks], CheckWorkers]) -> CheckAnswerer:
        """Return what reads the group's checks. A test may put another one in its place."""
        return CheckAnswerer(
            self.settings,
            self.group,
            make_workers,
            self.can_send,
            self.has_sent,
            max_open=self._limits.max_open_checks,
            session_timeout_ms=self._limits.session_timeout_ms,
        )


def _refuse_greenlets() -> None:
    """Refuse threads that are greenlets: librdkafka waits in C, where none of them gives way, and the process hangs.

    Raises:
        SettingsError: gevent or eventlet has replaced the threads.
    """
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    is_patched = gevent is not None and gevent.is_module_patched("threading")
    if is_patched or (eventlet is not None and eventlet.is_monkey_patched("thread")):
        raise SettingsError(
            f"{'gevent' if is_patched else 'eventlet'} has replaced this process's threads, and a producer needs real ones: run the "
            "service with threads (gunicorn -k gthread), or with asyncio and AsyncTransactionProducer"
        )


def _keep_in_child() -> None:
    """Keep the parent's connections alive in a forked process.

    librdkafka's threads are not forked, and its destructor would wait for them, at the latest when the process exits.
    """
    for instance in _started:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(instance))


_started: "weakref.WeakSet[GroupInstance]" = weakref.WeakSet()
if hasattr(os, "register_at_fork"):  # Windows does not fork.
    os.register_at_fork(after_in_child=_keep_in_child)
