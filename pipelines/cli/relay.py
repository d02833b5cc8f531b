"""`halfway relay`: send committed messages on to their Kafka topics."""

from contextlib import AbstractContextManager, nullcontext
from typing import Annotated

import typer

from halfway.pipelines.cli.options import ConfigOption, SetOption
from halfway.pipelines.cli.output import log_to_stderr
from halfway.pipelines.local.command_settings import command_settings
from halfway.pipelines.relay.positions import TablePosition
from halfway.pipelines.relay.relay import Begin, Relay
from halfway.pipelines.runtime.signals import exit_code, on_signals
from halfway.pipelines.storage.missing_tables import verify_table_exists
from halfway.schemas.errors import RelayError
from halfway.schemas.settings import MetricsSettings

_EARLIEST = "earliest"


def relay(
    config: ConfigOption = None,
    overrides: SetOption = None,
    begin: Annotated[
        str | None,
        typer.Option(
            "--begin",
            metavar="earliest|EPOCH.BATCH[:OP_PARTITION.OP_OFFSET]",
            help="Where a relay without a bookmark begins. For its first start only.",
        ),
    ] = None,
    available_now: Annotated[bool, typer.Option("--available-now", help="Relay what the table holds now, then end.")] = False,
) -> None:
    """Send committed messages on to the Kafka topics that they name, exactly once.

    Runs beside the job, without Spark. Of the relays of one name one is active, and the others stand by.
    SIGTERM and Ctrl-C end it between two Kafka transactions.
    """
    begins = _begin(begin)
    settings = command_settings(config, overrides)
    settings.kafka.servers()
    log_to_stderr()
    verify_table_exists(settings.storage, "messages")
    running = Relay(settings, begins)
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        running.stop()

    with on_signals(stop), _served(running, settings.metrics):
        is_done = running.run(available_now=available_now)
    if available_now and received and not is_done:
        raise typer.Exit(exit_code(received[0]))  # not everything was relayed
    stopped = running.report.positions.stopped if running.report.positions is not None else {}
    if available_now and stopped:
        named, first = next(iter(sorted(stopped.items())))
        count = "a topic is stopped" if len(stopped) == 1 else f"{len(stopped)} topics are stopped, first"
        raise RelayError(f"{count}: {named} at message {first.transaction_id}: {first.cause}")


def _begin(text: str | None) -> Begin | None:
    if text is None:
        return None
    try:
        return Begin(None if text == _EARLIEST else TablePosition.parse(text))
    except ValueError as error:
        raise typer.BadParameter(f"{error}; or give {_EARLIEST}", param_hint="--begin") from None


def _served(running: Relay, metrics: MetricsSettings) -> AbstractContextManager[None]:
    """Return a context that serves the metrics, if they are on."""
    if not metrics.port:
        return nullcontext()
    from halfway.pipelines.relay.relay_metrics import RelayMetrics
    from halfway.pipelines.runtime.metrics_server import served

    return served(RelayMetrics(running), metrics)
