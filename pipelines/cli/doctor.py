"""`halfway doctor`: is everything there that the job needs?"""

from collections.abc import Iterator
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from halfway.pipelines.cli.options import ConfigOption, JsonOption, SetOption
from halfway.pipelines.cli.output import show_json
from halfway.pipelines.local.command_settings import DEFAULT_CONFIG, command_settings
from halfway.pipelines.operate.doctor import findings as checks
from halfway.pipelines.operate.doctor.findings import Finding, State
from halfway.pipelines.operate.doctor.kafka_checks import kafka
from halfway.pipelines.operate.doctor.storage_checks import storage
from halfway.pipelines.runtime.session import own_session
from halfway.schemas.errors import SettingsError

_MARKS = {State.OK: ("✓", "green"), State.WARNING: ("!", "yellow"), State.PROBLEM: ("✗", "red"), State.UNKNOWN: ("?", "yellow")}


def doctor(config: ConfigOption = None, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Look at all that the job needs, and say what is wrong and what to do. Nothing is changed. Exit code 1 if something is wrong."""
    findings = []
    with own_session():
        for finding in _findings(config, overrides):
            findings.append(finding)
            if not as_json:
                _show(finding)
    ok = all(finding.state is not State.PROBLEM for finding in findings)
    if as_json:
        show_json({"ok": ok, "checks": [{"check": each.check, "state": each.state, "text": each.text} for each in findings]})
    if not ok:
        raise typer.Exit(1)


def _findings(config: Path | None, overrides: list[str] | None) -> Iterator[Finding]:
    yield from checks.machine()
    try:
        settings = command_settings(config, overrides)
    except SettingsError as error:
        yield Finding("settings", State.PROBLEM, str(error))
        yield Finding("the rest", State.UNKNOWN, "not looked at: the settings do not load")
        return
    file = config or (DEFAULT_CONFIG if DEFAULT_CONFIG.is_file() else None)
    yield Finding("settings", State.OK, f"{file or 'the defaults'}, with what the environment and the command line override")
    yield from kafka(settings)
    yield from storage(settings)
    yield from checks.disk(settings.storage)
    yield from checks.metrics(settings.metrics)


def _show(finding: Finding) -> None:
    mark, style = _MARKS[finding.state]
    # One line each, however long: a terminal wraps it, a pipe gets it whole.
    Console().print(Text.assemble((mark, style), f" {finding.check:<11}", finding.text), soft_wrap=True)
