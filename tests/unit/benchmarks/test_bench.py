"""`make bench` fails if the outcome of a run is wrong, whatever its figures."""

import sys
from pathlib import Path

import pytest

from benchmarks import bench
from benchmarks.rig import Figures

RIGHT: Figures = {"tx_per_s": 1, "backlog": {"right": True}}
WRONG: Figures = {"tx_per_s": 1, "backlog": {"right": False}}


@pytest.mark.parametrize(("runs", "code"), [([RIGHT, RIGHT], 0), ([RIGHT, WRONG], 1), ([WRONG, RIGHT], 1)])
def test_a_wrong_outcome_of_any_run_is_told_after_the_figures(
    runs: list[Figures], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = iter(runs)
    monkeypatch.setattr(bench, "in_own_process", lambda *_: next(left))
    monkeypatch.setattr(bench, "end_at_sigterm", lambda: None)
    monkeypatch.setattr(sys, "argv", ["bench", "--only", "relay", "--runs", "2", "--out", str(tmp_path / "bench.json")])
    assert bench.main() == code
    told = capsys.readouterr()
    assert "tx_per_s" in told.out
    assert ("relay.backlog.right" in told.err) == bool(code)
    assert (tmp_path / "bench.json").exists()
