"""Finds free ports on this machine, and waits for processes to end."""

import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from halfway.schemas.errors import SetupError

HOST = "127.0.0.1"
PORTS = range(20_000, 32_768)
"""These are below the ports of outgoing connections.

Otherwise a client could get a stopped broker's port, and even connect to itself.
"""
_POLL_S = 0.1
_PORT_PROBES = 200
_KILL_LIMIT_S = 10.0


def free_port(but: int | None = None) -> int:
    """Return a port of `PORTS`, other than `but`, that no process listens on at the moment.

    Raises:
        SetupError: no free port was found.
    """
    for port in random.sample(PORTS, _PORT_PROBES):
        if port != but and is_free(port):
            return port
    raise SetupError(f"no free port between {PORTS.start} and {PORTS.stop - 1}: end some servers on this machine")


def is_free(port: int) -> bool:
    """Return True if no process listens on `port`."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def command_line(pid: int) -> list[str]:
    """Return the arguments of process `pid`; an empty list if it has ended, also before its exit code is collected."""
    if sys.platform == "linux":
        try:
            text = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        except OSError:
            return []
        return [argument for argument in text.split("\0") if argument]
    shown = subprocess.run(["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return shown.stdout.split()


def end_process(pid: int, child: "subprocess.Popen[bytes] | None", limit_s: float) -> bool:
    """End a process by SIGTERM, and by SIGKILL if it does not end in time. Return True if it has ended.

    Args:
        pid: the process.
        child: its handle if it is a child of this process.
        limit_s: how long to wait before SIGKILL.
    """
    for number, wait_s in ((signal.SIGTERM, limit_s), (signal.SIGKILL, _KILL_LIMIT_S)):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return True
        if _wait_for_child(child, wait_s) if child is not None else _wait_for_end(pid, wait_s):
            return True
    return False


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Wait until `condition` holds. Return False if it does not hold within `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def _wait_for_child(child: "subprocess.Popen[bytes]", limit_s: float) -> bool:
    try:
        child.wait(limit_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _wait_for_end(pid: int, limit_s: float) -> bool:
    """Wait until process `pid`, which is not a child of this process, has ended with all its threads."""
    if sys.platform != "linux":
        return wait_until(lambda: not command_line(pid), limit_s)
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], limit_s)[0])
    finally:
        os.close(descriptor)
