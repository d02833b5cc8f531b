"""The tests use the newest SQLAlchemy that setup.cfg allows. Services have 2.0 too, whose asyncio adapters differ."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_clients_tests_pass_with_sqlalchemy_2_0(tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), "SQLAlchemy==2.0.*"]
    subprocess.run(install, check=True, timeout=120)
    code = "import sqlalchemy, sys, pytest; assert sqlalchemy.__version__.startswith('2.0'); sys.exit(pytest.main(sys.argv[1:]))"
    folders = ["tests/unit/clients/sql", "tests/unit/clients/aio", "tests/unit/clients/testing"]
    command = [sys.executable, "-c", code, "-q", "-m", "not slow and not long", "-p", "no:cacheprovider", *folders]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=270)
    assert done.returncode == 0, done.stdout[-3000:]
