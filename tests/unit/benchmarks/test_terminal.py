"""A picture of a terminal: the whole text, nothing of this machine, and nothing that is loaded from elsewhere."""

import re
from html import unescape
from pathlib import Path

import pytest

from benchmarks import terminal
from tests.support.paths import ROOT

LONG = "a " * 80 + "word"


@pytest.fixture
def svg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(terminal, "OUT", tmp_path)
    terminal.picture("doctor", "halfway doctor", f"\x1b[32m✓\x1b[0m disk  {ROOT}/build/pictures/warehouse\n{LONG}\n")
    return (tmp_path / "doctor.svg").read_text()


def test_all_of_the_text_is_there(svg: str) -> None:
    text = unescape(" ".join(re.findall(r"<text [^>]*>([^<]*)</text>", svg))).replace("\xa0", " ")
    assert "$ halfway doctor" in text
    assert "✓" in text
    assert LONG in text


def test_no_path_of_this_machine_is(svg: str) -> None:
    assert str(ROOT) not in svg
    assert "~/halfway/.halfway/warehouse" in unescape(svg)


def test_nothing_is_loaded_from_elsewhere(svg: str) -> None:
    assert re.findall(r"(?:url\(|href=)\"?'?http", svg) == []


def test_a_narrow_text_has_a_narrow_picture_with_letters_of_the_same_size(svg: str, tmp_path: Path) -> None:
    terminal.picture("version", "halfway --version", "1.0\n")
    narrow = (tmp_path / "version.svg").read_text()
    (shown, drawn), (wide_shown, wide_drawn) = (
        map(float, re.findall(r'width="(\d+)" viewBox="0 0 (\S+)', picture)[0]) for picture in (narrow, svg)
    )
    assert drawn < 300
    assert wide_drawn > 1_000
    assert shown / drawn == pytest.approx(wide_shown / wide_drawn, rel=0.01)
