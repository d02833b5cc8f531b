"""Prints results, for people and for programs, and the log.

What it prints holds text that anyone with the right to write to a topic has chosen: ids, groups, topics, remarks. So
whatever does not print is escaped: it could command the terminal, or look like another line or another id.
"""

import json
import logging
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from halfway.schemas.headers import MAX_TIMESTAMP_MS, MIN_TIMESTAMP_MS

_WIDEST = 1_000_000
"""In characters: wider than any row."""
_SENTENCE = 40
"""In characters: what is longer may be folded."""


def printable(text: str) -> str:
    """Return a line of text in which all that does not print is escaped, as Python escapes it."""
    return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(text: str) -> None:
    """Print a notice, which is not part of the result, on stderr."""
    typer.echo(printable(text), err=True)


def tell(text: str) -> None:
    """Print a line of the result."""
    typer.echo(printable(text))


class _OneLine(logging.Formatter):
    """Makes a record one line. A traceback follows in indented lines, so that none of them looks like a record."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join(f"  {printable(line)}" for line in super().formatException(ei).split("\n"))


def log_to_stderr() -> None:
    """Log to stderr, and nowhere else: a notebook and a wheel task of Databricks have handlers already."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("%(asctime)s level=%(levelname)s %(message)s"))
    # Py4J logs what it raises too, with a page of Java, and each connection that it makes anew, by the root logger.
    handler.addFilter(lambda record: Path(record.pathname).parent.name != "py4j")
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def utc_text(at_ms: int) -> str:
    """Return a time (ms since 1970) for people. A refused record may have one that no calendar has (R14)."""
    if not MIN_TIMESTAMP_MS <= at_ms <= MAX_TIMESTAMP_MS:
        return f"{at_ms} ms"
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"


def to_json(facts: object) -> str:
    """Return facts as JSON in one line, with UTF-8 unescaped as far as it prints."""
    text = json.dumps(facts, ensure_ascii=False)
    return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def show_json(facts: object) -> None:
    """Print facts as one JSON document."""
    typer.echo(to_json(facts))


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table, one line a row, so that an id can be copied or searched for.

    In a terminal the last column, which holds sentences, is folded between words, if they are longer than
    `_SENTENCE` characters. A table that is still too wide is left to the terminal.
    """
    # As text, so that brackets in ids and names are not markup.
    cells = [[Text(printable(str(cell))) for cell in row] for row in rows]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    widths = [max([len(name), *(row[column].cell_len for row in cells)]) for column, name in enumerate(columns)]
    for name, width in zip(columns[:-1], widths, strict=False):
        table.add_column(name, no_wrap=True, min_width=width)
    table.add_column(columns[-1], min_width=min(widths[-1], _SENTENCE))
    for row in cells:
        table.add_row(*row)
    console = Console()
    needed = Measurement.get(console, console.options.update(max_width=_WIDEST), table)
    if console.is_terminal:
        console.width = max(console.width, needed.minimum)
        console.print(table)
        return
    console.width = needed.maximum
    with console.capture() as drawn:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in drawn.get().splitlines()))


def show_first(columns: Sequence[str], rows: Sequence[Sequence[object]], others: str, *, at_most: int) -> None:
    """Print a table of the first rows, and how many `others` there are, if there are more."""
    show_table(columns, rows[:at_most])
    if len(rows) > at_most:
        typer.echo(f"... and {len(rows) - at_most} {others} (--json shows all)")
