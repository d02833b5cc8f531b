"""Defines the options that commands share, and the command group that prints errors as one line."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from halfway.pipelines.local.command_settings import DEFAULT_CONFIG, override_pair
from halfway.schemas.errors import HalfwayError, SettingsError


def _checked(overrides: list[str] | None) -> list[str] | None:
    """Refuse a `--set` without `=` as wrong usage, which exits with code 2."""
    try:
        for text in overrides or ():
            override_pair(text)
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from None
    return overrides


ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="PATH", help=f"Settings file. Default: {DEFAULT_CONFIG} if it exists, or else the built-in defaults."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="GROUP.NAME=VALUE", help="Override one setting. May be repeated.", callback=_checked),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


class HalfwayGroup(TyperGroup):
    """The top command. A HalfwayError prints one line and exits with code 1; other errors keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command of `ctx`."""
        try:
            return super().invoke(ctx)
        except HalfwayError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(1) from None
