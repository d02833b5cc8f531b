"""Runs a job for the time of a demo, if none is running."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from halfway.pipelines.demo.watch import read_status
from halfway.pipelines.runtime.guard import guard
from halfway.pipelines.runtime.java import SHORT_LIVED_JVM
from halfway.pipelines.runtime.paths import home
from halfway.schemas.errors import HalfwayError
from halfway.schemas.settings import StorageSettings

OWN_SETTINGS = (
    "trigger.available_now=false",
    "resolution.transactionTimeOut=2s",
    "resolution.transactionCheckInterval=2s",
    "resolution.transactionCheckMax=3",
)
"""Settings of the demo's job, so that checks and discards end within two minutes. The user's `--set` override them."""

# The first start downloads JARs.
_START_LIMIT_S = 600.0
_STOP_LIMIT_S = 60.0


def job_log() -> Path:
    """Return the log file of the demo's job."""
    return home() / "demo-job.log"


@contextmanager
def own_job(storage: StorageSettings, options: Sequence[str]) -> Iterator[Callable[[], bool]]:
    """Run `halfway resolve` as a child process until the context ends. Does not wait until it has started.

    Args:
        storage: where the job keeps its checkpoint.
        options: its command-line options.

    Yields:
        A function that returns True once the job has finished a batch. It raises HalfwayError, with the job's last
        error, if the job has ended or finishes no batch within 10 minutes.
    """
    log_file = job_log()
    log_file.parent.mkdir(parents=True, exist_ok=True)
    before = read_status(storage)
    with log_file.open("wb") as log:
        # In its own session, so that Ctrl-C reaches only the demo, which then ends the job.
        job = subprocess.Popen(
            [sys.executable, "-m", "halfway", "resolve", *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={"SPARK_SUBMIT_OPTS": SHORT_LIVED_JVM, **os.environ},
            start_new_session=True,
        )
    guard(job.pid)
    deadline_s = time.monotonic() + _START_LIMIT_S
    has_begun = False

    def check() -> bool:
        nonlocal has_begun
        if job.poll() is not None:
            raise HalfwayError(f"the job ended with exit code {job.returncode}: {_last_error(log_file)} (its log: {log_file})")
        has_begun = has_begun or read_status(storage) != before
        if not has_begun and time.monotonic() > deadline_s:
            raise HalfwayError(f"the job finished no batch within {_START_LIMIT_S:g} s (its log: {log_file})")
        return has_begun

    try:
        yield check
    finally:
        _stop(job)


def _stop(job: subprocess.Popen[bytes]) -> None:
    """End the job between two batches. If that takes too long, kill it, which is as safe as a crash."""
    if job.poll() is not None:
        return
    job.terminate()
    try:
        job.wait(_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def _last_error(log_file: Path) -> str:
    """Return the last error line of a job's log, or else its last line."""
    lines = [line.strip() for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["its log is empty"])[-1].removeprefix("error: ")
