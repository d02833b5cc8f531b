"""The page of a notebook: its parameters, its Spark and its output, on Databricks and on a local machine."""

import argparse
import html
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure
from pyspark.sql import SparkSession

from halfway.pipelines.local.command_settings import command_settings
from halfway.pipelines.runtime.session import spark_session
from halfway.schemas.errors import HalfwayError
from halfway.schemas.settings import Settings

DEFAULT_FOLDER = "build/notebooks"
_STYLE = "body{font:15px sans-serif;margin:2em;max-width:70em}pre{overflow-x:auto;background:#f4f4f4;padding:1em}img{max-width:100%}"


def utc(ms: int | None) -> str:
    """Return a time in ms since 1970 as text in UTC."""
    return "no time yet" if ms is None else f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC"


@dataclass
class Page:
    """A notebook's parameters and its output.

    On Databricks the parameters are widgets, and the notebook displays the output. Elsewhere the parameters are options
    of the command line. Then the page prints tables, saves pictures as PNG files in `--out`, and `finish` writes one
    HTML file with all of it.
    """

    name: str
    title: str
    settings: Settings
    spark: SparkSession
    parameters: Mapping[str, str]
    folder: Path | None
    _display: Any = None
    _parts: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, name: str, title: str, namespace: Mapping[str, Any], **parameters: str) -> "Page":
        """Read the parameters and find Spark.

        Args:
            name: the notebook's name, which its files get too.
            title: the title of the page.
            namespace: the notebook's `globals()`, which has `dbutils` and `display` on Databricks.
            **parameters: the notebook's own parameters with their defaults.
        """
        own = {"config": "", "set": "", **parameters}
        dbutils = namespace.get("dbutils")
        if dbutils is None:
            sys.excepthook = _print_error
        values, overrides = _widgets(dbutils, own) if dbutils is not None else _options(name, own)
        settings = command_settings(Path(values["config"]) if values["config"] else None, overrides)
        if dbutils is None:
            mpl.use("Agg")
        folder = None if dbutils is not None else Path(values["out"])
        page = cls(name, title, settings, spark_session(settings), values, folder, namespace.get("display"))
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        return page

    def say(self, text: str) -> None:
        """Show a line of text."""
        print(text)
        self._parts.append(f"<p>{html.escape(text)}</p>")

    def table(self, title: str, rows: pd.DataFrame) -> None:
        """Show a small table with its title."""
        print(f"\n{title}")
        if self.folder is None and self._display is not None and len(rows):
            self._display(rows)
            return
        text = rows.to_string(index=False) if len(rows) else "(none)"
        print(text)
        self._parts.append(f"<h2>{html.escape(title)}</h2><pre>{html.escape(text)}</pre>")

    def picture(self, name: str, figure: Figure) -> None:
        """Show a picture."""
        if self.folder is None:
            if self._display is not None:
                self._display(figure)
            return
        file = self.folder / f"{self.name}_{name}.png"
        figure.savefig(file, dpi=110)
        print(f"\n{file}")
        self._parts.append(f'<img src="{file.name}" alt="{html.escape(_title(figure))}">')

    def finish(self) -> None:
        """Write the HTML file, except on Databricks."""
        if self.folder is None:
            return
        file = self.folder / f"{self.name}.html"
        head = f'<!doctype html><meta charset="utf-8"><title>{html.escape(self.title)}</title><style>{_STYLE}</style>'
        file.write_text(f"{head}<h1>{html.escape(self.title)}</h1>\n" + "\n".join(self._parts) + "\n")
        print(f"\n{file}")


def _title(figure: Figure) -> str:
    return figure.get_suptitle() or figure.axes[0].get_title(loc="left")


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error of Halfway in one line, as the commands do."""
    if isinstance(error, HalfwayError):
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _widgets(dbutils: Any, parameters: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the parameters, and the settings to override. No value has spaces: the quotes there are JSON's."""
    for name, default in parameters.items():
        dbutils.widgets.text(name, default)
    values = {name: dbutils.widgets.get(name) for name in parameters}
    return values, values["set"].split()


def _options(name: str, parameters: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the parameters, and the settings to override."""
    parser = argparse.ArgumentParser(prog=f"python -m notebooks.{name}")
    parser.add_argument("--out", default=DEFAULT_FOLDER, help=f"folder for pictures and HTML (default {DEFAULT_FOLDER})")
    parser.add_argument("--set", action="append", default=[], metavar="GROUP.NAME=VALUE", help="override one setting; repeatable")
    for parameter, default in parameters.items():
        if parameter != "set":
            parser.add_argument(f"--{parameter.replace('_', '-')}", default=default)
    values = vars(parser.parse_args(sys.argv[1:]))
    return values, values.pop("set")
