"""docs/architecture.md draws the imports between the folders as they are."""

import re

from tests.support.layers import FOLDERS, modules, room_of, rooms_imported
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()


def imports() -> dict[str, set[str]]:
    """Return the rooms that each room imports, besides itself and `schemas`."""
    found: dict[str, set[str]] = {}
    for path in modules(*FOLDERS):
        room = room_of(path)
        found.setdefault(room, set()).update(rooms_imported(path) - {room, "schemas"})
    return found


def is_implied(graph: dict[str, set[str]], room: str, to: str) -> bool:
    """Return True if `room` reaches `to` through another room."""
    left, seen = [other for other in graph[room] if other != to], set()
    while left:
        other = left.pop()
        if other == to:
            return True
        if other not in seen:
            seen.add(other)
            left.extend(graph[other])
    return False


def drawn() -> set[tuple[str, str]]:
    [diagram] = re.findall(r"```mermaid\n(.*?)```", PAGE, re.DOTALL)
    lines = [line.split(" --> ") for line in diagram.splitlines() if "-->" in line]
    return {(source.strip(), target.strip()) for source, targets in lines for target in targets.split("&")}


def test_the_map_has_every_import_that_does_not_follow_from_others() -> None:
    graph = imports()
    assert drawn() == {(room, to) for room, targets in graph.items() for to in targets if not is_implied(graph, room, to)}


def test_the_table_has_every_folder() -> None:
    rows = set(re.findall(r"^\| \[`([\w/]+)/`\]", PAGE, re.MULTILINE))
    assert rows == imports().keys() - {"pipelines"} | {"src/halfway"}, "each folder has a row"
