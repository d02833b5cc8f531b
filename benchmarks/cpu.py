"""Core-seconds of processes and of everything below them, from /proc (Linux)."""

import os
from collections import defaultdict
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def core_seconds(root: int) -> float:
    """Return the user and system time of a process and its descendants, with those that have ended, in seconds."""
    below: dict[int, list[int]] = defaultdict(list)
    ticks: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(file.parent.name)
        below[int(fields[1])].append(pid)
        # utime, stime, cutime and cstime. The last two are those of the children that have ended and were waited for.
        ticks[pid] = sum(map(int, fields[11:15]))
    total, todo = 0, [root]
    while todo:
        pid = todo.pop()
        total += ticks.get(pid, 0)
        todo += below[pid]
    return total / _TICKS_PER_S
