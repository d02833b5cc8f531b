"""What ticks say, written and read."""

import pytest

from halfway.schemas.tick_value import ALL_ASKED, TickValue


@pytest.mark.parametrize("value", [TickValue(), TickValue(("a", "b"), "own", 7)])
def test_a_tick_says_what_was_written(value: TickValue) -> None:
    assert TickValue.parse(value.to_bytes()) == value


@pytest.mark.parametrize("value", [None, b"", b"{}", b'{"absent_groups": []}', b'{"later": 1}'])
def test_a_tick_may_say_nothing(value: bytes | None) -> None:
    assert TickValue.parse(value) == TickValue((), "", ALL_ASKED)


@pytest.mark.parametrize(
    "value", [b"{", b"[]", b"7", b'{"job": null}', b'{"job": 7}', b'{"absent_groups": "a"}', b'{"asked_ms": -1}', b"[" * 100_000, b"\xff"]
)
def test_a_tick_that_breaks_the_contract_says_nothing(value: bytes) -> None:
    assert TickValue.parse(value) is None
