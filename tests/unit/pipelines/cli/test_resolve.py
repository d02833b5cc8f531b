"""How signals end `halfway resolve`, without Spark."""

import os
import select
import signal
import subprocess
import sys

import pytest

SECOND = """
import os, signal, sys
from types import SimpleNamespace
from halfway.pipelines.cli.resolve import _stops
from halfway.pipelines.runtime.signals import on_signals

with on_signals(_stops(SimpleNamespace(is_running=True, is_stopping=True))):
    os.kill(os.getpid(), signal.SIGTERM)
    sys.exit("it has not ended")
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("stderr", ["full", "without a reader"])
def test_a_second_signal_ends_the_job_where_nobody_reads_what_it_says(stderr: str) -> None:
    """As in `halfway resolve 2>&1 | tee log`: Ctrl-C ends `tee` too."""
    reader, writer = os.pipe()
    if stderr == "full":
        while select.select([], [writer], [], 0)[1]:
            os.write(writer, bytes(select.PIPE_BUF))
    else:
        os.close(reader)
    process = subprocess.Popen([sys.executable, "-c", SECOND], stderr=writer)
    os.close(writer)
    try:
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait(30)
        if stderr == "full":
            os.close(reader)
