"""Prints results, for people and for programs."""

import json
from collections.abc import Iterable, Sequence

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def say(text: str) -> None:
    """Print a notice, which is not part of the result, on stderr."""
    typer.echo(text, err=True)


def show_json(facts: object) -> None:
    """Print facts as one JSON document, with UTF-8 unescaped."""
    typer.echo(json.dumps(facts, ensure_ascii=False))


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table, as wide as the terminal. Long cells are folded, never cut."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        # As text, so that brackets in ids and names are not markup.
        table.add_row(*(Text(str(cell)) for cell in row))
    Console().print(table)
