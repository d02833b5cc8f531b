"""`halfway pending`: what is undecided, oldest first, and what it waits for."""

import json
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
import typer

from halfway.pipelines.cli.options import ConfigOption, JsonOption, SetOption
from halfway.pipelines.cli.output import say, show_table
from halfway.pipelines.local.command_settings import command_settings
from halfway.pipelines.runtime.reader_session import reader_session
from halfway.pipelines.storage.checkpoint import is_in_use
from halfway.pipelines.storage.state_reader import read_state
from halfway.schemas.settings import Settings, parse_duration_ms
from halfway.transforms.views.durations import duration_text
from halfway.transforms.views.pending import PendingView, view_pending

SHOWN = 50
_JSON_COLUMNS = ["transaction_id", "incarnation", "producer_group", "topic", "age_ms", "check_times", "next_due_ms"]
_ROWS_AT_ONCE = 10_000


def _duration(text: str) -> int:
    try:
        return parse_duration_ms(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def pending(
    *,
    group: Annotated[str | None, typer.Option(help="Only this producer group's.")] = None,
    older_than: Annotated[
        int | None, typer.Option(parser=_duration, metavar="DURATION", help="Only those whose age is above this: 90s, 5m, 2h.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help=f"At most so many. Without it {SHOWN}, with --json all.")] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the pending transactions, oldest first, as the job's last batch left them. A running job is not disturbed."""
    settings = command_settings(config, overrides)
    view = load_view(settings)
    wanted = matching(view.transactions, group, older_than)
    if as_json:
        _show_json_rows(wanted.select(_JSON_COLUMNS).slice(0, limit))
        return
    shown = wanted.slice(0, limit or SHOWN)
    rows = [_row(row, view, settings) for row in shown.to_pylist()]
    show_table(["transaction", "inc.", "group", "topic", "age", "checks", "due in", "waits for"], rows)
    if wanted.num_rows > shown.num_rows:
        typer.echo(f"... and {wanted.num_rows - shown.num_rows} younger ones (--limit)")
    show_table(["group", "pending", "oldest", "most checks", ""], by_group(wanted, view))


def load_view(settings: Settings) -> PendingView:
    """Return what is pending by the state in the checkpoint, and say on stderr what a reader of it must know.

    Raises:
        HalfwayError: the state cannot be read.
    """
    with reader_session(settings, say) as spark:
        stored = read_state(spark, settings.storage)
    if stored.batch_id is None:
        say(f"the checkpoint {settings.storage.checkpoint} has no batch yet: is it the job's?")
    elif not is_in_use(settings.storage):
        say(f"no job is running on {settings.storage.checkpoint}: this is what its last batch left")
    return view_pending(stored.rows)


def matching(transactions: pa.Table, group: str | None, older_than_ms: int | None) -> pa.Table:
    """Return those of a group, and above an age; where the age is not known yet, it is above none."""
    if group is not None:
        transactions = transactions.filter(pc.equal(transactions["producer_group"], group))
    if older_than_ms is not None:
        transactions = transactions.filter(pc.greater(transactions["age_ms"], older_than_ms))
    return transactions


def by_group(transactions: pa.Table, view: PendingView) -> list[tuple[object, ...]]:
    """Return a row a producer group: how many, age of the oldest, most checks, and whether it is away; the largest first."""
    counted = transactions.group_by("producer_group").aggregate([("age_ms", "max"), ("check_times", "max"), ("transaction_id", "count")])
    rows = sorted(counted.to_pylist(), key=lambda row: (-row["transaction_id_count"], row["producer_group"]))
    return [
        (
            row["producer_group"],
            row["transaction_id_count"],
            duration_text(row["age_ms_max"]),
            row["check_times_max"],
            "away" if row["producer_group"] in view.absent_groups else "",
        )
        for row in rows
    ]


def _row(row: dict[str, Any], view: PendingView, settings: Settings) -> tuple[object, ...]:
    due = "unknown" if view.horizon_ms is None else duration_text(row["next_due_ms"] - view.horizon_ms)
    return (
        row["transaction_id"],
        row["incarnation"],
        row["producer_group"],
        row["topic"],
        duration_text(row["age_ms"]),
        row["check_times"],
        due,
        _waits_for(row, view, settings.resolution.transactionCheckMax),
    )


def _waits_for(row: dict[str, Any], view: PendingView, check_max: int) -> str:
    if view.horizon_ms is None:
        return "time: not every partition has a tick yet"
    if row["producer_group"] in view.absent_groups:
        return "its group, which is away"
    if row["check_times"] >= check_max:
        return "its discard: all checks unanswered"
    return "an answer" if row["check_times"] else "its verdict"


def _show_json_rows(rows: pa.Table) -> None:
    """Print one JSON list, some rows at once: a million need not be objects all at the same time."""
    separator = "["
    for batch in rows.to_batches(max_chunksize=_ROWS_AT_ONCE):
        for row in batch.to_pylist():
            typer.echo(f"{separator}{json.dumps(row, ensure_ascii=False)}", nl=False)
            separator = ",\n"
    typer.echo("[]" if separator == "[" else "]")
