"""`halfway replay`: resend discarded messages."""

from dataclasses import asdict
from typing import Annotated

import typer

from halfway.pipelines.cli.options import ConfigOption, JsonOption, SetOption
from halfway.pipelines.cli.output import say, show_json
from halfway.pipelines.local.command_settings import command_settings
from halfway.pipelines.operate.replay import ReplaySelection, replay_discarded
from halfway.pipelines.runtime.reader_session import reader_session
from halfway.schemas.outcomes import Reason

_REASONS = (str(Reason.CHECK_MAX), str(Reason.EXPIRED))


def _reason(text: str) -> str:
    if text not in _REASONS:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(_REASONS)}")
    return text


def replay(
    transaction_ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids of discarded transactions.")] = None,
    *,
    all_of_them: Annotated[bool, typer.Option("--all", help="Resend all discarded messages.")] = False,
    reason: Annotated[
        str | None, typer.Option(parser=_reason, metavar="|".join(_REASONS), help="With --all: only those discarded for this reason.")
    ] = None,
    group: Annotated[str | None, typer.Option(help="With --all: only those of this producer group.")] = None,
    unproven: Annotated[
        bool,
        typer.Option(
            "--unproven", help="Also resend messages discarded before the half topic's oldest record, which may have been resent before."
        ),
    ] = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Resend discarded messages as their next incarnation, so that the job asks their service again.

    The command is idempotent: it can be interrupted and repeated, and resends no message twice.
    """
    if bool(transaction_ids) == all_of_them:
        raise typer.BadParameter("give ids, or --all", param_hint="ID")
    if not all_of_them and (reason or group):
        raise typer.BadParameter("--reason and --group go with --all", param_hint="ID")
    settings = command_settings(config, overrides)
    settings.kafka.servers()
    wanted = ReplaySelection(transaction_ids or (), group, reason, unproven)
    with reader_session(settings, say) as spark:
        result = replay_discarded(spark, settings, wanted, say)
    if as_json:
        show_json(asdict(result))
        return
    typer.echo(f"{result.replayed} resent, {result.already_replayed} already resent")
    if result.unproven:
        typer.echo(
            f"{result.unproven} skipped: the half topic does not reach back to their discard, so they may have been resent before; "
            "--unproven resends them too"
        )
