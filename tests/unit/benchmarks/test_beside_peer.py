"""The picture beside RocketMQ shows the figures of the page, and each of them."""

from pathlib import Path

import pytest

from benchmarks.beside_peer import PAGE, draw, in_ms, table
from tests.support.paths import ROOT

ROWS = [("32 threads, until readable", ["8,424", "7,854"]), ("a backlog", ["–", "24,900"]), ("p99", ["7.4 ms", "2.33 s"])]


@pytest.fixture
def page() -> str:
    rows = "\n".join(f"| {what} | {theirs} | {ours} |" for what, (theirs, ours) in ROWS)
    return f"# Page\n\n## Beside RocketMQ\n\nWords.\n\n| | RocketMQ | Halfway |\n|---|---|---|\n{rows}\n\n## Next\n\n| a | b | c |\n"


def test_the_table_ends_with_its_section(page: str) -> None:
    assert table(page) == (["RocketMQ", "Halfway"], ROWS)


@pytest.mark.parametrize(("text", "ms"), [("2.2 ms", 2.2), ("1.54 s", 1_540), ("8,424/s", None), ("–", None)])
def test_only_times_are_latencies(text: str, ms: float | None) -> None:
    assert in_ms(text) == ms


def test_each_figure_is_drawn(page: str, tmp_path: Path) -> None:
    draw(page, tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text()
    assert all(f">{text}</text>" in drawn for what, cells in ROWS for text in (what, *cells))


def test_the_picture_is_that_of_the_page() -> None:
    """If this fails, `make pictures` draws it again."""
    _, rows = table((ROOT / PAGE).read_text())
    drawn = (ROOT / "docs" / "pictures" / "beside_rocketmq.svg").read_text()
    assert [text for what, cells in rows for text in (what, *cells) if f">{text.removesuffix('/s')}</text>" not in drawn] == []
