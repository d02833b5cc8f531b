"""The pages agree with the repository: links, citations, names and settings exist, and lines are short enough."""

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

import halfway
from halfway.pipelines.cli.app import app
from halfway.schemas.outcomes import Reason
from halfway.schemas.settings import Settings
from halfway.schemas.tables import ERASURES, ERASURES_SCHEMA, TABLE_SCHEMAS, Table
from tests.support.paths import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
RULES = ROOT / "docs" / "rules.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
MAX_LINE = 120
LINK = re.compile(r"!?\[[^]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(\s*)(```|~~~)(\w*)[^\n]*\n(.*?)^\1\2 *$", re.DOTALL | re.MULTILINE)
CITES = {".py", ".md", ".java", ".yaml", ".yml", ".json", ".cfg", ".toml", ".conf", ".properties", ".xml", ".ipynb", ""}
"""Suffixes of the files that may cite a rule or a decision; the lock, archives and pictures are none."""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def without_fences(text: str) -> str:
    """Replace code blocks by empty lines, so that line numbers stay."""
    return FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)


def without_code(text: str) -> str:
    """Leave out code blocks and code in a line."""
    return re.sub(r"(`+)[^`]+\1", "", without_fences(text))


def headings(text: str) -> list[str]:
    return re.findall(r"^#{1,6} +(.+?) *#*$", without_fences(text), re.MULTILINE)


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    shown = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"<[^>]*>", "", heading))
    return re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    text, seen, found = page.read_text(), Counter[str](), set()
    for name in map(slug, headings(text)):
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return frozenset(found | set(re.findall(r'<a (?:id|name)="([^"]+)"', without_fences(text))))


@cache
def tracked() -> tuple[Path, ...]:
    """Return the files of the repository that are there: one that is being moved may not be."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = tuple(path for name in listed.split("\0") if name and (path := ROOT / name).is_file())
    assert len(found) > 100
    return found


def citing() -> Iterator[tuple[Path, str]]:
    for path in tracked():
        if path.suffix in CITES and not path.is_symlink():
            yield path, path.read_text()


@pages
def test_every_relative_link_leads_to_something(page: Path) -> None:
    broken = []
    for target in LINK.findall(without_code(page.read_text())):
        if re.match(r"[a-z][a-z+.-]*:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        is_there = file.exists() and file.is_relative_to(ROOT)
        if not is_there or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


@pages
def test_no_line_of_prose_is_longer_than_a_reader_wants(page: Path) -> None:
    """Tables are excepted, and a line that is one link or picture."""
    too_long = []
    for number, line in enumerate(without_fences(page.read_text()).splitlines(), 1):
        is_link = re.fullmatch(r"\s*(?:[-*] +)?(?:\[?!?\[[^]]*\]\([^)]*\)(?:\]\([^)]*\))?)[.,:;]?", line)
        if len(line) > MAX_LINE and not line.lstrip().startswith("|") and not is_link:
            too_long.append(f"{page.name}:{number}: {len(line)}")
    assert too_long == []


def test_every_rule_has_its_number_its_reason_and_its_tests() -> None:
    rows = re.findall(r'^\| <a id="r(\d+)"></a>R(\d+) \|(.*)\|$', RULES.read_text(), re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    for anchor, number, rest in rows:
        assert anchor == number
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", rest)]
        assert [bool(cell) for cell in cells] == [True] * 3, f"R{number}: rule, reason and tests"


def test_a_rule_that_is_cited_is_on_its_page() -> None:
    known = {int(anchor.removeprefix("r")) for anchor in anchors(RULES) if re.fullmatch(r"r\d+", anchor)}
    assert len(known) >= 17
    unknown = {
        f"{path.relative_to(ROOT)}: R{number}"
        for path, text in citing()
        for number in re.findall(r"\bR(\d{1,2})\b", text)
        if int(number) not in known
    }
    assert unknown == set()


def test_a_decision_that_is_cited_has_its_heading() -> None:
    known = anchors(ARCHITECTURE)
    assert len(known) > 7
    unknown = set()
    for path, text in citing():
        for cited in re.findall(r"\b[Dd]ecisions? (\d+(?:(?:, | and |, and )\d+)*)", text):
            unknown |= {f"{path.relative_to(ROOT)}: {number}" for number in re.findall(r"\d+", cited) if f"decision-{number}" not in known}
    assert unknown == set()


def test_nothing_cites_what_is_not_in_the_repository() -> None:
    outside = "design" + " §"
    assert [str(path.relative_to(ROOT)) for path in tracked() if outside.encode() in path.read_bytes()] == []


def test_the_rules_name_tests_that_exist() -> None:
    tests = [path for path in tracked() if path.is_relative_to(ROOT / "tests") and path.suffix == ".py"]
    defined = {node.name for path in tests for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
    named = set(re.findall(r"`(test_\w+)`", RULES.read_text()))
    assert len(named) > 10
    assert named - defined == set()


def test_the_rules_explain_every_reason() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", RULES.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(Reason)


def code_of(page: Path) -> list[str]:
    """Return the code within the lines of a page, and the lines of its blocks of commands and text."""
    text = page.read_text()
    blocks = [line for _, _, language, block in FENCE.findall(text) if language in ("sh", "text", "yaml") for line in block.splitlines()]
    return [*re.findall(r"`([^`\n]+)`", without_fences(text)), *blocks]


def settings_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from settings_of(field.annotation, f"{prefix}{name}.")


@pages
def test_a_page_names_settings_and_variables_that_exist(page: Path) -> None:
    code, known = "\n".join(code_of(page)), set(settings_of(Settings))
    groups = "|".join(Settings.model_fields)
    assert set(re.findall(rf"(?<![\w./-])((?:{groups})(?:\.\w+)+)", code)) - known <= {"storage.py"}
    assert set(re.findall(r"\bHALFWAY__(\w+)", code)) <= {name.replace(".", "__").upper() for name in known}


@pages
def test_a_page_names_commands_options_and_targets_that_exist(page: Path) -> None:
    unknown, targets = [], set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for text in code_of(page):
        unknown += [f"make {target}" for target in re.findall(r"\bmake ([a-z-]+)", text) if target not in targets]
        for words in re.findall(r"(?<![\w./=-])(?<!put-secret )(?<!put-acl )halfway ([^#|;&`]+)", text):
            command: Any = typer.main.get_command(app)
            for word in words.split():
                options = {name for parameter in command.params for name in parameter.opts} | {"--help"}
                if hasattr(command, "commands") and not word.startswith("-"):
                    command = command.commands.get(word, command)
                    unknown += [f"halfway {words}"] * (command.name != word)
                elif (option := re.match(r"\[?(--[a-z-]+)", word)) and option[1] not in options:
                    unknown.append(f"halfway {words}")
    assert unknown == []


def test_contributing_names_files_that_exist() -> None:
    paths = {name for name in code_of(ROOT / "CONTRIBUTING.md") if re.fullmatch(r"(?:[\w.-]+/)+[\w.-]*|[\w-]+\.\w+", name)}
    assert len(paths) > 30
    assert sorted(name for name in paths if not (ROOT / name).exists()) == []


def test_the_page_names_every_column() -> None:
    (section,) = re.findall(r"^## Columns\n(.*?)^## ", (ROOT / "docs" / "tables.md").read_text(), re.DOTALL | re.MULTILINE)
    columns = {name for schema in (*TABLE_SCHEMAS.values(), ERASURES_SCHEMA) for name in schema.names}
    assert set(re.findall(r"`(\w+)`", section)) == columns | {*Table, ERASURES}


def test_the_page_for_rocketmqs_users_names_metrics_that_exist() -> None:
    text = (ROOT / "docs" / "rocketmq.md").read_text()
    metrics = set(re.findall(r"`(halfway_\w+)`", text))
    assert len(metrics) >= 4
    assert [name for name in metrics if f"`{name}" not in (ROOT / "docs" / "operations.md").read_text()] == []


@pages
def test_python_in_a_page_compiles_and_imports_public_names(page: Path) -> None:
    for _, _, language, code in FENCE.findall(page.read_text()):
        if language == "python":
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.ImportFrom) and node.module == "halfway":
                    assert {alias.name for alias in node.names} <= set(halfway.__all__)


def test_the_pages_name_every_public_name() -> None:
    text = (ROOT / "docs" / "transactions.md").read_text()
    table = text[text.index("## Names") :]
    members = {"halfway", "execute", "send", "connection", "transaction_id", "results"}
    assert set(re.findall(r"`(\w+)`", table)) - members == set(halfway.__all__)
