"""A relay with a failpoint: `python -m tests.support.relay_failpoints STEP TIMES ACTION relay OPTIONS...`.

The product has no failpoints. This module wraps the producer's steps: at the given one, the TIMESth time, the process
ends by SIGKILL (`die`) or stops itself by SIGSTOP (`freeze`).
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from confluent_kafka import Producer

from halfway.pipelines.cli.app import app
from halfway.pipelines.relay import relay_producer

STEPS = ("before_begin", "before_produce", "after_produce", "before_abort", "after_abort", "before_commit", "after_commit")
_SIGNALS = {"die": signal.SIGKILL, "freeze": signal.SIGSTOP}


class _Wrapped(Producer):
    """A producer that ends or freezes its process at a step."""

    at: tuple[str, int] = ("", 0)
    action = signal.SIGKILL
    _reached = 0

    def _reach(self, step: str) -> None:
        wanted, times = self.at
        if step == wanted:
            _Wrapped._reached += 1
            if _Wrapped._reached == times:
                os.kill(os.getpid(), self.action)

    def _around(self, before: str, after: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        self._reach(before)
        call(*arguments, **named)
        self._reach(after)

    def begin_transaction(self) -> None:
        self._around("before_begin", "", super().begin_transaction)

    def produce(self, *arguments: Any, **named: Any) -> None:
        self._around("before_produce", "after_produce", super().produce, *arguments, **named)

    def abort_transaction(self, *arguments: Any) -> None:
        self._around("before_abort", "after_abort", super().abort_transaction, *arguments)

    def commit_transaction(self, *arguments: Any) -> None:
        self._around("before_commit", "after_commit", super().commit_transaction, *arguments)


if __name__ == "__main__":
    step, times, action, *sys.argv[1:] = sys.argv[1:]
    _Wrapped.at, _Wrapped.action = (step, int(times)), _SIGNALS[action]
    relay_producer.Producer = _Wrapped  # type: ignore[attr-defined]
    app(prog_name="halfway")
