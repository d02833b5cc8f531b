"""Every command of the README is run as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
MAKE, JOB = BLOCKS


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A new user's environment, with everything that is made below a temporary folder."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HALFWAY_HOME": str(tmp_path / "home"),
        "HALFWAY__STORAGE__WAREHOUSE": str(tmp_path / "warehouse"),
        "HALFWAY__STORAGE__CHECKPOINT": str(tmp_path / "checkpoint"),
    }


def shell(command: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=400, stdin=subprocess.DEVNULL
    )


def test_there_are_two_blocks_of_commands() -> None:
    assert [line.split("#")[0].strip() for line in MAKE.splitlines()] == ["make run", "make test"]  # `make test` is what runs this


@pytest.mark.timeout(500)
def test_make_run(environ: dict[str, str]) -> None:
    done = shell("make run", environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the broker is stopped" in done.stdout + done.stderr


@pytest.mark.timeout(300)
def test_the_job_step_by_step(environ: dict[str, str]) -> None:
    try:
        for line in JOB.splitlines():
            done = shell(line, environ)
            assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
    finally:
        shell("halfway broker stop", environ)
