"""`make run` stops the broker that it has started, whenever it is interrupted. A script stands for the command.

`make setup` shows pip's progress on a terminal, and `make notebooks` fetches no database.
"""

import os
import pty
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest

from tests.support.paths import ROOT
from tests.support.waiting import until

COMMAND = """#!/bin/sh
echo "$* begins" >> {log}
trap 'echo "$* is terminated" >> {log}; exit 143' TERM
while [ "$*" = "{held}" ]; do [ -e {release} ] && break; sleep 0.05; done
[ "$*" = "broker start" ] && echo "the broker {found} at 127.0.0.1:1"
[ "$*" != "demo" ] || exit {code}
"""


class Run:
    """`make run` with a command that waits in one of its steps; the end of `with` ends both."""

    def __init__(self, folder: Path, held: str = "", found: str = "is running", code: int = 0) -> None:
        self._log, self._release, self._held = folder / "log", folder / "release", held
        command = folder / "halfway"
        command.write_text(COMMAND.format(log=self._log, held=held, release=self._release, found=found, code=code))
        command.chmod(0o700)
        make = ["make", "--silent", "--old-file=setup", "run", f"HALFWAY={command}"]
        self.process = subprocess.Popen(make, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)

    def __enter__(self) -> Self:
        try:
            until(lambda: not self._held or f"{self._held} begins" in self.steps, self._held, 20)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    @property
    def steps(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []

    def release(self) -> None:
        self._release.touch()


@pytest.mark.parametrize("code", [0, 1])
def test_the_broker_is_stopped_and_the_demos_outcome_is_the_targets(tmp_path: Path, code: int) -> None:
    with Run(tmp_path, code=code) as run:
        assert bool(run.process.wait(30)) == bool(code)
    assert run.steps == ["broker start begins", "demo begins", "broker stop begins"]


def test_a_broker_that_was_running_is_left_running(tmp_path: Path) -> None:
    with Run(tmp_path, found="was already running") as run:
        assert run.process.wait(30) == 0
    assert run.steps == ["broker start begins", "demo begins"]


def test_terminated_while_the_broker_starts_it_stops_the_broker(tmp_path: Path) -> None:
    with Run(tmp_path, held="broker start") as run:
        run.process.send_signal(signal.SIGTERM)
        run.release()
        assert run.process.wait(30) != 0
    assert run.steps[-1] == "broker stop begins"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_during_the_demo_it_ends_the_demo_and_stops_the_broker(tmp_path: Path, number: signal.Signals) -> None:
    with Run(tmp_path, held="demo") as run:
        if number is signal.SIGINT:
            os.killpg(run.process.pid, number)  # as a terminal sends it
        else:
            run.process.send_signal(number)
        assert run.process.wait(30) != 0
    assert run.steps == ["broker start begins", "demo begins", "demo is terminated", "broker stop begins"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_pip_shows_its_progress_on_a_terminal_and_not_in_a_log(tmp_path: Path, is_terminal: bool) -> None:
    python, log = tmp_path / "bin" / "python", tmp_path / "log"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$*" >> {log}\n')
    python.chmod(0o700)
    make = ["make", "--silent", "--old-file=tools", "setup", f"VENV={tmp_path}", f"PYTHON={python}"]
    terminal, other_end = pty.openpty()
    out = terminal if is_terminal else subprocess.DEVNULL
    done = subprocess.run(make, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.DEVNULL, timeout=30, check=False)
    os.close(terminal)
    os.close(other_end)
    assert done.returncode == 0
    [installs] = [line for line in log.read_text().splitlines() if "requirements.lock" in line]
    assert ("--quiet" in installs) != is_terminal


def test_the_notebooks_need_no_database() -> None:
    planned = subprocess.run(["make", "-n", "--old-file=setup", "notebooks"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "notebooks.explore_pending" in planned
    assert "databases" not in planned
