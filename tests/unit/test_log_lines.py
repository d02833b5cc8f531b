"""What is logged: `event=… key=value`, and nothing that a service could pass for another line or key."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.layers import FOLDERS, modules
from tests.support.paths import ROOT

AS_IT_IS = {
    "event": "names in the source",
    "code": "librdkafka's names of errors",
    "table": "an enum",
    "state": "an enum",
    "refusal": "an enum",
    "sends": "a bool",
    "checks": "a bool",
    "delivered": "a bool",
    "partition": "a number",
    "partitions": "numbers",
    "offset": "a number",
    "unread": "a number, or unknown",
    "horizon_ms": "a number, or none",
    "horizon_lag_ms": "a number, or none",
    "bookmark": "two numbers",
    "end": "two numbers, or none",
    "kafka": "a setting",
    "checkpoint": "a setting",
    "tables": "a setting",
}
"""Key → why its value may be logged with `%s`. Any other text is logged with `%r`: somebody else may have chosen it."""
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
TYPE_NAME = re.compile(r"type\(.+\)\.__name__( if .+ else '\w+')?")


def calls(path: Path) -> Iterator[list[ast.expr]]:
    """Yield the arguments of each call of a module's `log`, from the form on."""
    for node in ast.walk(ast.parse(path.read_text())):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if is_call and ast.unparse(node.func.value) == "log" and node.func.attr in LEVELS:
            yield node.args[1:] if node.func.attr == "log" else node.args


def problems(form: ast.expr, values: list[ast.expr]) -> Iterator[str]:
    text = form.value if isinstance(form, ast.Constant) else None
    if not isinstance(text, str) or not text.startswith("event="):
        yield f"{ast.unparse(form)} does not begin with event="
        return
    found = re.findall(r"(?:^| )(\w+)=%([.\d]*\w)", text)
    if len(found) != text.count("%"):
        yield f"{text}: a value has no key"
    for place, (key, conversion) in enumerate(found):
        is_type_name = any(TYPE_NAME.fullmatch(ast.unparse(value)) for value in values[place : place + 1])
        if conversion == "s" and key not in AS_IT_IS and not is_type_name:
            yield f"{text}: {key}=%s shows any text as it is"


@pytest.mark.parametrize("form", ["event=a topic=%r", "event=a batch_id=%d seconds=%.2f", "event=%s state=%s", "event=a error=%s"])
def test_a_form_that_shows_no_text_as_it_is_may_be_logged(form: str) -> None:
    assert list(problems(ast.Constant(form), [ast.parse("type(error).__name__", mode="eval").body] * 2)) == []


@pytest.mark.parametrize("form", ["'event=a topic=%s'", "'event=a %s'", "'event=a state=%s, %s'", "'topic=%r'", "f'event={a}'", "form"])
def test_a_form_that_may_look_like_another_line_is_found(form: str) -> None:
    value = ast.parse("message.topic", mode="eval").body
    assert len(list(problems(ast.parse(form, mode="eval").body, [value, value]))) == 1


@pytest.mark.parametrize("path", modules(*FOLDERS), ids=lambda path: str(path.relative_to(ROOT)))
def test_text_that_somebody_else_may_have_chosen_is_logged_with_its_escapes(path: Path) -> None:
    assert [problem for form, *values in calls(path) for problem in problems(form, values)] == []


def test_a_module_logs_by_its_log() -> None:
    assert sum(len(list(calls(path))) for path in modules(*FOLDERS)) > 40
    for path in modules(*FOLDERS):
        assert not re.search(r"\blogging\.(debug|info|warning|error|exception|critical|log)\(", path.read_text()), path
