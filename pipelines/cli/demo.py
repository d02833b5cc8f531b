"""`halfway demo`: send real traffic, and verify its outcome."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from halfway.pipelines.cli.options import ConfigOption, JsonOption, SetOption
from halfway.pipelines.cli.output import show_json, show_table
from halfway.pipelines.local.command_settings import command_settings
from halfway.pipelines.runtime.signals import ended_by_signals
from halfway.schemas.errors import SettingsError

if TYPE_CHECKING:
    from halfway.pipelines.demo.run import DemoProgress, DemoResult

_LINE_EVERY_S = 5.0
_STILL_LINE_EVERY_S = 20.0
_SHOWN_PROBLEMS = 10
_OWN_JOB = "Start a job on a Kafka of another machine too. It asks all services there after 2 s, and no check of another job counts."


def demo(
    messages: Annotated[int, typer.Option(min=1, help="Transactions to send, besides the few that show errors.")] = 30,
    own_job: Annotated[bool, typer.Option("--own-job", help=_OWN_JOB)] = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send real traffic with the real client, and verify that it is settled correctly. For development.

    The exit code is 0 only if everything is correct. The demo uses the job that runs on this checkpoint.
    If none is running, the demo starts its own, with short times, and stops it at the end.
    Its messages, discards and refused records stay in topics and tables.
    """
    from halfway.pipelines.demo.own_job import OWN_SETTINGS
    from halfway.pipelines.demo.run import run_demo
    from halfway.pipelines.storage.locks import is_in_use

    settings = command_settings(config, overrides)
    servers = settings.kafka.servers()
    job_options: list[str] | None = None
    if not is_in_use(settings.storage):
        if not own_job and not _is_of_this_machine(servers):
            raise SettingsError(
                f"no job is running on the checkpoint {settings.storage.checkpoint}, and the demo's own would ask all services of "
                f"{servers} after 2 s: give --own-job if that Kafka is for development"
            )
        own_overrides = [*OWN_SETTINGS, *(overrides or ())]
        settings = command_settings(config, own_overrides)
        job_options = _options(config, own_overrides)
    with ended_by_signals(), _shown(is_quiet=as_json) as (say, show):
        result = run_demo(settings, messages, job_options, say=say, show=show)
    if as_json:
        show_json({"ok": result.ok, **asdict(result)})
        _show_problems(result)
    else:
        _show_result(result)
    if not result.ok:
        raise typer.Exit(1)


def _is_of_this_machine(servers: str) -> bool:
    """Return True if all addresses, `HOST:PORT` with commas between, are of this machine."""
    hosts = [server.strip().rpartition("/")[2].rpartition(":")[0].strip("[]") for server in servers.split(",")]
    with suppress(ValueError):
        return all(host == "localhost" or ip_address(host).is_loopback for host in hosts)
    return False


def _options(config: Path | None, overrides: Sequence[str]) -> list[str]:
    """Return the command-line options for a job with the same settings."""
    of_config = [] if config is None else ["--config", str(config)]
    return [*of_config, *(part for text in overrides for part in ("--set", text))]


@contextmanager
def _shown(*, is_quiet: bool) -> Iterator[tuple[Callable[[str], None], Callable[["DemoProgress"], None]]]:
    """Yield a function that shows a sentence, and one that shows the progress.

    The progress is a live table in a terminal, or else a line every 5 s. If quiet, there is no progress, and sentences
    go to stderr.
    """
    console = Console()
    if is_quiet:
        yield lambda text: typer.echo(text, err=True), lambda _: None
    elif console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield (
                lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True),
                lambda progress: live.update(_progress_table(progress), refresh=True),
            )
    else:
        yield typer.echo, _ProgressLines()


class _ProgressLines:
    """Prints the progress as a line, at most every 5 s; one that stands still every 20 s."""

    def __init__(self) -> None:
        self._shown: DemoProgress | None = None

    def __call__(self, progress: "DemoProgress") -> None:
        shown = self._shown
        if shown is not None:
            is_still = (progress.sent, progress.found) == (shown.sent, shown.found)
            if progress.seconds - shown.seconds < (_STILL_LINE_EVERY_S if is_still else _LINE_EVERY_S):
                return
        self._shown = progress
        typer.echo(" ".join(f"{name}={value}" for name, value in _progress_facts(progress).items()))


def _progress_facts(progress: "DemoProgress") -> dict[str, str]:
    counts = {name: str(value) for name, value in asdict(progress.found).items()}
    return {"sent": f"{progress.sent}/{progress.total}", **counts, "seconds": f"{progress.seconds:.0f}"}


def _progress_table(progress: "DemoProgress") -> Table:
    facts = _progress_facts(progress)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in facts:
        table.add_column(_called(name), justify="right")
    table.add_row(*facts.values())
    return table


def _show_result(result: "DemoResult") -> None:
    found = asdict(result.found)
    rows = [
        (_called(name), expected, found[name], "ok" if expected == found[name] else "WRONG")
        for name, expected in asdict(result.expected).items()
    ]
    show_table(["outcome", "expected", "found", ""], rows)
    _show_problems(result)
    typer.echo("The tables:")
    for name, path in result.tables.items():
        typer.echo(f"  {name:<10}  {path}")
    typer.echo("To query them in Python:")
    typer.echo("  import deltalake, pyarrow")
    typer.echo(f'  messages = deltalake.QueryBuilder().register("messages", deltalake.DeltaTable("{result.tables["messages"]}"))')
    typer.echo('  rows = messages.execute("SELECT transaction_id, topic, tags, keys FROM messages LIMIT 10").read_all()')
    typer.echo("  print(pyarrow.table(rows).to_pandas().to_string())")
    typer.echo(f"{'ok' if result.ok else 'NOT ok'}: {result.prefix}* after {result.seconds:.0f} s")


def _show_problems(result: "DemoResult") -> None:
    for problem in result.problems[:_SHOWN_PROBLEMS]:
        typer.echo(f"wrong: {problem}", err=True)
    if len(result.problems) > _SHOWN_PROBLEMS:
        typer.echo(f"wrong: and {len(result.problems) - _SHOWN_PROBLEMS} more", err=True)


def _called(name: str) -> str:
    return name.replace("_", " ")
