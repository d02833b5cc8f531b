"""`halfway optimize`: compact the tables."""

from dataclasses import asdict

from halfway.pipelines.cli.options import ConfigOption, JsonOption, SetOption
from halfway.pipelines.cli.output import show_json, show_table
from halfway.pipelines.local.command_settings import command_settings


def optimize(config: ConfigOption = None, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Compact the small files of the tables. Run it about once an hour; the job may keep running."""
    from halfway.pipelines.runtime.session import own_session, spark_session
    from halfway.pipelines.storage.compaction import compact_tables

    settings = command_settings(config, overrides)
    with own_session():
        done = compact_tables(spark_session(settings), settings.storage)
    if as_json:
        show_json([asdict(compaction) for compaction in done])
        return
    rows = [(one.table, one.files_removed, one.files_added, one.files, f"{one.bytes / 1024**2:.1f}", one.log_files_removed) for one in done]
    show_table(["table", "files replaced", "by", "files now", "MiB now", "log files deleted"], rows)
