"""The options that several commands share, and the group that turns errors into one line."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from halfway.pipelines.local.command_settings import DEFAULT_CONFIG, override_pair
from halfway.schemas.errors import HalfwayError, SettingsError


def _checked(overrides: list[str] | None) -> list[str] | None:
    """Refuse a `--set` without `=` as wrong usage."""
    try:
        for text in overrides or ():
            override_pair(text)
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from None
    return overrides


ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="PATH", help=f"Settings file. Without it {DEFAULT_CONFIG} if there is one, or else the defaults."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="GROUP.NAME=VALUE", help="Override one setting; may be repeated.", callback=_checked),
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
