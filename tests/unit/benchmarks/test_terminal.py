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
