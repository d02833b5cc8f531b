from pathlib import Path

import pytest

from tests.kills.consumer import kill_consumers


@pytest.mark.timeout(170)
def test_a_consumer_that_is_killed_has_each_effect_once(tmp_path: Path) -> None:
    """`make kills DATABASES=consumer` kills more of them."""
    killed = kill_consumers(tmp_path, 15)
    assert killed.wrong == []
    assert killed.in_block >= 3
    assert killed.messages > 20
