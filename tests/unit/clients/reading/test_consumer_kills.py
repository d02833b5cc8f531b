from pathlib import Path

import pytest

from tests.kills.consumer import Killed, kill_consumers
from tests.kills.run import Findings


@pytest.mark.timeout(170)
def test_a_consumer_that_is_killed_has_each_effect_once(tmp_path: Path) -> None:
    """`make kills DATABASES=consumer` kills more of them."""
    killed = kill_consumers(tmp_path, 15)
    assert killed.wrong == []
    assert killed.in_block >= 3
    assert killed.messages > 20
    assert killed.undone() == []


@pytest.mark.parametrize(
    ("found", "undone"),
    [
        (Killed(1, 0, 2, [("a", 0)]), []),
        (Killed(1, 1, 2, [("a", 0), ("b", 0)]), ["no message was delivered"]),
        (Killed(99, 0, 2, []), []),
        (Killed(100, 0, 2, []), ["no kill hit a consumer between effect and commit"]),
        (Findings(99, 1, 1, 0, 0, [], [], [], []), []),
        (Findings(100, 1, 1, 0, 0, [], [], [], []), ["no check was answered"]),
        (Findings(99, 0, 0, 0, 0, [], [], [], []), ["no order was placed"]),
    ],
)
def test_a_run_that_has_done_nothing_is_told(found: Killed | Findings, undone: list[str]) -> None:
    assert found.undone() == undone
