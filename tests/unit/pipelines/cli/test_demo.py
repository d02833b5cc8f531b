"""What `halfway demo` prints while it waits."""

from dataclasses import replace

import pytest

from halfway.pipelines.cli.demo import _ProgressLines
from halfway.pipelines.demo.run import DemoCounts, DemoProgress


def test_a_line_that_stands_still_is_rarer(capsys: pytest.CaptureFixture[str]) -> None:
    show, nothing = _ProgressLines(), DemoProgress(0, 20, DemoCounts(), 0)
    for second in range(80):
        # It sends for 20 s, waits until 60 s, and then one is committed each second.
        found = DemoCounts(committed=max(0, second - 60))
        show(replace(nothing, sent=min(second, 20), found=found, seconds=float(second)))
    seconds = [int(line.rpartition("=")[2]) for line in capsys.readouterr().out.splitlines()]
    assert seconds == [0, 5, 10, 15, 20, 40, 60, 65, 70, 75]
