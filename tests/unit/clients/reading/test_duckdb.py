"""DuckDB reads the table as docs/reading.md shows."""

import re
from pathlib import Path

import pytest

from tests.support.message_tables import append, row
from tests.support.paths import ROOT


def test_the_page_prints_the_messages_of_its_topic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = re.findall(r"^## SQL: DuckDB$.*?```python\n(.*?)```", (ROOT / "docs" / "reading.md").read_text(), re.DOTALL | re.MULTILINE)
    rows = [row((0, 0), 1, keys="order 7", body=b"apples"), row((0, 0), 2, topic="refunds", body=b"pears")]
    append(tmp_path / ".halfway" / "warehouse" / "messages", rows)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs/reading.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "order 7" in printed
    assert "apples" in printed
    assert "pears" not in printed
