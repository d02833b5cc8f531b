"""The short form of `make chaos`: the most telling faults, in a world of one broker."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

FAULTS = (
    "driver killed after messages",
    "broker killed in mid-batch",
    "checkpoint lost",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_faults_lose_nothing_double_nothing_and_get_nothing_wrong(tmp_path: Path) -> None:
    out = tmp_path / "chaos.json"
    command = [sys.executable, "-m", "tests.chaos", "--only", ";".join(FAULTS), "--brokers", "1", "--seed", "7", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=1780)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    facts: dict[str, Any] = json.loads(out.read_text())
    assert (facts["faults"], facts["lost"], facts["twice"], facts["wrong"]) == (len(FAULTS), 0, 0, 0)
    assert not facts["failed"]
    assert facts["transactions"] > 100
