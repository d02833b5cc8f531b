"""Prints results for people and for programs."""

import json
from collections.abc import Iterable, Sequence

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def say(text: str) -> None:
    """Tell people something that is no result: on stderr."""
    typer.echo(text, err=True)


def show_json(facts: object) -> None:
    """Print facts for programs: one JSON document, UTF-8 as it is."""
    typer.echo(json.dumps(facts, ensure_ascii=False))


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table for people: nothing is cut off, as wide as the terminal is."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        # As text: what users put into ids and names is no markup.
        table.add_row(*(Text(str(cell)) for cell in row))
    Console().print(table)
