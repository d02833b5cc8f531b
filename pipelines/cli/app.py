"""The command line, `halfway` or `python -m halfway`: assembles the commands of the other modules."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from halfway.pipelines.cli import (
    broker,
    by_hand,
    demo,
    doctor,
    messages,
    pending,
    relay,
    resolve,
    status,
    tables,
    topics,
    transactions,
)
from halfway.pipelines.cli.options import HalfwayGroup
from halfway.schemas.errors import HalfwayError

app = typer.Typer(
    name="halfway",
    cls=HalfwayGroup,
    no_args_is_help=True,
    add_completion=False,
    # Typer's own tracebacks would show local variables, including secrets.
    pretty_exceptions_enable=False,
    help="Transactional messages on Kafka, resolved by Spark.",
)


def task(arguments: Sequence[str] | None = None) -> None:
    """Run a command as a Databricks task. Databricks treats every SystemExit as a failure, even with exit code 0.

    Args:
        arguments: the arguments of the command line; None for those of the process.

    Raises:
        HalfwayError: the command failed and has printed the reason.
    """
    code = app(list(arguments) if arguments is not None else None, prog_name="halfway", standalone_mode=False)
    if code:
        raise HalfwayError(f"halfway ended with exit code {code}: its output above has the error")


def _show_version(is_asked: bool) -> None:
    if is_asked:
        try:
            typer.echo(f"halfway {version('halfway')}")
        except PackageNotFoundError:
            typer.echo("halfway, not installed")
        raise typer.Exit


@app.callback()
def _options(
    *,
    _is_version_asked: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version, and end.")
    ] = False,
) -> None:
    """Take what is no command's own."""


app.add_typer(broker.app, name="broker")
app.add_typer(topics.app, name="topics")
app.add_typer(transactions.app, name="transactions")

app.command("resolve")(resolve.resolve)
app.command("demo")(demo.demo)
app.command("status")(status.status)
app.command("messages")(messages.messages)
app.command("pending")(pending.pending)
app.command("commit")(by_hand.commit)
app.command("rollback")(by_hand.rollback)
app.command("quarantine")(tables.quarantine)
app.command("replay")(by_hand.replay)
app.command("erase")(by_hand.erase)
app.command("relay")(relay.relay)
app.command("doctor")(doctor.doctor)
app.command("optimize")(tables.optimize)
