"""Starts and closings that a signal, an exception or a full executor comes across. No Kafka is needed."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from halfway import AsyncTransactionProducer, LocalTransactionState, TransactionProducer
from halfway.clients.kafka.sender import DeliveryReport
from halfway.schemas.errors import ProducerClosedError
from halfway.schemas.records import Record
from halfway.schemas.settings import KafkaSettings
from tests.support.paths import ROOT

NOWHERE = KafkaSettings(bootstrap_servers="127.0.0.1:1")
SEND_TIMEOUT_MS = 2_000


class Listener:
    """Knows no outcome."""

    def execute_local_transaction(self, _: object, __: object) -> LocalTransactionState:
        return LocalTransactionState.UNKNOWN

    def check_local_transaction(self, _: object) -> LocalTransactionState:
        return LocalTransactionState.UNKNOWN


class AsyncListener:
    """The same, for asyncio."""

    async def execute_local_transaction(self, _: object, __: object) -> LocalTransactionState:
        return LocalTransactionState.UNKNOWN

    async def check_local_transaction(self, _: object) -> LocalTransactionState:
        return LocalTransactionState.UNKNOWN


OTHERS: set[threading.Thread] = set()
"""The threads that other tests of this process have left: a sender may take a while to end."""


@pytest.fixture
def producer() -> TransactionProducer:
    OTHERS.update(threading.enumerate())
    return TransactionProducer(NOWHERE, f"shop-{os.urandom(4).hex()}", Listener(), send_timeout_ms=SEND_TIMEOUT_MS)


@pytest.fixture
def on_term() -> Iterator[Callable[[Callable[[], object]], None]]:
    """`on_term(function)`: call it at SIGTERM."""
    former = signal.getsignal(signal.SIGTERM)
    yield lambda function: signal.signal(signal.SIGTERM, lambda *_: function())  # type: ignore[func-returns-value]
    signal.signal(signal.SIGTERM, former)


def threads_of(producer: TransactionProducer) -> list[str]:
    group = producer._instance.group
    own = (each.name for each in threading.enumerate() if each not in OTHERS)
    return [name for name in own if group in name or name == "halfway-sender"]


def queue_a_record(producer: TransactionProducer) -> None:
    """Queue what is not acknowledged before `send_timeout_ms`: `close` waits for it."""
    producer._instance.sender.send("transactions.op", Record(b"x", b"", []), DeliveryReport())


@pytest.mark.timeout(60)
def test_a_signal_handler_that_closes_during_a_close_does_not_wait_for_itself(
    producer: TransactionProducer, on_term: Callable[[Callable[[], object]], None]
) -> None:
    told: list[bool] = []
    on_term(lambda: told.append(producer.close()))
    producer.start()
    queue_a_record(producer)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    began_s = time.monotonic()
    producer.close()
    assert told == [False], "the interrupted close goes on"
    assert time.monotonic() - began_s < SEND_TIMEOUT_MS / 1000 + 8
    until_none_is_left(producer)


@pytest.mark.timeout(60)
def test_a_close_that_was_interrupted_is_done_by_the_next_one(
    producer: TransactionProducer, on_term: Callable[[Callable[[], object]], None]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    on_term(interrupt)
    producer.start()
    queue_a_record(producer)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(KeyboardInterrupt):
        producer.close()
    with pytest.raises(ProducerClosedError):
        producer.start()
    producer.close()
    until_none_is_left(producer)


def test_a_producer_that_a_signal_handler_closes_while_it_starts_does_not_run(
    producer: TransactionProducer, on_term: Callable[[Callable[[], object]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = producer._instance.make_sender

    def interrupted() -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return make()

    told: list[bool] = []
    on_term(lambda: told.append(producer.close()))
    monkeypatch.setattr(producer._instance, "make_sender", interrupted)
    with pytest.raises(ProducerClosedError, match="was closed while it started"):
        producer.start()
    assert told == [True]
    producer.close()
    until_none_is_left(producer)


def until_none_is_left(producer: TransactionProducer) -> None:
    end_s = time.monotonic() + 10
    while threads_of(producer) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert threads_of(producer) == []


def test_a_start_that_lacked_a_thread_can_be_repeated(producer: TransactionProducer, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def lacking(thread: threading.Thread) -> None:
        if thread.name.startswith("halfway-checks-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lacking)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                producer.start()
    until_none_is_left(producer)
    producer.start()
    assert producer.close()


@pytest.mark.timeout(60)
def test_an_async_close_needs_no_thread_of_the_executor() -> None:
    """The application's own calls may have them all, and may wait for a listener that waits for one."""

    async def run() -> float:
        producer = AsyncTransactionProducer(NOWHERE, "shop", AsyncListener(), send_timeout_ms=SEND_TIMEOUT_MS)
        await producer.start()
        go = threading.Event()
        count = min(32, (os.cpu_count() or 1) + 4)
        busy = [asyncio.create_task(asyncio.to_thread(go.wait, 20)) for _ in range(count)]
        await asyncio.sleep(0)
        began_s = time.monotonic()
        await producer.close(timeout_s=1)
        took_s = time.monotonic() - began_s
        with pytest.raises(ProducerClosedError):
            await producer.start()
        go.set()
        await asyncio.gather(*busy)
        return took_s

    assert asyncio.run(run()) < 5


def test_where_nothing_was_sent_a_close_does_not_wait_for_a_kafka_that_is_away(
    producer: TransactionProducer, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody needs to know the group, and no check was read."""
    producer.start()
    assert producer.close(2.0)
    assert "close_incomplete" not in caplog.text


def test_a_loop_does_not_take_a_producer_from_the_loop_that_is_starting_it(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = AsyncTransactionProducer(NOWHERE, "shop", AsyncListener(), send_timeout_ms=SEND_TIMEOUT_MS)
    begun, goes_on = threading.Event(), threading.Event()
    make_sender = producer._instance.make_sender

    def make_slowly() -> object:
        begun.set()
        assert goes_on.wait(10)
        return make_sender()

    monkeypatch.setattr(producer._instance, "make_sender", make_slowly)

    async def rightful() -> bool:
        await producer.start()
        await producer.start()
        return await producer.close(5)

    async def other() -> None:
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            await producer.start()

    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(asyncio.run, rightful())
        try:
            assert begun.wait(10)
            asyncio.run(other())
        finally:
            goes_on.set()
        assert closed.result(20)


def test_threads_that_gevent_has_replaced_are_refused() -> None:
    """The first start would hang the process for ever: librdkafka waits in C."""
    program = """
from gevent import monkey
monkey.patch_all()
from halfway import KafkaSettings, TransactionProducer
from tests.unit.clients.test_closing import NOWHERE, Listener
TransactionProducer(NOWHERE, "shop", Listener()).start()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert "SettingsError: gevent has replaced this process's threads, and a producer needs real ones" in done.stderr
