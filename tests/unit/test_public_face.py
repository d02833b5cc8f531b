"""The public names: one list in three places, each the object of its module, and nothing heavy is loaded for them."""

import ast
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import halfway

HEAVY = {"confluent_kafka", "pydantic", "pyspark", "pandas", "pyarrow"}
IMPORT_ALL = "from halfway import " + ", ".join(halfway.__all__)


def type_checking_imports() -> dict[str, str]:
    """Return name → module of the imports that only type checkers see."""
    assert halfway.__file__ is not None
    [block] = [node for node in ast.parse(Path(halfway.__file__).read_text()).body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert len(imports) == len(block.body)
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def loaded_by(statement: str) -> set[str]:
    """Run a statement in a fresh interpreter; return the top-level names of the modules that it loaded."""
    # Tools that other packages install into the environment may load modules at every start.
    code = f"import sys; before = set(sys.modules)\n{statement}\nimport json; print(json.dumps([*set(sys.modules) - before]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    names: list[str] = json.loads(done.stdout)
    return {name.split(".")[0] for name in names}


def test_the_lists_agree() -> None:
    assert type_checking_imports() == halfway._HOMES
    assert halfway.__all__ == sorted(halfway._HOMES) == dir(halfway)


@pytest.mark.parametrize("name", halfway.__all__)
def test_a_name_is_the_object_of_the_module_that_defines_it(name: str) -> None:
    value = getattr(halfway, name)
    assert value is getattr(import_module(halfway._HOMES[name]), name)
    assert value.__module__ == halfway._HOMES[name]


def test_any_other_name_is_missing() -> None:
    with pytest.raises(AttributeError, match="module 'halfway' has no attribute 'Outbox'"):
        _ = halfway.Outbox
    with pytest.raises(ImportError, match="cannot import name 'Outbox'"):
        exec("from halfway import Outbox")


def test_a_bare_import_loads_nothing_heavy() -> None:
    assert loaded_by("import halfway") & HEAVY == set()


def test_a_star_import_takes_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from halfway import *", names)
    assert names.keys() - {"__builtins__"} == set(halfway.__all__)


def test_a_service_loads_no_spark() -> None:
    loaded = loaded_by(IMPORT_ALL)
    assert loaded & HEAVY == {"confluent_kafka", "pydantic"}
    assert loaded & {"py4j", "delta", "typer", "rich"} == set()


def test_a_service_imports_in_a_fraction_of_a_second() -> None:
    """The bound is a ratio, because machines differ: 0.27 s of processor time on ours, 0.15 s for what it needs."""

    def used_s(statement: str) -> float:
        code = f"import time; began_s = time.process_time()\n{statement}\nprint(time.process_time() - began_s)"
        run = [sys.executable, "-c", code]
        return min(float(subprocess.run(run, capture_output=True, text=True, check=True, timeout=60).stdout) for _ in range(5))

    assert used_s(IMPORT_ALL) < 4 * used_s("import confluent_kafka, yaml; from pydantic import BaseModel")
