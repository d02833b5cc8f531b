"""Signals: what a command does at the first, and at the second one."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from halfway.pipelines.runtime.signals import deferred_signals, ended_by_signals, on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_calls_the_handler_until_the_block_ends(number: signal.Signals) -> None:
    former, received = signal.getsignal(number), []
    with on_signals(received.append):
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
    assert received == [number, number]
    assert signal.getsignal(number) is former


def test_another_thread_than_the_main_one_keeps_the_handlers() -> None:
    former, seen = signal.getsignal(signal.SIGTERM), []

    def look() -> None:
        with on_signals(lambda _: None):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [former]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_leaves_the_block_and_the_next_one_does_not_interrupt_its_end(number: signal.Signals, code: int) -> None:
    done = []

    def run() -> None:
        with ended_by_signals():
            try:
                os.kill(os.getpid(), number)
                done.append("not left")
            finally:
                os.kill(os.getpid(), number)
                done.append("ended")

    with pytest.raises(SystemExit) as caught:
        run()
    assert (caught.value.code, done) == (code, ["ended"])


def test_what_a_library_makes_of_the_exception_does_not_count() -> None:
    """confluent_kafka raises SystemError if a signal's handler raises while it logs."""

    def run() -> None:
        with ended_by_signals():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except SystemExit:
                raise SystemError from None

    with pytest.raises(SystemExit) as caught:
        run()
    assert caught.value.code == 143


def test_other_errors_pass() -> None:
    def run() -> None:
        with ended_by_signals():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()


def test_a_signal_is_held_back_until_the_block_has_ended() -> None:
    done = []

    def run() -> None:
        with ended_by_signals(), deferred_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("the block")

    with pytest.raises(SystemExit) as caught:
        run()
    assert (caught.value.code, done) == (143, ["the block"])


TWICE = """
import os
from halfway.pipelines.runtime.signals import deferred_signals
with deferred_signals():
    os.kill(os.getpid(), 15)
    os.kill(os.getpid(), 15)
    print("not ended")
"""


def test_a_second_signal_is_not_held_back() -> None:
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (143, b"")
