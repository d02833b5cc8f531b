"""The short form of `make chaos`: the most telling faults, in a world of one broker and in one of three."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

ON_ONE_BROKER = (
    "driver killed after messages",
    "driver killed before checks",
    "service killed",
    "broker killed in mid-batch",
    "second job on the checkpoint",
    "driver killed after discarded",
    "newest file of commits removed",
    "compacted by delta-rs",
    "topic gets more partitions",
    "checkpoint lost",
)
ON_THREE_BROKERS = (
    "leader killed",
    "stale replica comes up first",
    "leader killed, driver killed after messages",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_faults_lose_nothing_double_nothing_and_get_nothing_wrong(tmp_path: Path) -> None:
    facts = make(ON_ONE_BROKER, 1, tmp_path / "chaos.json", limit_s=880)
    assert facts["transactions"] > 100


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_faults_of_a_replicated_kafka_lose_nothing_double_nothing_and_get_nothing_wrong(tmp_path: Path) -> None:
    make(ON_THREE_BROKERS, 3, tmp_path / "chaos.json", limit_s=480)


def make(faults: Sequence[str], brokers: int, out: Path, limit_s: float) -> dict[str, Any]:
    """Make faults in one world, expect nothing lost, twice or wrong, and return the figures."""
    options = ["--only", ";".join(faults), "--brokers", str(brokers), "--seed", "7", "--out", str(out)]
    command = [sys.executable, "-m", "tests.chaos", *options]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=limit_s)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    facts: dict[str, Any] = json.loads(out.read_text())
    assert (facts["faults"], facts["lost"], facts["twice"], facts["wrong"]) == (len(faults), 0, 0, 0)
    assert not facts["failed"]
    return facts
