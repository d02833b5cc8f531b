"""Which file of the product imports which folder, read from the source."""

import ast
from pathlib import Path

from tests.support.paths import ROOT

FOLDERS = ("schemas", "transforms", "clients", "conf", "pipelines")


def imported(path: Path) -> set[str]:
    """Return the dotted names of the modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return names


def modules(*folders: str) -> list[Path]:
    found = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    assert found
    return found


def room_of(path: Path) -> str:
    return str(path.parent.relative_to(ROOT))


def rooms_imported(path: Path) -> set[str]:
    """Return the rooms of the product's modules that a file imports."""
    rooms = set()
    for name in imported(path):
        if name.startswith("halfway."):
            module = ROOT / Path(*name.split(".")[1:])
            if module.with_suffix(".py").is_file():
                rooms.add(room_of(module))
    return rooms
