"""The command line: `halfway`, or `python -m pipelines`. One module `cli_<command>.py` each; here they come together."""

from collections.abc import Sequence

import typer

from pipelines import (
    cli_broker,
    cli_demo,
    cli_doctor,
    cli_optimize,
    cli_pending,
    cli_replay,
    cli_resolve,
    cli_settle,
    cli_status,
    cli_topics,
)
from pipelines.cli_common import HalfwayGroup
from schemas.errors import HalfwayError

app = typer.Typer(
    name="halfway",
    cls=HalfwayGroup,
    no_args_is_help=True,
    add_completion=False,
    # Typer's own tracebacks show local variables, secrets among them.
    pretty_exceptions_enable=False,
    help="Transactional messages on Kafka, resolved by Spark.",
)


def task(arguments: Sequence[str] | None = None) -> None:
    """Run a command line as a task of Databricks, which takes any SystemExit for a failure, also that of code 0.

    Args:
        arguments: of the command line; those of the process if None.

    Raises:
        HalfwayError: the command failed, for the reason that it has logged.
    """
    code = app(list(arguments) if arguments is not None else None, prog_name="halfway", standalone_mode=False)
    if code:
        raise HalfwayError(f"halfway ended with exit code {code}: its error is above")


# Groups of commands.
app.add_typer(cli_broker.app, name="broker")
app.add_typer(cli_topics.app, name="topics")

# Single commands.
app.command("resolve")(cli_resolve.resolve)
app.command("demo")(cli_demo.demo)
app.command("status")(cli_status.status)
app.command("pending")(cli_pending.pending)
app.command("commit")(cli_settle.commit)
app.command("rollback")(cli_settle.rollback)
app.command("replay")(cli_replay.replay)
app.command("doctor")(cli_doctor.doctor)
app.command("optimize")(cli_optimize.optimize)
