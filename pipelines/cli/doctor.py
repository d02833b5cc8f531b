"""`halfway doctor`: check everything that the job needs."""

import os
from collections.abc import Iterator
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from halfway.pipelines.cli.options import ConfigOption, JsonOption, SetOption
from halfway.pipelines.cli.output import printable, show_json
from halfway.pipelines.local.command_settings import DEFAULT_CONFIG, command_settings
from halfway.pipelines.operate.doctor.finding import Finding, Health
from halfway.schemas.errors import HalfwayError
from halfway.schemas.settings import ENV_PREFIX, ResolutionSettings

_MARKS = {Health.OK: ("✓", "green"), Health.WARNING: ("!", "yellow"), Health.PROBLEM: ("✗", "red"), Health.UNKNOWN: ("?", "yellow")}


def doctor(config: ConfigOption = None, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Check everything that the job needs, and say how to fix what is wrong. Changes nothing.

    The exit code is 1 if there is a problem.
    """
    from halfway.pipelines.runtime.session import own_session

    findings = []
    with own_session():
        for finding in _findings(config, overrides):
            findings.append(finding)
            if not as_json:
                _show(finding)
    ok = all(finding.health is not Health.PROBLEM for finding in findings)
    if as_json:
        show_json({"ok": ok, "checks": [{"check": each.check, "state": each.health, "text": each.text} for each in findings]})
    if not ok:
        raise typer.Exit(1)


def _findings(config: Path | None, overrides: list[str] | None) -> Iterator[Finding]:
    from halfway.pipelines.operate.doctor.kafka_checks import kafka_findings
    from halfway.pipelines.operate.doctor.machine_checks import disk_findings, machine_findings, metrics_findings
    from halfway.pipelines.operate.doctor.storage_checks import storage_findings

    yield from machine_findings()
    try:
        settings = command_settings(config, overrides)
    except HalfwayError as error:
        yield Finding("settings", Health.PROBLEM, str(error))
        yield Finding("the rest", Health.UNKNOWN, "not checked: the settings do not load")
        return
    yield Finding("settings", Health.OK, _origins(config, overrides))
    yield from _odd_times(settings.resolution)
    yield from kafka_findings(settings)
    yield from storage_findings(settings)
    yield from disk_findings(settings.storage)
    yield from metrics_findings(settings.metrics)


def _odd_times(times: ResolutionSettings) -> Iterator[Finding]:
    if times.half_retention < times.transactionTimeOut:
        lengths = f"half_retention ({times.half_retention} ms) is shorter than transactionTimeOut ({times.transactionTimeOut} ms)"
        effect = "a message without a verdict is asked about once, and discarded (R8)"
        yield Finding("settings", Health.WARNING, f"resolution.{lengths}: {effect}; a bare number is ms, write 72h for hours")


def _origins(config: Path | None, overrides: list[str] | None) -> str:
    """Return where the settings come from."""
    file = config or (DEFAULT_CONFIG if DEFAULT_CONFIG.is_file() else None)
    by_environment = any(name.upper().startswith(ENV_PREFIX) for name in os.environ)
    by = [text for text, is_set in (("the environment", by_environment), ("the command line", overrides)) if is_set]
    return f"{file or 'the defaults'}{', overridden by ' if by else ''}{' and '.join(by)}"


def _show(finding: Finding) -> None:
    mark, style = _MARKS[finding.health]
    # A finding is one line of any length: a terminal wraps it, a pipe gets it whole.
    Console().print(Text.assemble((mark, style), f" {finding.check:<11}", printable(finding.text)), soft_wrap=True)
