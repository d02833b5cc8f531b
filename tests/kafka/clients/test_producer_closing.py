"""Closing the client: it loses nothing, and it ends in time whatever happens to Kafka."""

import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from halfway import LocalTransactionState, ProducerClosedError, SqlTransactions, TransactionProducer
from halfway.clients.instance import CLOSE_GRACE_S
from halfway.pipelines.local.broker import LocalBroker
from halfway.schemas.settings import KafkaSettings
from tests.support.client_world import (
    COMMIT,
    GROUP,
    LIMIT_S,
    ROLLBACK,
    Gate,
    Listener,
    check_of,
    committed,
    frozen,
    is_closed,
    ops,
    own_topics,
    send_checks,
)
from tests.support.paths import ROOT
from tests.support.waiting import until

BUSY_S = 3.0
"""The time that a busy machine may add to a time limit."""


def test_close_delivers_the_queue_and_refuses_new_sends(kafka: KafkaSettings) -> None:
    producer = TransactionProducer(kafka, GROUP, Listener(), linger_ms=1000)
    result = producer.send_in_transaction("orders", b"")
    assert producer.close() is True
    assert [name for name, _ in ops(kafka)] == [result.transaction_id]
    assert producer.close() is True
    with pytest.raises(ProducerClosedError):
        producer.send_in_transaction("orders", b"")
    with pytest.raises(ProducerClosedError):
        producer.start()


def test_close_waits_for_a_running_local_transaction(kafka: KafkaSettings) -> None:
    gate = Gate()
    producer = TransactionProducer(kafka, GROUP, Listener(gate.then(ROLLBACK)))
    with ThreadPoolExecutor(3) as pool:
        sending = pool.submit(producer.send_in_transaction, "orders", b"", transaction_id="t1")
        gate.entered.get(timeout=LIMIT_S)
        closing = [pool.submit(producer.close) for _ in range(2)]
        until(lambda: is_closed(producer), "close has begun")
        assert not any(close.done() for close in closing)
        gate.opened.set()
        assert sending.result(LIMIT_S).state is ROLLBACK
        assert [close.result(LIMIT_S) for close in closing] == [True, True]
    assert [(name, headers["ACTION"]) for name, headers in ops(kafka)] == [("t1", "ROLLBACK")]


def test_close_gives_up_in_time_and_the_op_still_goes_out(kafka: KafkaSettings) -> None:
    gate = Gate()
    producer = TransactionProducer(kafka, GROUP, Listener(gate.then(COMMIT)))
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(producer.send_in_transaction, "orders", b"", transaction_id="t1")
        gate.entered.get(timeout=LIMIT_S)
        assert producer.close(0.5) is False
        gate.opened.set()
        assert sending.result(LIMIT_S).state is COMMIT
    assert [name for name, _ in ops(kafka, at_least=1)] == ["t1"]


def test_a_block_that_close_has_not_waited_for_still_commits(kafka: KafkaSettings, tmp_path: Path) -> None:
    """Its halves are sent after `close` has given up, and their reports are served."""
    producer = TransactionProducer(kafka, GROUP, SqlTransactions(lambda: sqlite3.connect(tmp_path / "shop.db")), send_timeout_ms=60_000)
    with producer.transaction() as tx:
        tx.send("orders", b"apples")
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(producer.close, 0.5).result(LIMIT_S) is False
        until(lambda: "halfway-close" in {thread.name for thread in threading.enumerate()}, "close has given up")
        start_s = time.monotonic()
    assert time.monotonic() - start_s < 60
    assert [result.state for result in tx.results] == [COMMIT]
    assert [headers["ACTION"] for _, headers in ops(kafka, at_least=1)] == ["COMMIT"]
    until(lambda: "halfway-close" not in {thread.name for thread in threading.enumerate()}, "the rest of close is done")


def test_close_by_a_listener_is_refused(kafka: KafkaSettings) -> None:
    def execute(*_: object) -> LocalTransactionState:
        producer.close()
        return COMMIT

    listener = Listener(execute, lambda _: execute())
    with TransactionProducer(kafka, GROUP, listener) as producer:
        producer.send_in_transaction("orders", b"", transaction_id="t1")
        send_checks(kafka, check_of("t1"))
        sent = ops(kafka, at_least=2)
    assert [headers["ACTION"] for _, headers in sent] == ["UNKNOWN", "UNKNOWN"]
    assert all(headers["REMARK"].startswith("RuntimeError: close() cannot be called by a listener") for _, headers in sent)


def test_close_ends_without_a_broker(own_broker: LocalBroker) -> None:
    kafka = own_topics(own_broker)
    gate = Gate()
    with TransactionProducer(kafka, GROUP, Listener(check=gate.then(COMMIT)), send_timeout_ms=2000) as producer:
        producer.send_in_transaction("orders", b"", transaction_id="t1")
        send_checks(kafka, check_of("t2"))
        assert gate.entered.get(timeout=LIMIT_S) == "t2"
        own_broker.stop()
        gate.opened.set()
        try:
            start_s = time.monotonic()
            assert producer.close() is False
            assert time.monotonic() - start_s < 2.0 + CLOSE_GRACE_S + BUSY_S
        finally:
            own_broker.start()
    assert committed(kafka) == {}


@pytest.mark.parametrize(("timeout_s", "limit_s"), [(1.0, 1.0), (0.0, 0.0), (None, 2.0 + CLOSE_GRACE_S)])
def test_close_with_a_frozen_broker_returns_in_time(own_broker: LocalBroker, timeout_s: float | None, limit_s: float) -> None:
    kafka = own_topics(own_broker)
    gate = Gate()
    producer = TransactionProducer(kafka, GROUP, Listener(gate.then(COMMIT), gate.then(COMMIT)), send_timeout_ms=2000)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(producer.send_in_transaction, "orders", b"", transaction_id="sent")
        send_checks(kafka, check_of("asked"))
        assert {gate.entered.get(timeout=LIMIT_S) for _ in range(2)} == {"sent", "asked"}
        with frozen(own_broker):
            gate.opened.set()
            assert sending.result(LIMIT_S).state is COMMIT
            start_s = time.monotonic()
            assert producer.close(timeout_s) is False
            assert time.monotonic() - start_s < limit_s + BUSY_S


def test_a_signal_handler_that_interrupts_a_send_cannot_wait_for_it(own_broker: LocalBroker) -> None:
    """It runs in the thread that sends, and would wait for it for ever."""
    kafka = own_topics(own_broker)
    producer = TransactionProducer(kafka, GROUP, Listener(), send_timeout_ms=60_000)
    producer.send_in_transaction("orders", b"", transaction_id="before")
    before = signal.signal(signal.SIGUSR1, lambda *_: producer.close())
    try:
        with ThreadPoolExecutor(1) as pool, frozen(own_broker):
            pool.submit(_signal_when_sending, producer)
            with pytest.raises(RuntimeError, match="signal handler that interrupts a send"):
                producer.send_in_transaction("orders", b"", transaction_id="interrupted")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert producer.close() is True


def _signal_when_sending(producer: TransactionProducer[object]) -> None:
    until(lambda: producer._instance._callers != [], "the send has begun")
    os.kill(os.getpid(), signal.SIGUSR1)


class _Hang(logging.Handler):
    """Hangs the thread that logs a line with the given text."""

    def __init__(self, line: str, gate: Gate) -> None:
        super().__init__()
        self._line, self._gate = line, gate

    def emit(self, record: logging.LogRecord) -> None:
        if self._line in record.getMessage():
            self._gate.pass_through(self._line)


@pytest.mark.parametrize(("timeout_s", "limit_s"), [(1.0, 1.0), (None, 5.0 + CLOSE_GRACE_S)])
def test_close_ends_though_librdkafka_hangs_in_its_own_close(
    kafka: KafkaSettings, timeout_s: float | None, limit_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    handler = _Hang("event=check_partitions_revoked", gate)
    caplog.set_level(logging.INFO, "halfway.clients.checks")
    logging.getLogger("halfway.clients.checks").addHandler(handler)
    try:
        producer = TransactionProducer(kafka, GROUP, Listener(), send_timeout_ms=5000)
        producer.send_in_transaction("orders", b"", transaction_id="t1")
        send_checks(kafka, check_of("t2"))
        ops(kafka, at_least=2)
        start_s = time.monotonic()
        assert producer.close(timeout_s) is False
        assert time.monotonic() - start_s < limit_s + BUSY_S
        assert gate.entered.get(timeout=LIMIT_S)  # librdkafka's close did hang: it waits for this callback
        assert "event=close_incomplete left='answers_to_checks' effect=" in caplog.text
    finally:
        gate.opened.set()
        logging.getLogger("halfway.clients.checks").removeHandler(handler)


ENDS = """
import os, signal, sys
from halfway import LocalTransactionState, TransactionProducer
from halfway.schemas.settings import KafkaSettings

class Listener:
    def execute_local_transaction(self, message, arg):
        os.kill(int(sys.argv[2]), signal.SIGSTOP)
        return LocalTransactionState.COMMIT
    def check_local_transaction(self, message): raise AssertionError

producer = TransactionProducer(KafkaSettings.model_validate_json(sys.argv[1]), "shop", Listener())
producer.send_in_transaction("orders", b"")
sys.exit(producer.close(0.5))
"""


def test_a_process_ends_though_close_timed_out(own_broker: LocalBroker) -> None:
    kafka = own_topics(own_broker)
    pid = own_broker.pid()
    assert pid is not None
    try:
        done = subprocess.run([sys.executable, "-c", ENDS, kafka.model_dump_json(), str(pid)], cwd=ROOT, check=False, timeout=LIMIT_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert done.returncode == 0  # `close` returned False: it timed out
