"""Which topics `halfway erase` names, and until when they may hold what it has erased from the tables."""

import time

import pytest

from halfway.conf.loader import load_settings
from halfway.pipelines.operate import erase
from halfway.schemas.tables import Table

DAY_MS = 86_400_000
NOTHING = erase._Found(0, 0, frozenset())


@pytest.mark.parametrize(
    ("table", "groups", "producer_group", "topics"),
    [
        (Table.MESSAGES, {"g"}, None, ["half", "check"]),
        (Table.DISCARDED, {"g", "own"}, None, ["half", "check", "check-own"]),
        (Table.DISCARDED, {"g", "own"}, "own", ["half", "check-own"]),
        (Table.QUARANTINE, set(), None, ["half", "check", "check-own", "op"]),
        (Table.QUARANTINE, set(), "g", ["half", "check", "op"]),
    ],
)
def test_a_replay_that_was_rolled_back_has_no_row_but_its_half_and_its_checks_are_in_the_topics(
    table: Table, groups: set[str], producer_group: str | None, topics: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row may be weeks old, and the last half of its id a moment; a record that was refused may be of any group."""
    own = {"half_topic": "half", "op_topic": "op", "check_topic": "check", "check_topics": {"own": "check-own"}}
    settings = load_settings(environ={}, overrides={f"kafka.{name}": value for name, value in own.items()})
    monkeypatch.setattr(erase, "_kept_ms", lambda _: (dict.fromkeys(settings.kafka.job_topics(), DAY_MS), ""))
    found = {each: erase._Found(1, 1, frozenset(groups)) if each is table else NOTHING for each in Table}
    before_ms = time.time_ns() // 1_000_000
    remains = list(erase._remains(settings, found, producer_group))
    assert [each.topic for each in remains] == topics
    assert all(each.until_ms is not None and 0 <= each.until_ms - before_ms - DAY_MS < 60_000 for each in remains)
