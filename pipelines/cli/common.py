"""What the commands share: their options, how settings are found, how errors and facts are shown."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from halfway.conf.loader import load_settings, secret_settings
from halfway.pipelines.local.broker import local_broker
from halfway.schemas.errors import HalfwayError, SettingsError
from halfway.schemas.settings import ENV_PREFIX, Settings

DEFAULT_CONFIG = Path("conf/local.yaml")

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="PATH", help=f"Settings file. Without it {DEFAULT_CONFIG} if there is one, or else the defaults."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="GROUP.NAME=VALUE", help="Override one setting; may be repeated."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


class HalfwayGroup(TyperGroup):
    """The top command: errors raised on purpose end any command below it in one line and exit code 1, others keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command line that `ctx` holds."""
        try:
            return super().invoke(ctx)
        except HalfwayError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(1) from None


def settings_of(config: Path | None, overrides: Sequence[str] | None) -> Settings:
    """Load the settings that a command's `--config` and `--set` ask for.

    Where no Kafka is configured and the local development broker runs, that one is meant.

    Raises:
        SettingsError: a wrong file, name or value.
        typer.BadParameter: a `--set` without `=`.
    """
    if config is None and DEFAULT_CONFIG.is_file():
        config = DEFAULT_CONFIG
    pairs = dict(_pair(text) for text in overrides or ())
    for name in pairs:
        _refuse_secret(name)
    settings = load_settings(config, overrides=pairs)
    if settings.kafka.bootstrap_servers:
        return settings
    broker = local_broker().status()
    if not broker["running"]:
        return settings
    kafka = settings.kafka.model_copy(update={"bootstrap_servers": broker["bootstrap_servers"]})
    return settings.model_copy(update={"kafka": kafka})


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


def duration_text(ms: int | None) -> str:
    """Return a length of time for people, in two units at most."""
    if ms is None:
        return "unknown"
    seconds = max(ms, 0) / 1000
    if seconds < 60:
        return f"{seconds:.1f} s"
    for name, unit_s, below, below_s in (("d", 86_400, "h", 3_600), ("h", 3_600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= unit_s:
            whole, rest = divmod(int(seconds), unit_s)
            return f"{whole} {name} {rest // below_s} {below}"
    raise AssertionError("seconds below 60 were told above")


def _refuse_secret(name: str) -> None:
    """Refuse a secret on the command line, which everybody on the machine can read."""
    if name.lower() in secret_settings():
        variable = ENV_PREFIX + name.upper().replace(".", "__")
        raise SettingsError(
            f"--set {name}: every user of this machine sees a command line: set {variable} in the environment, or {name} in the "
            "configuration file"
        )


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"{text!r} is not GROUP.NAME=VALUE", param_hint="--set")
    return name.strip(), value
