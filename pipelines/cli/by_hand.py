"""By hand: `halfway commit` and `rollback` settle a transaction, `replay` resends discarded ones, `erase` erases."""

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from halfway.pipelines.cli.options import SHOWN_ROWS, ConfigOption, JsonOption, SetOption, one_of
from halfway.pipelines.cli.output import say, show_first, show_json, tell, utc_text
from halfway.pipelines.local.command_settings import command_settings
from halfway.pipelines.operate.settle import Target, argument_of, settle
from halfway.pipelines.storage.missing_tables import verify_table_exists
from halfway.schemas.headers import LocalTransactionState
from halfway.schemas.outcomes import DISCARD_REASONS
from halfway.schemas.records import encode_key

if TYPE_CHECKING:
    from halfway.pipelines.operate.erase import Erasure

_REASONS = tuple(map(str, DISCARD_REASONS))
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
            from halfway.pipelines.operate.find_pending import find_pending
            from halfway.pipelines.runtime.reader_session import reader_session

            with reader_session(settings, say) as session:
                target = find_pending(session, settings.storage, transaction_id)
        sent = settle(settings.kafka, target, action, remark)
        if as_json:
            show_json(asdict(sent))
            return
        effect = "the job settles it in its next batch unless a verdict or a discard came first"
        if group is not None:
            effect += (
                ". Nothing was looked up: for another group or incarnation it changes nothing, and "
                f"`halfway quarantine {argument_of(sent.transaction_id)}` shows why"
            )
        tell(
            f"sent {sent.action} of {sent.transaction_id} (group {sent.producer_group}, incarnation {sent.incarnation}) to "
            f"{sent.topic} {sent.partition}:{sent.offset}; {effect}"
        )

    run.__doc__ = help_text
    return run


commit = _command(LocalTransactionState.COMMIT, "Commit a pending transaction by hand. Its message goes to the table `messages`.")
rollback = _command(LocalTransactionState.ROLLBACK, "Roll back a pending transaction by hand. Its message is never delivered.")


def replay(
    transaction_ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids of discarded transactions.")] = None,
    *,
    all_of_them: Annotated[bool, typer.Option("--all", help="Resend all discarded messages.")] = False,
    reason: Annotated[
        str | None,
        typer.Option(parser=one_of(_REASONS), metavar="|".join(_REASONS), help="With --all: only those of this reason."),
    ] = None,
    group: Annotated[str | None, typer.Option(help="With --all: only those of this producer group.")] = None,
    unproven: Annotated[
        bool,
        typer.Option(
            "--unproven", help="Also resend messages discarded before the half topic's oldest record, which may have been resent before."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be resent, and send nothing. Does not look whether each can be.")
    ] = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Resend discarded messages as their next incarnation, so that the job asks their service again.

    The command is idempotent: it can be interrupted and repeated, and does not resend what it has resent.
    """
    if not all_of_them and (reason or group):
        raise typer.BadParameter("--reason and --group go with --all", param_hint="ID")
    if bool(transaction_ids) == all_of_them:
        raise typer.BadParameter("give either ids or --all", param_hint="ID")
    from halfway.pipelines.operate.replay import ReplaySelection, replay_discarded
    from halfway.pipelines.runtime.reader_session import reader_session

    settings = command_settings(config, overrides)
    for transaction_id in transaction_ids or ():
        encode_key(transaction_id)
    settings.kafka.servers()
    verify_table_exists(settings.storage, "discarded")
    wanted = ReplaySelection(transaction_ids or (), group, reason, unproven)
    with reader_session(settings, say) as session:
        result = replay_discarded(session(), settings, wanted, say, dry_run=dry_run)
    if as_json:
        show_json(asdict(result))
        return
    if result.would_resend:
        rows = [
            (each.transaction_id, each.producer_group, each.topic, utc_text(each.discarded_at_ms), each.reason, each.keys or "")
            for each in result.would_resend
        ]
        show_first(["transaction", "group", "topic", "discarded", "reason", "keys"], rows, "later ones", at_most=SHOWN_ROWS)
    resent = f"{len(result.would_resend)} would be resent" if dry_run else f"{result.replayed} resent"
    typer.echo(f"{resent}, {result.already_replayed} already resent")
    if result.unproven:
        typer.echo(
            f"{result.unproven} skipped: the half topic does not reach back to their discard, so they may have been resent before; "
            "--unproven resends them too"
        )
    if result.not_sent:
        typer.echo(f"{result.not_sent} not sent, or in vain: the reasons are above")


def erase(
    transaction_id: IdArgument,
    *,
    group: Annotated[str | None, typer.Option(help="Its producer group. Default: every group that has used the id.")] = None,
    remark: Annotated[str | None, typer.Option(help="The reason. The table `erasures` keeps it with your name.")] = None,
    vacuum: Annotated[
        bool, typer.Option("--vacuum", help="Delete the files that hold it at once. Ends reads that use them. On a local disk only.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be erased, and erase nothing.")] = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Erase the body and properties of a transaction from the tables, for ever. The job may run on, but not on S3."""
    from halfway.pipelines.operate.erase import erase as erase_transaction
    from halfway.pipelines.runtime.reader_session import reader_session

    settings = command_settings(config, overrides)
    encode_key(transaction_id)
    settings.kafka.servers()
    verify_table_exists(settings.storage, "messages")
    with reader_session(settings, say) as session:
        done = erase_transaction(session(), settings, transaction_id, group, remark, vacuum=vacuum, dry_run=dry_run)
    if as_json:
        show_json(asdict(done))
        return
    for line in _lines(done):
        tell(line)


def _lines(done: "Erasure") -> list[str]:
    erased = ", ".join(f"{count} in {table}" for table, count in done.rows.items() if count)
    did = "would erase" if done.dry_run else "erased"
    nothing = f"the tables hold nothing more that was sent for {done.transaction_id}"
    lines = [f"{did} what was sent for {done.transaction_id}: {erased}" if erased else nothing]
    if done.files_until_ms is not None:
        lines.append(f"`halfway optimize` deletes the files that held it if it runs after {utc_text(done.files_until_ms)}")
    elif not done.dry_run:
        lines.append("the files that held it are deleted")
    for left in done.topics:
        until = f"until {utc_text(left.until_ms)}, " if left.until_ms is not None else ""
        lines.append(f"the topic {left.topic} may hold it {until}{left.note}")
    return lines
