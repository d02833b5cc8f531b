"""Handles SIGTERM and Ctrl-C: a command ends what it has started, and then itself."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def on_signals(handler: Callable[[int], object]) -> Iterator[None]:
    """Call `handler` with the number of each SIGTERM and SIGINT until the block ends.

    Does nothing outside the main thread. A notebook server calls from other threads, and handles signals itself.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        handler(number)

    former = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler_before in former.items():
            signal.signal(number, handler_before)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Hold a SIGTERM or SIGINT back until the block has ended. A second one ends the process at once."""
    received: list[int] = []

    def hold(number: int) -> None:
        if received:
            os._exit(exit_code(number))
        received.append(number)

    try:
        with on_signals(hold):
            yield
    finally:
        if received:
            signal.raise_signal(received[0])


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Leave the block by SystemExit at the first signal. Others do not interrupt what the block does to end."""
    received: list[int] = []

    def end(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            raise SystemExit(exit_code(number))

    with on_signals(end):
        try:
            yield
        except BaseException:
            # Libraries in C replace the exception: confluent_kafka raises SystemError instead.
            if received:
                raise SystemExit(exit_code(received[0])) from None
            raise


def exit_code(number: int) -> int:
    """Return the exit code of a process that a signal ended, as shells have it."""
    return 128 + number
