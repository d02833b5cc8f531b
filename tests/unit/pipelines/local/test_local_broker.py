"""The local broker's files, without starting it. What it does is tested with a real one."""

import shutil
from pathlib import Path

from halfway.pipelines.local.broker import LocalBroker

PORT = 20_123


def test_a_copied_folder_has_no_port_yet(tmp_path: Path) -> None:
    """The other broker has it."""
    broker = LocalBroker(tmp_path / "checkout" / "broker")
    broker.directory.mkdir(parents=True)
    broker._configure(PORT)
    assert broker.status() == {"running": False, "bootstrap_servers": f"127.0.0.1:{PORT}"}
    shutil.copytree(tmp_path / "checkout", tmp_path / "copy")
    assert LocalBroker(tmp_path / "copy" / "broker").status() == {"running": False, "bootstrap_servers": None}
