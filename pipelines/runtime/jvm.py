"""Ends Spark's JVM with the process that started it, however that one ends."""

import subprocess
from contextlib import suppress
from typing import Any

from pyspark import SparkContext

from halfway.pipelines.runtime.guard import guard

_EXIT_LIMIT_S = 120
_KILL_LIMIT_S = 10


def guard_jvm(outlives_by_s: float) -> None:
    """Let this process's JVM not outlive it for longer than this, also if this process is killed.

    A JVM ends by itself when its standard input does, but first tries to end what runs in it, which may take minutes if
    Kafka or a store does not answer.
    """
    jvm = _jvm()
    if jvm is not None:
        guard(jvm.pid, outlives_by_s)


def jvm_has_ended() -> bool:
    """Return True if this process has started a JVM that has ended, or been killed."""
    jvm = _jvm()
    return jvm is not None and jvm.poll() is not None


def end_jvm() -> None:
    """End this process's JVM, whose session is stopped, and wait for its end. After it, Spark prints nothing more."""
    gateway: Any = SparkContext._gateway
    jvm = _jvm()
    if jvm is None:
        return
    gateway.shutdown()
    SparkContext._gateway = SparkContext._jvm = None
    # The JVM ends when its standard input is closed.
    with suppress(BrokenPipeError):
        jvm.stdin.close()
    try:
        jvm.wait(_EXIT_LIMIT_S)
    except subprocess.TimeoutExpired:
        _kill(jvm)


def end_jvm_at_once() -> None:
    """Kill this process's JVM, whatever runs in it. A signal handler may call it.

    A JVM that is asked to end prints a page for each thread that it interrupts.
    """
    jvm = _jvm()
    if jvm is not None:
        _kill(jvm)


def _kill(jvm: "subprocess.Popen[bytes]") -> None:
    jvm.kill()
    with suppress(subprocess.TimeoutExpired):  # A signal may have interrupted another wait, which ends after this one.
        jvm.wait(_KILL_LIMIT_S)


def _jvm() -> Any:
    """Return the handle of the JVM that this process has started; None without one, as under spark-submit."""
    return getattr(SparkContext._gateway, "proc", None)
