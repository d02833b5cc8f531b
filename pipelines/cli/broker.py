"""`halfway broker`: the local development broker."""

from typing import Annotated

import typer

from halfway.pipelines.cli.options import JsonOption
from halfway.pipelines.cli.output import show_json, show_table
from halfway.pipelines.local.broker import local_broker
from halfway.pipelines.runtime.signals import ended_by_signals

app = typer.Typer(no_args_is_help=True, help="Start and stop a local Kafka for development, on loopback.")


@app.command()
def start(
    port: Annotated[int | None, typer.Option(min=1, max=65_535, help="Port to listen on from now on. Default: the previous port.")] = None,
) -> None:
    """Start the broker in the background, and wait until it answers. Ctrl-C ends a broker that is starting."""
    broker = local_broker()
    with ended_by_signals():
        started = broker.start(port)
    typer.echo(f"the broker {'is running' if started else 'was already running'} at {broker.status()['bootstrap_servers']}")


@app.command()
def stop() -> None:
    """Stop the broker. Its data and its address are kept for the next start."""
    broker = local_broker()
    typer.echo("the broker is stopped" if broker.stop() else f"the broker of {broker.directory} was not running")


@app.command()
def status(as_json: JsonOption = False) -> None:
    """Show whether the broker is running, and its address."""
    broker = local_broker()
    facts = broker.status()
    if as_json:
        show_json(facts)
        return
    rows = [("running", "yes" if facts["running"] else "no"), ("address", facts["bootstrap_servers"] or "none yet")]
    show_table(["broker", ""], [*rows, ("folder", broker.directory)])
