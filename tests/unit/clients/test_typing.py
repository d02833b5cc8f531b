"""mypy checks a service against the client's types (py.typed): it accepts right code and rejects wrong code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SERVICE = """
from halfway import AsyncTransactionProducer, CheckRequest, HalfMessage, ListenerByTopic, LocalTransactionState, MessageReader
from halfway import SqlTransactions, TransactionProducer, load_settings

class Orders:
    def execute_local_transaction(self, message: HalfMessage, arg: str) -> LocalTransactionState:
        return LocalTransactionState.COMMIT

    def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState | None:
        return None

class Payments:
    async def execute_local_transaction(self, message: HalfMessage, arg: float) -> LocalTransactionState:
        return LocalTransactionState.COMMIT

    async def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState:
        return LocalTransactionState.COMMIT

kafka = load_settings().kafka
payments = AsyncTransactionProducer(kafka, "payments-service", ListenerByTopic({"payments": Payments()}))
with TransactionProducer(kafka, "orders-service", Orders()) as producer:
    offset: int = producer.send_in_transaction("orders", b"", arg="x").half_offset

for batch in MessageReader(load_settings().storage, topic="orders").follow():
    body: bytes = batch.messages[0].body
"""

INFERRED = """
reveal_type(TransactionProducer(kafka, "orders-service", Orders()))
reveal_type(TransactionProducer(kafka, "orders-service", SqlTransactions(None)))
reveal_type(TransactionProducer(kafka, "orders-service", ListenerByTopic({"orders": Orders(), "orders:placed": Orders()})))
reveal_type(AsyncTransactionProducer(kafka, "payments-service", Payments()))
reveal_type(payments)
"""


def mypy(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Check a service outside the repository, as its author does: mypy finds the package by import, not by path."""
    (folder / "service.py").write_text(source)
    # Two workers of pytest must not write one cache at a time.
    cache = ROOT / ".mypy_cache" / f"service-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(cache), "service.py"]
    return subprocess.run(command, cwd=folder, env={"MYPYPATH": str(ROOT / "src")}, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("", ""), "Success: no issues found"),
        (("-> LocalTransactionState | None:\n        return None", "-> bool:\n        return True"), "incompatible type"),
        (("offset: int", "offset: str"), "Incompatible types in assignment"),
        ((', b"",', ', "text",'), "incompatible type"),
        (
            ('arg="x"', "arg=7"),
            'Argument "arg" to "send_in_transaction" of "TransactionProducer" has incompatible type "int"; expected "str"',
        ),
        (("async def check_local", "def check_local"), "incompatible type"),
    ],
)
def test_a_service_is_checked(tmp_path: Path, change: tuple[str, str], complaint: str) -> None:
    done = mypy(SERVICE.replace(*change) if change[0] else SERVICE, tmp_path)
    assert complaint in done.stdout, done.stdout + done.stderr


def test_the_type_of_arg_is_inferred_from_the_listener(tmp_path: Path) -> None:
    done = mypy(SERVICE + INFERRED, tmp_path)
    found = [line.rpartition('Revealed type is "')[2].rstrip('"') for line in done.stdout.splitlines() if "Revealed" in line]
    sync, loop = "halfway.clients.producer.TransactionProducer", "halfway.clients.aio.async_producer.AsyncTransactionProducer"
    assert found == [f"{sync}[str]", f"{sync}[Any]", f"{sync}[Any]", f"{loop}[float]", f"{loop}[Any]"], done.stdout
