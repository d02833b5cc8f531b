"""Which topics `halfway erase` names, and until when they may hold what it has erased from the tables."""

import time

import pytest

from halfway.conf.loader import load_settings
from halfway.pipelines.operate import erase

DAY_MS = 86_400_000


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_replay_that_was_rolled_back_has_no_row_but_its_half_and_its_checks_are_in_the_topics(
    is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row may be weeks old, and the last half of its id a moment; its group may have had another check topic then."""
    own = {"half_topic": "half", "op_topic": "op", "check_topic": "check", "check_topics": {"own": "check-own"}}
    settings = load_settings(environ={}, overrides={f"kafka.{name}": value for name, value in own.items()})
    monkeypatch.setattr(erase, "_kept_ms", lambda _: (dict.fromkeys(settings.kafka.job_topics(), DAY_MS), ""))
    before_ms = time.time_ns() // 1_000_000
    remains = list(erase._remains(settings, is_refused=is_refused))
    assert [each.topic for each in remains] == ["half", "check", "check-own", *(["op"] if is_refused else [])]
    assert all(each.until_ms is not None and 0 <= each.until_ms - before_ms - DAY_MS < 60_000 for each in remains)
