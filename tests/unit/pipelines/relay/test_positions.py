"""Where a relay is, as records of its compacted topic."""

from dataclasses import replace

import pytest

from halfway.pipelines.relay.positions import PositionRecord, Refusal, RelayPositions, Stop, TablePosition, changes, positions_of
from halfway.schemas.errors import RelayError

STOP = Stop(TablePosition(0, 3), "t1", Refusal.TOO_LARGE, "it is too large")
STOPPED = RelayPositions("table", TablePosition(1, 7), {"a/b": STOP, "orders": STOP._replace(after=None)})
TOPICS = ("a/b", "orders")


def test_what_is_written_is_read_again() -> None:
    steps = [RelayPositions("table"), RelayPositions("table", TablePosition(0, 3)), STOPPED, STOPPED.with_stops({"a/b": None}), STOPPED]
    log: list[PositionRecord] = []
    before = None
    for step in steps:
        log += changes("relay", before, step, TOPICS)
        assert positions_of([*log, (b"other", b'{"table": "x", "after": null, "stopped": 0}')]) == {
            "relay": step,
            "other": RelayPositions("x"),
        }
        before = step


def test_only_what_changed_is_written() -> None:
    assert changes("relay", STOPPED, STOPPED, TOPICS) == []
    moved = replace(STOPPED, after=TablePosition(1, 8))
    assert changes("relay", STOPPED, moved, ()) == [(b"relay", b'{"table": "table", "after": "1.8", "stopped": 2}')]
    assert changes("relay", moved, moved.with_stops({"orders": None}), TOPICS) == [
        (b"relay", b'{"table": "table", "after": "1.8", "stopped": 1}'),
        (b"relay/orders", None),
    ]


def test_stops_that_do_not_change_are_not_copied() -> None:
    assert STOPPED.with_stops({"a/b": STOP, "stock": None}) is STOPPED
    both = STOPPED.with_stops({"a/b": None, "orders": STOP, "stock": STOP})
    assert (both.stopped, len(STOPPED.stopped)) == ({"orders": STOP, "stock": STOP}, 2)


def test_stops_that_the_topic_has_lost_are_missed() -> None:
    """Retention, or a topic that was recreated under a relay, may take them and leave the bookmark."""
    _, *stops = changes("relay", None, STOPPED, TOPICS)
    kept, _ = changes("relay", STOPPED, STOPPED.with_stops({"orders": None}), TOPICS)
    assert [positions_of([kept, *each])["relay"].lost for each in ([], stops[:1])] == [1, 0]


POSITIONS = [
    TablePosition(0, 0, -(2**31), 7),
    TablePosition(0, 0, 0, 0),
    TablePosition(0, 0, 3, 500),
    TablePosition(0, 0, 4, 0),
    TablePosition(0, 0),
    TablePosition(0, 1, 0, 0),
]


def test_positions_are_ordered_as_the_table_is_and_have_a_text() -> None:
    assert sorted(POSITIONS, reverse=True) == POSITIONS[::-1]
    assert [TablePosition.parse(str(each)) for each in POSITIONS] == POSITIONS
    assert (str(POSITIONS[2]), str(POSITIONS[4])) == ("0.0:3.500", "0.0")
    assert [each.bookmark for each in POSITIONS[3:]] == [(0, -1), (0, 0), (0, 0)], "the batch is read again, unless all of it was sent"


@pytest.mark.parametrize("text", ["0", "0.1:", "0.1:3", "0.1:3.5.7", "0.1:a.b", ":3.5"])
def test_what_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give "):
        TablePosition.parse(text)


@pytest.mark.parametrize("value", [b"no json", b"[]", b"{}", b'{"table": "t", "after": "yesterday", "stopped": 0}'])
def test_what_no_relay_has_written_is_refused(value: bytes) -> None:
    with pytest.raises(RelayError, match=r"kafka\.relay_topic"):
        positions_of([(b"relay", value)])
