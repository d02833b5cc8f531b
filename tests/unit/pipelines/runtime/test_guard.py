"""A guarded process ends after the process that has started it, and not before."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from halfway.pipelines.local.processes import command_line
from tests.support.waiting import until

PARENT = """
import subprocess, sys, time
from pathlib import Path
from halfway.pipelines.runtime.guard import guard
child = subprocess.Popen(["sleep", sys.argv[2]])
guard(child.pid, outlives_by_s=float(sys.argv[3]))
Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(60)
"""

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux's pidfd")


def killed_parent_of(folder: Path, *, child_s: float, outlives_by_s: float) -> int:
    """Start a process with a guarded child, kill it, and return the child's id."""
    told = folder / "pid"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(told), str(child_s), str(outlives_by_s)])
    until(lambda: told.exists() and told.read_text() != "", "the child", 20)
    child = int(told.read_text())
    assert command_line(child)[0] == "sleep"
    parent.kill()
    parent.wait(10)
    return child


def test_a_process_does_not_outlive_one_that_was_killed(tmp_path: Path) -> None:
    child = killed_parent_of(tmp_path, child_s=60, outlives_by_s=0.1)
    until(lambda: command_line(child) == [], "the child's end", 20)


def test_a_process_has_time_to_end_by_itself(tmp_path: Path) -> None:
    child = killed_parent_of(tmp_path, child_s=60, outlives_by_s=60)
    with pytest.raises(AssertionError, match="the child's end"):
        until(lambda: command_line(child) == [], "the child's end", 1)
    os.kill(child, 9)
    until(lambda: command_line(child) == [], "the child's end", 20)


def test_a_guard_ends_with_what_it_guards() -> None:
    from halfway.pipelines.runtime import guard as module

    with subprocess.Popen(["sleep", "60"]) as child:
        module.guard(child.pid)
        child.kill()
    assert module._guards[child.pid].wait(20) == 0
