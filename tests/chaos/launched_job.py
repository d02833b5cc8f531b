"""The job of a chaos world: `halfway resolve`, started through the launcher and controlled from outside."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from halfway.pipelines.storage.missing_tables import OFFSETS
from halfway.pipelines.storage.state_reader import COMMITS, LocalFiles, ends_in
from tests.chaos.launcher import ARM_FILE, GO_FILE, REACHED_FILE, Step, write_atomically
from tests.chaos.waiting import ChaosError, until
from tests.support.commands import as_options, run_halfway
from tests.support.paths import ROOT


class LaunchedJob:
    """A job with its log files and checkpoints in `folder`. Several runs follow each other, one at a time."""

    def __init__(self, folder: Path, options: Mapping[str, object], jvm_options: str) -> None:
        self._folder, self._options, self._jvm_options = folder, options, jvm_options
        self._checkpoints, self._failpoints = 1, 0
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self.is_adopting = False
        """True if the next start takes existing tables over with a new checkpoint."""

    # The process.

    def start(self, changed: Mapping[str, object] | None = None) -> None:
        """Start the job with changed settings; with --adopt after `take_new_checkpoint`."""
        self.starts += 1
        more = ["--adopt"] if self.is_adopting else []
        arguments = [str(self._folder), "resolve", *more, *self._settings(changed)]
        environ = {**os.environ, "SPARK_SUBMIT_OPTS": self._jvm_options}
        with (self._folder / f"job-{self.starts:03}.log").open("wb") as log:
            # A session of its own, so that a signal reaches the driver, its JVM and all that they started.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.launcher", *arguments],
                cwd=ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def run_command(self, *arguments: str, limit_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a `halfway` command with the settings of this job."""
        return run_halfway(*arguments, *self._settings(), limit_s=limit_s)

    def _settings(self, changed: Mapping[str, object] | None = None) -> list[str]:
        return as_options({**self._options, "storage.checkpoint": self.checkpoint, **(changed or {})})

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the job's process group."""
        assert self.process is not None
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        if self.process is not None:
            # The JVM may outlive the group's leader, so the group is killed also when the leader has ended.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)

    def stop(self) -> None:
        """End the job by SIGTERM, as an operator does."""
        assert self.process is not None
        self.process.terminate()
        self.process.wait(60)

    def wait_for_the_end(self) -> None:
        """Wait until the job has ended, and disarm it."""
        assert self.process is not None
        self.process.wait(60)
        self.disarm()

    def log(self) -> str:
        """Return what the last run wrote."""
        file = self._folder / f"job-{self.starts:03}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def last_words(self) -> str:
        """Return the last error that the last run printed, or else its last line."""
        lines = [line for line in self.log().splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        return (errors or lines or ["it printed nothing"])[-1][:1500]

    # The checkpoint.

    @property
    def checkpoint(self) -> Path:
        return self._folder / "checkpoints" / str(self._checkpoints)

    def take_new_checkpoint(self) -> None:
        """Let the next start use a new checkpoint, with --adopt."""
        self._checkpoints += 1
        self.is_adopting = True

    def last_batch(self) -> int:
        """Return the number of the last batch committed in this checkpoint; -1 before the first."""
        return max(LocalFiles(self.checkpoint).batches(COMMITS), default=-1)

    def read_to(self, topic: str) -> dict[int, int]:
        """Return the offset up to which the committed batches have read each partition of a topic."""
        return ends_in((self.checkpoint / OFFSETS / str(self.last_batch())).read_text())[topic]

    def wait_for_batches(self, count: int) -> None:
        """Wait until `count` more batches are committed."""
        goal = self.last_batch() + count
        until(lambda: self.last_batch() >= goal or not self.is_running(), f"batch {goal}")
        if not self.is_running():
            raise ChaosError(f"the job ended: {self.last_words()}")

    # Failpoints.

    def arm(self, step: Step, batches: int, action: str) -> None:
        """Arm a failpoint: the job dies or waits at `step` of the `batches`th batch from now that reaches it."""
        self._failpoints += 1
        for name in (REACHED_FILE, GO_FILE):
            (self._folder / name).unlink(missing_ok=True)
        write_atomically(self._folder / ARM_FILE, {"number": self._failpoints, "step": step, "batches": batches, "action": action})

    def wait_for_step(self) -> int:
        """Wait until the job reaches the armed failpoint, and return the batch id."""
        reached = self._folder / REACHED_FILE
        until(lambda: reached.exists() or not self.is_running(), "the armed step")
        if not reached.exists():
            raise ChaosError(f"the job ended: {self.last_words()}")
        batch_id: int = json.loads(reached.read_text())["batch_id"]
        return batch_id

    def go_on(self) -> None:
        """Let a job go on that waits at a failpoint."""
        (self._folder / GO_FILE).touch()

    def disarm(self) -> None:
        (self._folder / ARM_FILE).unlink(missing_ok=True)
