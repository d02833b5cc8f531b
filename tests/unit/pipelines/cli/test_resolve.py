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


IN_THE_WAIT = """
import os, signal, subprocess, sys, threading, time
from types import SimpleNamespace
from pyspark import SparkContext
from halfway.pipelines.cli.resolve import _stops
from halfway.pipelines.runtime.signals import on_signals

jvm = subprocess.Popen(["sleep", "3"])
jvm.kill = lambda: None  # A JVM takes a while to be gone on a busy machine.
SparkContext._gateway = SimpleNamespace(proc=jvm)
again = threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM))
again.daemon = True
with on_signals(_stops(SimpleNamespace(is_running=False, is_stopping=False))):
    again.start()
    os.kill(os.getpid(), signal.SIGINT)
    sys.exit("it has not ended")
"""


@pytest.mark.timeout(60)
def test_a_second_signal_while_the_first_one_ends_the_jvm_does_not_hang() -> None:
    """It would wait for the JVM within the first one's wait, whose lock is held."""
    with subprocess.Popen([sys.executable, "-c", IN_THE_WAIT], stderr=subprocess.DEVNULL) as process:
        try:
            assert process.wait(30) == 128 + signal.SIGINT
        finally:
            process.kill()
