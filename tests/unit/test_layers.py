"""The rooms and their doors: which folder may import which, and one name for one thing (docs/architecture.md)."""

import ast
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from halfway.schemas.events import OUTCOME_SCHEMA
from halfway.schemas.outcomes import Phase
from halfway.schemas.state_format import ENTRY_SCHEMA, WAITING_COMMIT
from halfway.transforms.protocol import Half, Outcome
from tests.support.layers import FOLDERS, imported, modules, room_of, rooms_imported
from tests.support.paths import ROOT

GRANTS = {
    "schemas": set(),
    "transforms": {"schemas"},
    "transforms/views": {"transforms", "schemas"},
    "conf": {"schemas"},
    "clients": {"clients/kafka", "schemas"},
    "clients/aio": {"clients", "clients/kafka", "schemas"},
    "clients/sql": {"clients", "clients/reading", "schemas"},
    "clients/reading": {"schemas"},
    "clients/testing": {"clients", "clients/aio", "clients/kafka", "transforms", "schemas"},
    "clients/kafka": {"schemas"},
    "pipelines": {"pipelines/cli"},
    "pipelines/runtime": {"conf", "schemas"},
    "pipelines/kafka": {"clients/kafka", "schemas"},
    "pipelines/storage": {"schemas"},
    "pipelines/resolve": {"pipelines/kafka", "pipelines/storage", "pipelines/runtime", "transforms", "schemas"},
    "pipelines/operate": {"clients/reading", "pipelines/kafka", "pipelines/relay", "pipelines/storage", "transforms/views", "schemas"},
    "pipelines/operate/doctor": {
        "clients/kafka",
        "clients/reading",
        "pipelines/kafka",
        "pipelines/relay",
        "pipelines/storage",
        "pipelines/runtime",
        "schemas",
    },
    "pipelines/local": {"pipelines/resolve", "pipelines/kafka", "pipelines/runtime", "conf", "schemas"},
    "pipelines/relay": {"pipelines/kafka", "clients/kafka", "clients/reading", "schemas"},
    "pipelines/demo": {"pipelines/kafka", "pipelines/storage", "pipelines/runtime", "clients", "schemas"},
}
"""Room → the rooms it may import besides itself. Entry points alone import `pipelines/cli`, which may import all."""
GRANTS["pipelines/cli"] = set(GRANTS) - {"pipelines"}
LARGEST_ROOM = 15


@pytest.mark.parametrize("path", modules(*FOLDERS), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_what_it_is_granted(path: Path) -> None:
    room = room_of(path)
    assert rooms_imported(path) <= GRANTS[room] | {room}
    assert "halfway" not in imported(path), "the public face is for services: it would pass every grant by"


def test_rooms_import_each_other_in_no_circle() -> None:
    left = {room: {to for path in modules(*FOLDERS) if room_of(path) == room for to in rooms_imported(path)} - {room} for room in GRANTS}
    while free := [room for room, needs in left.items() if not needs & left.keys()]:
        for room in free:
            del left[room]
    assert not left


@pytest.mark.parametrize("room", GRANTS)
def test_a_room_says_what_belongs_there_and_holds_no_more_than_one_can_see(room: str) -> None:
    says = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text()))
    [named] = re.findall(r"May import (.*)\.$", says or "", re.DOTALL)
    granted = {name if name in GRANTS else f"pipelines/{name}" for name in re.findall(r"`([\w/]+)`", named)}
    assert GRANTS[room] == (set(GRANTS) - {room, "pipelines"} if named == "everything" else granted)
    assert len([path for path in modules(room) if room_of(path) == room and path.stem != "__init__"]) <= LARGEST_ROOM


def test_one_name_for_one_module() -> None:
    """A command has the name of what it commands, and nobody imports it."""
    names = Counter(path.stem for path in modules(*FOLDERS) if room_of(path) != "pipelines/cli" and not path.stem.startswith("__"))
    assert {name for name, times in names.items() if times > 1} == set()
    assert not {"home", "files", "reader", "ledger", "utils", "helpers", "common", "misc"} & names.keys()


def test_one_name_for_one_class() -> None:
    names: Counter[str] = Counter()
    for path in modules(*FOLDERS):
        names.update(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))
    assert {name for name, times in names.items() if times > 1} == set()


def test_nothing_is_imported_under_its_old_name() -> None:
    """`import schemas` would be a second copy of every class, or an application's own package."""
    for path in modules(*FOLDERS, "src", "tests", "benchmarks", "examples", "notebooks"):
        for name in imported(path):
            assert name.split(".")[0] not in FOLDERS, f"{path}: import halfway.{name}"
    assert not {name.split(".")[0] for name in sys.modules} & set(FOLDERS)


def test_tests_import_no_test_module_and_benchmarks_only_what_supports_tests() -> None:
    for path in modules("tests"):
        assert not [name for name in imported(path) if name.startswith("tests.") and re.search(r"\.(test_\w+|conftest)", name)], path
    for path in modules("benchmarks", "examples", "notebooks"):
        assert not [name for name in imported(path) if re.match(r"tests(?!\.support)|halfway\.pipelines\.cli", name)], path


def test_the_core_needs_nothing_but_python() -> None:
    used = imported(ROOT / "transforms" / "protocol.py") | imported(ROOT / "transforms" / "horizon.py")
    assert {name.split(".")[0] for name in used} == {"collections", "dataclasses", "operator", "typing", "halfway"}
    own = {".".join(name.split(".")[1:3]) for name in used if name.startswith("halfway.")}
    assert own == {"schemas.headers", "schemas.outcomes", "schemas.tick_value", "transforms.horizon"}


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("schemas", {"socket", "ssl", "os", "time", "random", "secrets", "uuid", "subprocess", "urllib", "confluent_kafka"}),
        ("transforms", {"time", "datetime", "random", "secrets", "uuid", "os", "gc", "socket", "pathlib", "confluent_kafka"}),
    ],
)
def test_a_room_keeps_its_sign(folder: str, forbidden: set[str]) -> None:
    """No I/O, clock or chance in what the contract and the protocol are made of."""
    for path in modules(folder):
        assert not {name.split(".")[0] for name in imported(path)} & forbidden, path
        assert not re.search(r"\.(collect|toPandas|toArrow|read_text|read_bytes|open)\(\)|(?<![\w.])open\(", path.read_text()), path


def test_no_pickle_anywhere() -> None:
    """Whoever can write what is unpickled runs code here. State, tables and topics are Arrow, Parquet, JSON, bytes."""
    unpicklers = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib"}
    for path in modules(*FOLDERS, "src", "benchmarks", "examples", "notebooks"):
        assert not {part for name in imported(path) for part in name.split(".")} & unpicklers, path
        assert not re.search(r"(read|to|allow)_pickle|pickleFile|saveAsPickle", path.read_text()), path


def test_one_definition_of_each_row() -> None:
    assert list(Outcome._fields) == OUTCOME_SCHEMA.names
    of_half = [name for name in Half._fields if name not in ("transaction_id", "immunity_ms", "discarded_ms", "valid_ms")]
    start_ms = {"at_ms": "start_ms"}
    timer = ["check_times", "due_ms", "checked_ms", "late_put_offs", "put_off_ms"]
    assert ENTRY_SCHEMA.names == ["transaction_id", "entry", *(start_ms.get(name, name) for name in of_half), *timer]
    assert max(Phase) < WAITING_COMMIT


def test_no_admin_client_of_librdkafka_asks_a_groups_coordinator_but_in_a_command() -> None:
    """It ends the process where the connection breaks at that moment (librdkafka #4605, #5040, #5397)."""
    asks = re.compile(r"\.(describe_consumer_groups|list_consumer_group_offsets|alter_consumer_group_offsets|delete_consumer_groups)\(")
    assert [path.name for path in modules(*FOLDERS) if asks.search(path.read_text())] == ["relay_status.py"]
