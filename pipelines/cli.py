"""The command line: `halfway`, or `python -m pipelines`. One module `cli_<command>.py` each; here they come together."""

import typer

from pipelines import cli_broker, cli_demo, cli_resolve, cli_topics
from pipelines.cli_common import HalfwayGroup

app = typer.Typer(
    name="halfway",
    cls=HalfwayGroup,
    no_args_is_help=True,
    add_completion=False,
    # Typer's own tracebacks show local variables, secrets among them.
    pretty_exceptions_enable=False,
    help="Transactional messages on Kafka, resolved by Spark.",
)

# Groups of commands.
app.add_typer(cli_broker.app, name="broker")
app.add_typer(cli_topics.app, name="topics")

# Single commands.
app.command("resolve")(cli_resolve.resolve)
app.command("demo")(cli_demo.demo)
