"""The local broker's files, without starting it. What it does is tested with a real one."""

import json
import shutil
from pathlib import Path

import pytest

from halfway.pipelines.local.broker import LocalBroker
from halfway.schemas.errors import SetupError

PORT = 20_123


def test_a_copied_folder_has_no_port_yet(tmp_path: Path) -> None:
    """The other broker has it."""
    broker = LocalBroker(tmp_path / "checkout" / "broker")
    broker.directory.mkdir(parents=True)
    broker._configure(PORT)
    assert broker.status() == {"running": False, "bootstrap_servers": f"127.0.0.1:{PORT}"}
    shutil.copytree(tmp_path / "checkout", tmp_path / "copy")
    assert LocalBroker(tmp_path / "copy" / "broker").status() == {"running": False, "bootstrap_servers": None}


@pytest.mark.parametrize("name", ["plain", "Größe", "a b", "back\\slash", "日本", "🍐"])
def test_java_reads_the_folder_as_it_is_named(name: str, tmp_path: Path) -> None:
    """It reads the file as ISO-8859-1 with escapes, and the broker would make another folder beside this one."""
    broker = LocalBroker(tmp_path / name / "broker")
    broker.directory.mkdir(parents=True)
    broker._configure(PORT)
    [line] = [line for line in (broker.directory / "server.properties").read_bytes().splitlines() if line.startswith(b"log.dirs=")]
    assert line.isascii()
    assert json.loads(f'"{line.decode().removeprefix("log.dirs=")}"') == str(broker.directory / "data")
    assert broker.status()["bootstrap_servers"] == f"127.0.0.1:{PORT}"


def test_a_folder_with_a_comma_is_refused(tmp_path: Path) -> None:
    """Kafka would take it for two."""
    with pytest.raises(SetupError, match="has a comma"):
        LocalBroker(tmp_path / "a,b").start()
