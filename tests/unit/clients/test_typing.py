"""mypy checks a service against the client's types (py.typed): it accepts right code and rejects wrong code."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SERVICE = """
from halfway import CheckRequest, HalfMessage, LocalTransactionState, TransactionProducer, load_settings

class Orders:
    def execute_local_transaction(self, message: HalfMessage, arg: str) -> LocalTransactionState:
        return LocalTransactionState.COMMIT

    def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState | None:
        return None

with TransactionProducer(load_settings().kafka, "orders-service", Orders()) as producer:
    offset: int = producer.send_in_transaction("orders", b"", arg="x").half_offset
"""


def mypy(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Check a service outside the repository, as its author does: mypy finds the package by import, not by path."""
    (folder / "service.py").write_text(source)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache" / "service"), "service.py"]
    return subprocess.run(command, cwd=folder, env={"MYPYPATH": str(ROOT / "src")}, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("", ""), "Success: no issues found"),
        (("-> LocalTransactionState | None:\n        return None", "-> bool:\n        return True"), "incompatible type"),
        (("offset: int", "offset: str"), "Incompatible types in assignment"),
        ((', b"",', ', "text",'), "incompatible type"),
    ],
)
def test_a_service_is_checked(tmp_path: Path, change: tuple[str, str], complaint: str) -> None:
    done = mypy(SERVICE.replace(*change) if change[0] else SERVICE, tmp_path)
    assert complaint in done.stdout, done.stdout + done.stderr
