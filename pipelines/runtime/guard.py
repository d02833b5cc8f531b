"""Ends a process that this one has started, if this one is killed and cannot do it itself."""

import os
import subprocess
import sys

OUTLIVES_BY_S = 10.0
# A process of its own, because this one may be killed. Its standard input ends when this one does. A pidfd, unlike a
# process id, never means another process.
_GUARD = """
import select, signal, sys
guarded = int(sys.argv[1])
select.select([sys.stdin, guarded], [], [])
if not select.select([guarded], [], [], float(sys.argv[2]))[0]:
    signal.pidfd_send_signal(guarded, signal.SIGKILL)
"""
_guards: dict[int, "subprocess.Popen[bytes]"] = {}


def guard(pid: int, outlives_by_s: float = OUTLIVES_BY_S) -> None:
    """Let a process not outlive this one for long, however this one ends. Only on Linux.

    Args:
        pid: the process, a child of this one.
        outlives_by_s: how long it may take to end by itself, in seconds. Then it is killed.
    """
    if pid in _guards or not hasattr(os, "pidfd_open"):
        return
    guarded, quiet = os.pidfd_open(pid), subprocess.DEVNULL
    command = [sys.executable, "-I", "-S", "-c", _GUARD, str(guarded), str(outlives_by_s)]
    try:
        # In its own session, where no Ctrl-C reaches it.
        _guards[pid] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, pass_fds=(guarded,), start_new_session=True
        )
    finally:
        os.close(guarded)
