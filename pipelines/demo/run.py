"""Runs the demo: sends the traffic, waits until all of it is settled, and returns the result."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from halfway.pipelines.demo.own_job import job_log, own_job
from halfway.pipelines.demo.traffic import DemoCounts, Traffic
from halfway.pipelines.demo.verdict import DemoJudge, DemoVerdict
from halfway.pipelines.demo.watch import read_status
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.pipelines.storage.delta_tables import table_path
from halfway.schemas.errors import SettingsError
from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table

_SLACK_S = 60.0
_LOOK_S = 0.5


@dataclass(frozen=True)
class DemoProgress:
    """The progress of a demo, `seconds` after it began to send."""

    sent: int
    total: int
    found: DemoCounts
    seconds: float


@dataclass(frozen=True)
class DemoResult:
    """The result of a demo."""

    prefix: str
    expected: DemoCounts
    found: DemoCounts
    problems: tuple[str, ...]
    """What is wrong besides the counts, one line each."""
    tables: dict[str, str]
    seconds: float

    @property
    def ok(self) -> bool:
        """True if the counts are as expected and nothing is wrong."""
        return self.expected == self.found and not self.problems


def run_demo(
    settings: Settings,
    messages: int,
    job_options: Sequence[str] | None,
    *,
    say: Callable[[str], None],
    show: Callable[[DemoProgress], None],
) -> DemoResult:
    """Send traffic and wait until all of it is settled, or until `time_limit_s` has passed.

    Args:
        settings: the job's.
        messages: how many transactions to send, besides the few special ones.
        job_options: command-line options to start a job with; None if a job is running.
        say: gets a sentence for each step before and after the traffic.
        show: gets the progress twice a second.

    Raises:
        SetupError: the checkpoint is not on this machine.
        SettingsError: no Kafka is configured, or ticks are off, so that time would stand still.
        TopicError: a topic breaks a rule.
        KafkaUnavailableError: Kafka cannot be reached.
        SendError: a half could not be stored.
        HalfwayError: the demo's job ended, or a table cannot be read.
    """
    if job_options is not None and settings.resolution.tick_interval == 0:
        raise SettingsError("resolution.tick_interval is 0, so that no check would ever be due: set it to 1s")
    tables = {str(table): table_path(settings.storage, table) for table in Table}
    read_status(settings.storage)
    for report in create_topics(settings):
        if report.created:
            say(f"created the topic {report.topic} with {report.partitions} partitions")
    traffic = Traffic(settings, messages)
    judge = DemoJudge(settings, traffic)
    if job_options is None:
        say("a job is running: the demo uses it")
    else:
        say(f"no job is running: starting one (its log: {job_log()})")
    with nullcontext(lambda: True) if job_options is None else own_job(settings.storage, job_options) as check_job:
        say(f"sending {len(traffic.planned)} transactions and {len(traffic.quarantined)} invalid records as {traffic.prefix}*")
        verdict, seconds = _follow(settings, traffic, judge, check_job, show)
        if job_options is not None:
            say("stopping the job")
    problems = list(verdict.problems)
    if not verdict.is_settled:
        problems.append(f"not everything was settled in {seconds:.0f} s: check that the job works, and with these settings")
    return DemoResult(traffic.prefix, traffic.expected(), verdict.found, tuple(problems), tables, seconds)


def time_limit_s(settings: Settings) -> float:
    """Return how long an unanswered transaction may take from its half to its discard (R4 to R6), plus a minute."""
    rules = settings.resolution
    return ((rules.transactionCheckMax + 1) * rules.transactionCheckInterval + rules.transactionTimeOut) / 1000 + _SLACK_S


def _follow(
    settings: Settings, traffic: Traffic, judge: DemoJudge, check_job: Callable[[], bool], show: Callable[[DemoProgress], None]
) -> tuple[DemoVerdict, float]:
    """Run the traffic until it is settled, or until `time_limit_s` has passed since the job had all of it to read.

    A job that is starting reads what was sent meanwhile.

    Returns:
        The last verdict, and the seconds since the start.
    """
    limit_s, started_s = time_limit_s(settings), time.monotonic()
    ready_s: float | None = None
    with traffic:
        while True:
            time.sleep(_LOOK_S)
            has_begun = check_job()
            if traffic.failure is not None:
                raise traffic.failure
            verdict = judge.judge()
            now_s = time.monotonic()
            show(DemoProgress(traffic.sent, len(traffic.planned), verdict.found, now_s - started_s))
            if traffic.is_sent and has_begun and ready_s is None:
                ready_s = now_s
            if verdict.is_settled or (ready_s is not None and now_s - ready_s > limit_s):
                return verdict, now_s - started_s
