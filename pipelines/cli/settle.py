"""`halfway commit` and `halfway rollback`: settle a transaction by hand."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer

from halfway.pipelines.cli.options import ConfigOption, JsonOption, SetOption
from halfway.pipelines.cli.output import say, show_json
from halfway.pipelines.local.command_settings import command_settings
from halfway.pipelines.operate.settle import Target, find_pending, settle
from halfway.pipelines.runtime.reader_session import reader_session
from halfway.schemas.headers import LocalTransactionState
from halfway.schemas.records import encode_key

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The transaction's id.")]
RemarkOption = Annotated[str | None, typer.Option(help="The reason. The op record keeps it with your name.")]
GroupOption = Annotated[str | None, typer.Option(help="Its producer group. Sends the op without looking up the transaction.")]
IncarnationOption = Annotated[int | None, typer.Option(min=0, help="Its incarnation, with --group. Default: 0.")]


def _command(action: LocalTransactionState, help_text: str) -> Callable[..., None]:
    """Return the command that settles a transaction by `action`."""

    def run(
        transaction_id: IdArgument,
        *,
        remark: RemarkOption = None,
        group: GroupOption = None,
        incarnation: IncarnationOption = None,
        config: ConfigOption = None,
        overrides: SetOption = None,
        as_json: JsonOption = False,
    ) -> None:
        if incarnation is not None and group is None:
            raise typer.BadParameter("needs --group: without --group the job's state has both", param_hint="--incarnation")
        settings = command_settings(config, overrides)
        settings.kafka.servers()
        encode_key(transaction_id)
        if group is not None:
            target = Target(transaction_id, group, incarnation or 0)
        else:
            with reader_session(settings, say) as spark:
                target = find_pending(spark, settings.storage, transaction_id)
        sent = settle(settings.kafka, target, action, remark)
        if as_json:
            show_json(asdict(sent))
            return
        typer.echo(
            f"sent {sent.action} of {sent.transaction_id} (group {sent.producer_group}, incarnation {sent.incarnation}) to "
            f"{sent.topic} {sent.partition}:{sent.offset}; the job settles it in its next batch unless an earlier verdict exists"
        )

    run.__doc__ = help_text
    return run


commit = _command(LocalTransactionState.COMMIT, "Commit a pending transaction by hand. Its message goes to the table `messages`.")
rollback = _command(LocalTransactionState.ROLLBACK, "Roll back a pending transaction by hand. Its message is never delivered.")
