"""`halfway pending`: list the pending transactions, and what each one waits for."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfway.pipelines.cli.options import SHOWN_ROWS, ConfigOption, JsonOption, LimitOption, SetOption, parsed_by
from halfway.pipelines.cli.output import say, show_table, to_json
from halfway.pipelines.local.command_settings import command_settings
from halfway.schemas.settings import Settings, parse_duration_ms
from halfway.transforms.views.durations import duration_text
from halfway.transforms.views.quiet import quiet_text

if TYPE_CHECKING:
    import pyarrow as pa

    from halfway.pipelines.storage.state_reader import StoredState
    from halfway.transforms.views.pending import PendingView

_JSON_COLUMNS = ["transaction_id", "incarnation", "producer_group", "topic", "age_ms", "check_times", "next_due_ms"]
_ROWS_AT_ONCE = 10_000


def pending(
    *,
    group: Annotated[str | None, typer.Option(help="Only those of this producer group.")] = None,
    older_than: Annotated[
        int | None,
        typer.Option(
            parser=parsed_by(parse_duration_ms),
            metavar="DURATION",
            help="Only those older than this, such as 90s, 5m or 2h; a bare number is ms.",
        ),
    ] = None,
    limit: LimitOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the pending transactions, oldest first, as of the job's last batch. A running job is not disturbed."""
    from halfway.transforms.views.pending import pending_by_group

    settings = command_settings(config, overrides)
    view, as_of = load_view(settings)
    wanted = matching(view.transactions, group, older_than)
    check_max = settings.resolution.transactionCheckMax
    if as_json:
        _show_json_rows(wanted.select(_JSON_COLUMNS).slice(0, limit), view, check_max)
        return
    if not wanted.num_rows:
        others = view.transactions.num_rows
        typer.echo(f"none of the {others} pending transactions is of this group and age" if others else f"nothing is pending{as_of}")
        return
    shown = wanted.slice(0, limit or SHOWN_ROWS)
    rows = [_row(row, view, check_max) for row in shown.to_pylist()]
    show_table(["transaction", "inc.", "group", "topic", "age", "checks", "due in", "waits for"], rows)
    if wanted.num_rows > shown.num_rows:
        typer.echo(f"... and {wanted.num_rows - shown.num_rows} younger ones (--limit)")
    groups = [
        (each.producer_group, each.pending, duration_text(each.oldest_age_ms), each.most_checks, "away or behind" if each.is_absent else "")
        for each in pending_by_group(wanted, view.absent_groups)
    ]
    show_table(["group", "pending", "oldest", "most checks", ""], groups)


def load_view(settings: Settings) -> "tuple[PendingView, str]":
    """Read what is pending from the state in the checkpoint. Prints a notice if no batch has run, or no job is running.

    Returns:
        What is pending, and as of which batch.

    Raises:
        HalfwayError: no job has started with this checkpoint, or the state cannot be read.
    """
    from halfway.pipelines.runtime.reader_session import reader_session
    from halfway.pipelines.storage.locks import is_in_use
    from halfway.pipelines.storage.state_reader import no_batch_yet, read_state
    from halfway.transforms.views.pending import view_pending

    with reader_session(settings, say) as session:
        stored = read_state(session, settings.storage)
    if stored.batch_id is None:
        say(no_batch_yet(settings.storage))
    elif (is_running := is_in_use(settings.storage)) is False:
        say(f"no job is running on {settings.storage.checkpoint}; this is the state after its last batch")
    elif quiet := quiet_text(stored.last_batch, settings, time.time_ns() // 1_000_000):
        job = "the job is running, but" if is_running else "if the job is running,"
        say(f"{job} {quiet}; this is the state after its last batch")
    return view_pending(stored.rows), _as_of(stored)


def _as_of(stored: "StoredState") -> str:
    if stored.batch_id is None:
        return ""
    last = stored.last_batch
    age = "" if last is None else f" ({duration_text(time.time_ns() // 1_000_000 - last.written_at_ms)} ago)"
    return f" as of batch {stored.batch_id}{age}"


def matching(transactions: "pa.Table", group: str | None, older_than_ms: int | None) -> "pa.Table":
    """Return the transactions of a group that are above an age. An unknown age is above none."""
    import pyarrow.compute as pc

    if group is not None:
        transactions = transactions.filter(pc.equal(transactions["producer_group"], group))
    if older_than_ms is not None:
        transactions = transactions.filter(pc.greater(transactions["age_ms"], older_than_ms))
    return transactions


def _row(row: dict[str, Any], view: "PendingView", check_max: int) -> tuple[object, ...]:
    due = "unknown" if view.horizon_ms is None else duration_text(row["next_due_ms"] - view.horizon_ms)
    if row["producer_group"] in view.absent_groups:
        due = "-"  # It is put off again and again.
    return (
        row["transaction_id"],
        row["incarnation"],
        row["producer_group"],
        row["topic"],
        duration_text(row["age_ms"]),
        row["check_times"],
        due,
        _waits_for(row, view, check_max),
    )


def _waits_for(row: dict[str, Any], view: "PendingView", check_max: int) -> str:
    if view.horizon_ms is None:
        return "a tick in every partition"
    if row["producer_group"] in view.absent_groups:
        return "its group, which is away or behind"
    if row["check_times"] >= check_max:
        return "its discard: no check brought a verdict"
    return "an answer" if row["check_times"] else "its verdict"


def _show_json_rows(rows: "pa.Table", view: "PendingView", check_max: int) -> None:
    """Print one JSON list in chunks, so that a million rows are not Python objects at the same time."""
    separator = "["
    for batch in rows.to_batches(max_chunksize=_ROWS_AT_ONCE):
        for row in batch.to_pylist():
            facts = {**row, "waits_for": _waits_for(row, view, check_max)}
            typer.echo(f"{separator}{to_json(facts)}", nl=False)
            separator = ",\n"
    typer.echo("[]" if separator == "[" else "]")
