"""Time spans for people."""

import pytest

from halfway.transforms.views.durations import duration_text


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (None, "unknown"),
        (-5, "0 ms"),
        (0, "0 ms"),
        (0.5, "0.5 ms"),
        (250, "250 ms"),
        (999.9, "999 ms"),
        (1_000, "1 s"),
        (1_500, "1.5 s"),
        (59_949, "59.9 s"),
        (59_999, "59.9 s"),
        (60_000, "1 min"),
        (123_456.7, "2 min 3 s"),
        (720_000, "12 min"),
        (3_599_999, "59 min 59 s"),
        (3_600_000, "1 h"),
        (5_400_000, "1 h 30 min"),
        (10_859_999, "3 h"),
        (90_061_000, "1 d 1 h"),
        (172_800_000, "2 d"),
    ],
)
def test_a_span_has_at_most_two_units(ms: float | None, text: str) -> None:
    assert duration_text(ms) == text
