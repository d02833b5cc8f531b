"""The core-seconds of a process and of what is below it."""

import os
import subprocess
import sys

from benchmarks.cpu import core_seconds

WORK = "import time\nwhile time.process_time() < 0.3: pass\n"
ROUNDED_S = 0.05
"""The kernel rounds the user and the system time of each process down to 10 ms."""
PARENT = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', sys.argv[1]])\nprint('done', flush=True)\nsys.stdin.read()"


def test_running_and_ended_processes_below_count() -> None:
    before = core_seconds(os.getpid())
    with subprocess.Popen([sys.executable, "-c", PARENT, WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"done\n"
        running = core_seconds(parent.pid)
        assert running >= 0.3 - ROUNDED_S
        assert core_seconds(os.getpid()) - before >= running - ROUNDED_S
    assert core_seconds(os.getpid()) - before >= running - ROUNDED_S


def test_a_process_that_does_not_exist_has_used_nothing() -> None:
    assert core_seconds(2**22 + 1) == 0
