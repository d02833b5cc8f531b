"""The job as a user runs it: `halfway resolve` in a process of its own."""

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from halfway.schemas.settings import Settings
from tests.support.commands import as_options, halfway_command
from tests.support.delta_rows import ids_in
from tests.support.kafka_topics import topic_settings
from tests.support.paths import ROOT
from tests.support.waiting import until


class JobProcess:
    """A job with its own tables, checkpoint and log in `folder`. Its first check is an hour away."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._folder = folder
        self._runs = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.warehouse = folder / "warehouse"
        self.options: dict[str, object] = {
            **topic_settings(settings.kafka),
            "storage.warehouse": self.warehouse,
            "storage.checkpoint": folder / "checkpoint",
            "state.buckets": 4,
            "state.shuffle_partitions": 1,
            "resolution.transactionTimeOut": "1h",
        }

    @property
    def log(self) -> str:
        """What all runs wrote so far."""
        return "".join(path.read_text(errors="replace") for path in sorted(self._folder.glob("job-*.log")))

    def start(self, *arguments: str, **changed: object) -> subprocess.Popen[bytes]:
        """Start the job with more arguments and changed settings."""
        self._runs += 1
        command = halfway_command("resolve", *as_options({**self.options, **changed}), *arguments)
        with (self._folder / f"job-{self._runs}.log").open("wb") as log:
            # A session of its own, so that a kill reaches the JVM and the Python workers too.
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=ROOT)
        return self.process

    def until_first_batch(self) -> None:
        """Wait for the end of a batch, as long as the log grows: a start takes minutes on a busy machine."""
        self.until(lambda: "event=batch" in self.log, "the job's first batch")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition as long as the log grows, and fail with the log's end if the job ends before it."""
        process = self.process
        assert process is not None
        until(lambda: condition() or process.poll() is not None, what, progress=lambda: len(self.log))
        assert condition(), f"the job ended with {process.poll()} before {what}:\n{self.log[-2000:]}"

    def processes(self) -> list[int]:
        """Return the job and the processes that it started, on Linux: those of its session that have not ended."""
        assert self.process is not None
        listed = subprocess.run(["ps", "-eo", "pid=,sid=,stat="], capture_output=True, text=True, check=True).stdout
        found = [line.split() for line in listed.splitlines()]
        return [int(pid) for pid, session, state in found if int(session) == self.process.pid and not state.startswith("Z")]

    def kill(self) -> None:
        """Kill the job and every process that it started."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)

    def delivered(self) -> list[str]:
        """Return the transaction ids in the table `messages`."""
        return ids_in(self.warehouse / "messages")
