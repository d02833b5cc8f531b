"""`halfway replay`: send discarded messages anew."""

from dataclasses import asdict
from typing import Annotated

import typer

from halfway.pipelines.cli.options import ConfigOption, JsonOption, SetOption
from halfway.pipelines.cli.output import say, show_json
from halfway.pipelines.local.command_settings import command_settings
from halfway.pipelines.operate.replay import Wanted
from halfway.pipelines.operate.replay import replay as replay_discarded
from halfway.pipelines.runtime.reader_session import reader_session
from halfway.schemas.outcomes import Reason

_REASONS = (str(Reason.CHECK_MAX), str(Reason.EXPIRED))


def _reason(text: str) -> str:
    if text not in _REASONS:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(_REASONS)}")
    return text


def replay(
    transaction_ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Discarded transactions.")] = None,
    *,
    all_of_them: Annotated[bool, typer.Option("--all", help="All that were discarded.")] = False,
    reason: Annotated[
        str | None, typer.Option(parser=_reason, metavar="|".join(_REASONS), help="With --all: only for this reason.")
    ] = None,
    group: Annotated[str | None, typer.Option(help="With --all: only this producer group's.")] = None,
    unproven: Annotated[
        bool,
        typer.Option(
            "--unproven", help="Also those discarded before the half topic's oldest record: were they replayed before, it cannot be told."
        ),
    ] = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send discarded messages anew, as their next incarnation: their service is asked again what became of them.

    It may be interrupted and repeated: what was sent before is not sent again.
    """
    if bool(transaction_ids) == all_of_them:
        raise typer.BadParameter("give ids, or --all", param_hint="ID")
    if not all_of_them and (reason or group):
        raise typer.BadParameter("--reason and --group go with --all", param_hint="ID")
    settings = command_settings(config, overrides)
    settings.kafka.servers()
    wanted = Wanted(transaction_ids or (), group, reason, unproven)
    with reader_session(settings, say) as spark:
        result = replay_discarded(spark, settings, wanted, say)
    if as_json:
        show_json(asdict(result))
        return
    typer.echo(f"{result.replayed} sent anew, {result.already_replayed} had been before")
    if result.unproven:
        typer.echo(
            f"{result.unproven} left alone: the half topic does not reach back to their discard, so that it cannot be told whether they "
            "were replayed before; --unproven sends them too"
        )
