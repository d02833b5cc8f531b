"""`halfway topics`: create and verify the topics."""

from dataclasses import asdict
from typing import Annotated

import typer

from halfway.pipelines.cli.options import ConfigOption, JsonOption, SetOption
from halfway.pipelines.cli.output import show_json, show_table
from halfway.pipelines.kafka.topic_rules import TopicReport
from halfway.pipelines.kafka.topic_setup import (
    BROKER_DEFAULT_REPLICATION,
    DEFAULT_PARTITIONS,
    create_real_topic,
    create_relay_topic,
    create_topics,
)
from halfway.pipelines.local.command_settings import command_settings
from halfway.pipelines.relay.route import Router

app = typer.Typer(no_args_is_help=True)


@app.callback()
def topics() -> None:
    """Create and verify the topics."""


@app.command()
def create(
    *,
    partitions: Annotated[int, typer.Option(min=1, help="Partitions of each new topic.")] = DEFAULT_PARTITIONS,
    replication: Annotated[
        int, typer.Option(min=-1, help="Replicas of each new topic; -1 for the broker's default.")
    ] = BROKER_DEFAULT_REPLICATION,
    relay: Annotated[bool, typer.Option("--relay", help="Also create the topic in which `halfway relay` keeps its bookmark.")] = False,
    real: Annotated[
        list[str] | None, typer.Option("--real", metavar="TOPIC", help="Also create this topic, to which a relay sends messages on.")
    ] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create the missing topics, and verify the existing ones."""
    if replication == 0:
        raise typer.BadParameter("must be -1 or at least 1", param_hint="--replication")
    settings = command_settings(config, overrides)
    for topic in real or ():
        if refusal := Router(settings).refusal(topic):
            raise typer.BadParameter(refusal[1], param_hint="--real")
    reports = create_topics(settings, partitions, replication)
    if relay:
        reports.append(create_relay_topic(settings, replication))
    reports += [create_real_topic(settings, topic, partitions, replication) for topic in real or ()]
    if as_json:
        show_json([asdict(report) for report in reports])
        return
    show_table(["topic", "partitions", "time", "kept", "largest", ""], [_row(report) for report in reports])


def _row(report: TopicReport) -> tuple[object, ...]:
    largest = f"{report.max_message_bytes / 1024**2:.3g} MiB"
    remarks = "; ".join(["created" if report.created else "existed", *report.notes])
    return report.topic, report.partitions, report.timestamp_type, report.retention_text, largest, remarks
