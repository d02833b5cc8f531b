"""What the soak test takes for growth."""

import pytest

from tests.chaos.soak import grown


@pytest.mark.parametrize(
    ("figure", "first", "last", "is_growth"),
    [
        ("files_after_compaction", 7, 12, False),
        ("files_after_compaction", 7, 220, True),
        ("batch_s", 1.0, 1.2, False),
        ("batch_s", 1.0, 1.4, True),
    ],
)
def test_a_figure_has_grown_if_it_left_its_room(figure: str, first: float, last: float, is_growth: bool) -> None:
    assert grown({figure: (first, last)}) == [figure] * is_growth
