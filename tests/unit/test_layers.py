"""Imports point one way: pipelines → transforms → schemas, clients → schemas (design §8); the core knows no engine."""

import ast
import re
from pathlib import Path

import pytest

from schemas.events import OUTCOME_SCHEMA
from schemas.outcomes import Phase
from schemas.state import ENTRY_SCHEMA, WAITING_COMMIT
from transforms.protocol import Outcome, Transaction

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "schemas": {"schemas"},
    "transforms": {"transforms", "schemas"},
    "clients": {"clients", "schemas"},
    "pipelines": {"pipelines", "transforms", "schemas"},
}
OURS = set(ALLOWED)


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def modules(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_point_one_way(package: str) -> None:
    for path in modules(package):
        ours = {name.split(".")[0] for name in imported(path)} & OURS
        # The demo is a user of both sides: a service that sends, and an operator who looks.
        allowed = ALLOWED[package] | ({"clients"} if path.name.startswith("demo") else set())
        assert ours <= allowed, path


def test_the_core_needs_nothing_but_python() -> None:
    used = {name.split(".")[0] for name in imported(ROOT / "transforms" / "protocol.py")}
    assert used == {"collections", "dataclasses", "operator", "typing", "schemas"}


def test_nothing_that_decides_looks_at_a_clock_or_at_chance() -> None:
    for path in modules("transforms"):
        assert not {name.split(".")[0] for name in imported(path)} & {"time", "datetime", "random", "secrets", "uuid", "os"}, path


def test_no_pickle_anywhere() -> None:
    """Whoever can write what is unpickled runs code here: state, tables and topics are Arrow, Parquet, JSON and bytes."""
    unpicklers = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib"}
    for package in (*OURS, "benchmarks", "examples", "notebooks"):
        for path in modules(package):
            assert not {part for name in imported(path) for part in name.split(".")} & unpicklers, path
            assert not re.search(r"(read|to|allow)_pickle|pickleFile|saveAsPickle", path.read_text()), path


def test_one_definition_of_each_row() -> None:
    assert list(Outcome._fields) == OUTCOME_SCHEMA.fieldNames()
    assert [name for name in ENTRY_SCHEMA.names if name != "transaction_id"] == ["entry", *Transaction._fields[1:]]
    assert max(Phase) < WAITING_COMMIT
