"""Fixtures of the tests that need neither Spark nor Kafka."""

from pathlib import Path

import pytest

from tests.support.fresh_python import build_wheel, copy_source


@pytest.fixture
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, in which a command finds no configuration, no broker and no JARs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HALFWAY_HOME", raising=False)
    return tmp_path


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install .` builds."""
    source = copy_source(tmp_path_factory.mktemp("source") / "halfway")
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))
