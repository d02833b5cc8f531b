"""Defines the options that commands share, and the command group that prints errors as one line."""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from confluent_kafka import KafkaError, KafkaException
from typer.core import TyperGroup

from halfway.pipelines.cli.output import say
from halfway.pipelines.local.command_settings import DEFAULT_CONFIG, override_pair
from halfway.pipelines.runtime.paths import not_permitted
from halfway.schemas.errors import HalfwayError, MissingPackageError, SettingsError

T = TypeVar("T")


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
SHOWN_ROWS = 50
LimitOption = Annotated[int | None, typer.Option(min=1, help=f"Show at most this many. Default: {SHOWN_ROWS}, or all with --json.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def one_of(allowed: Sequence[str]) -> Callable[[str], str]:
    """Return a parser that refuses any other text."""

    def parse(text: str) -> str:
        if text not in allowed:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(allowed)}")
        return text

    return parse


def parsed_by(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return a parser whose ValueError is wrong usage, which exits with code 2."""

    def parse_option(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parse_option


_OWN_FILES_ONLY = 0o077
_EXTRA_OF = {
    **dict.fromkeys(("pyspark", "delta", "pandas", "pyarrow"), "job,spark"),
    **dict.fromkeys(("deltalake", "duckdb"), "tables"),
    "prometheus_client": "metrics",
}
"""Package → the extra that brings it. A command imports what it needs when it runs."""
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_MISUSED = (KafkaError._INVALID_ARG, KafkaError._STATE)
"""What librdkafka says where it is called wrongly."""


def _warn_of_other_code() -> None:
    """Say it if this command is not the code of the source tree in which it runs, as in a copy of folder and .venv.

    What spark-submit was given in a zip is what its user wants.
    """
    here, own = Path("src", "halfway", "__init__.py"), Path(__file__).parents[2]
    if here.is_file() and own.is_dir() and not here.samefile(own / "__init__.py"):
        say(f"warning: this command is the code in {own}, not that of this source tree: `make setup` installs that one in .venv")


class HalfwayGroup(TyperGroup):
    """The top command. Prints in one line, and exits with code 1, for what its user can do something about.

    That is a HalfwayError, a missing extra, a file that this user may not use, a full disk, and a failure of Kafka that
    nothing else has explained. Other errors keep their traceback.

    Tables, checkpoints, logs and the local broker's data hold bodies. What a command and the processes that it starts
    write to a local disk is for its user alone.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse an argument that no id, group, remark or setting can be. Spark and Kafka take text as UTF-8."""
        for number, text in enumerate(args, 1):
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise typer.BadParameter(f"argument {number} is not UTF-8")  # It may be a secret.
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command of `ctx`."""
        os.umask(_OWN_FILES_ONLY)
        _warn_of_other_code()
        try:
            return super().invoke(ctx)
        except HalfwayError as error:
            told = str(error)
        except PermissionError as error:
            told = not_permitted(error)
        except OSError as error:
            if error.errno not in _DISK:
                raise
            told = f"cannot write {error.filename or 'a file'}: {error.strerror}; `halfway doctor` shows what is free"
        except KafkaException as error:
            if error.args[0].code() in _MISUSED:
                raise
            told = f"Kafka refuses this, or has failed: {error.args[0].str()}"
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0].replace("py4j", "pyspark")  # which brings it
            if package not in _EXTRA_OF:
                raise
            user = "metrics.port" if package == "prometheus_client" else "this command"
            told = str(MissingPackageError(user, package, _EXTRA_OF[package]))
        say(f"error: {' '.join(told.split())}")
        raise typer.Exit(1)
