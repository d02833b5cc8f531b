"""`halfway quarantine` and `halfway optimize`: what the tables hold of refused records, and in how many files."""

from dataclasses import asdict
from typing import Annotated

import typer

from halfway.pipelines.cli.options import SHOWN_ROWS, ConfigOption, JsonOption, LimitOption, SetOption, one_of
from halfway.pipelines.cli.output import say, show_json, show_table, utc_text
from halfway.pipelines.local.command_settings import command_settings
from halfway.pipelines.storage.missing_tables import verify_table_exists
from halfway.schemas.outcomes import DISCARD_REASONS, Reason

_REASONS = [str(reason) for reason in Reason if reason not in DISCARD_REASONS]


def quarantine(
    transaction_id: Annotated[str | None, typer.Argument(metavar="ID", help="Only records of this transaction.")] = None,
    *,
    reason: Annotated[str | None, typer.Option(parser=one_of(_REASONS), metavar="REASON", help="Only those of this reason.")] = None,
    limit: LimitOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the records that were refused, latest first, and why. The table `quarantine` holds each of them whole."""
    from halfway.pipelines.operate.quarantined import newest_quarantined
    from halfway.pipelines.runtime.reader_session import reader_session

    settings = command_settings(config, overrides)
    verify_table_exists(settings.storage, "quarantine")
    at_most = limit or SHOWN_ROWS
    with reader_session(settings, say) as session:
        found = newest_quarantined(session(), settings.storage, limit if as_json else at_most + 1, reason, transaction_id)
    if as_json:
        show_json([asdict(each) for each in found])
        return
    if not found:
        typer.echo("no such record was refused" if reason or transaction_id else "no record was refused")
        return
    rows = [
        (
            utc_text(each.source_timestamp_ms),
            f"{each.source_topic} {each.source_partition}:{each.source_offset}",
            each.transaction_id or "",
            each.reason,
            each.detail or "",
        )
        for each in found[:at_most]
    ]
    show_table(["record's time", "place", "transaction", "reason", "detail"], rows)
    if len(found) > at_most:
        typer.echo("... and earlier ones (--limit)")


def optimize(config: ConfigOption = None, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Compact the small files of the tables. Run it about once an hour; the job may keep running, but not on S3."""
    from halfway.pipelines.runtime.session import own_session, spark_session
    from halfway.pipelines.storage.compaction import compact_tables

    settings = command_settings(config, overrides)
    verify_table_exists(settings.storage, "messages")
    say("starting Spark to compact the tables ...")
    with own_session():
        done = compact_tables(spark_session(settings, beside_job=True), settings.storage, say)
    if as_json:
        show_json([asdict(compaction) for compaction in done])
        return
    rows = [(one.table, one.files_removed, one.files_added, one.files, f"{one.bytes / 1024**2:.1f}", one.log_files_removed) for one in done]
    show_table(["table", "files replaced", "by", "files now", "MiB now", "log files deleted"], rows)
