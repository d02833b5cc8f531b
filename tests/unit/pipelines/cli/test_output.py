"""What a terminal is shown of text that anyone who may write to a topic has chosen."""

import json
import logging
from collections.abc import Callable

import pytest
import typer
from py4j import java_gateway
from typer.testing import CliRunner

from halfway.pipelines.cli.options import HalfwayGroup
from halfway.pipelines.cli.output import log_to_stderr, printable, say, show_json, show_table, tell, utc_text
from halfway.schemas.errors import NotPendingError

HOSTILE = "\x1b]0;owned\x07\x9b2J\r\n\u202eid\u2028\x00\x7f"
SHOWN = r"\x1b]0;owned\x07\x9b2J\r\n\u202eid\u2028\x00\x7f"


def fail(text: str) -> None:
    raise NotPendingError(text)


@pytest.mark.parametrize("show", [say, tell, fail, lambda text: show_table([""], [[text]])], ids=["notice", "result", "error", "table"])
def test_what_does_not_print_is_escaped(show: Callable[[str], None]) -> None:
    app = typer.Typer(cls=HalfwayGroup)
    app.command("show")(lambda: show(f"before{HOSTILE}after"))
    app.command("other")(lambda: None)
    done = CliRunner().invoke(app, ["show"])
    # An error collapses white space into one line before that.
    expected = SHOWN.replace(r"\r\n", " ").replace(r"\u2028", " ") if show is fail else SHOWN
    assert f"before{expected}after" in done.output
    assert all(character.isprintable() for character in done.output.replace("\n", ""))


def test_a_time_that_no_calendar_has_is_shown_as_it_is() -> None:
    """A record with such a time is in `quarantine`."""
    assert [utc_text(at_ms) for at_ms in (253_402_300_799_999, 253_402_300_800_000, -62_135_596_800_001)] == [
        "9999-12-31 23:59:59 UTC",
        "253402300800000 ms",
        "-62135596800001 ms",
    ]


def test_json_is_the_same_to_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"transaction_id": HOSTILE, "größe": "\U000e0001", "n": [1, None]}
    show_json(facts)
    text = capsys.readouterr().out
    assert json.loads(text) == facts
    assert text.removesuffix("\n").isprintable()
    assert "größe" in text


def test_a_line_of_the_log_is_one_line_and_a_traceback_looks_like_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    log_to_stderr()
    log = logging.getLogger("halfway.pipelines.relay.tests")
    log.info("event=topic_stopped topic=%s", HOSTILE)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.exception("event=tick_failed topic=%r", "größe")
    told = capsys.readouterr().err
    assert all(character.isprintable() for character in told.replace("\n", ""))
    first, second, *traceback = told.splitlines()
    assert first.endswith(f" level=INFO event=topic_stopped topic={SHOWN}")
    assert second.endswith(" level=ERROR event=tick_failed topic='größe'")
    assert traceback[0] == "  Traceback (most recent call last):"
    assert all(line.startswith("  ") for line in traceback)
    before, after = SHOWN.split(r"\n")
    assert traceback[-2:] == [f"  ValueError: {before}", f"  {after}"]


def test_what_py4j_raises_it_does_not_log_as_well(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A connection to the JVM that it makes anew, as after a signal, is a traceback of the root logger."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    log_to_stderr()
    exec(compile("import logging\nlogging.info('Exception while sending command.')", java_gateway.__file__, "exec"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", ["", "order-7", "größe", "日本", "a b", "🎉", r"\x1b"])
def test_what_prints_is_shown_as_it_is(text: str) -> None:
    assert printable(text) == text


def test_half_a_character_is_escaped() -> None:
    assert printable("\ud800") == r"\ud800"


LONG_ID = "e2fa2f80a4/4849bbbf21 " + "x" * 200
SENTENCE = "its group, which is away or behind"


@pytest.mark.parametrize("columns", ["20", "80"])
def test_without_a_terminal_a_row_is_one_line(columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    show_table(["transaction", "group", "waits for"], [[LONG_ID, "g", SENTENCE], ["a", "g", SENTENCE]])
    assert f" {LONG_ID}   g       {SENTENCE}" in capsys.readouterr().out.splitlines()


def test_a_terminal_folds_long_sentences_and_no_ids(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside a long id the last column would have one word a line."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    show_table(["transaction", "group", "waits for"], [[LONG_ID, "g", SENTENCE], ["a", "g", f"{SENTENCE}, {SENTENCE}"]])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert f" {LONG_ID}   g       {SENTENCE}" in lines
    assert not any(f"{SENTENCE}, {SENTENCE}" in line for line in lines)
