"""Fixtures of the tests that need neither Spark nor Kafka."""

from pathlib import Path

import pytest


@pytest.fixture
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, in which a command finds no configuration, no broker and no JARs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HALFWAY_HOME", raising=False)
    return tmp_path
