"""The demo: real traffic by the real client, and whether what comes of it is right.

It is a program on top of both sides, the job's and the producer's; of its modules `demo_traffic` imports `clients`.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass

from halfway.pipelines.demo.own_job import job_log, own_job
from halfway.pipelines.demo.traffic import Counts, Traffic
from halfway.pipelines.demo.verdict import Account, Accountant
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.pipelines.storage.delta_tables import table_path
from halfway.schemas.errors import SettingsError
from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table

_SLACK_S = 60.0
_LOOK_S = 0.5


@dataclass(frozen=True)
class Progress:
    """Where a demo is; `seconds` since it began to send."""

    sent: int
    total: int
    found: Counts
    seconds: float


@dataclass(frozen=True)
class DemoResult:
    """How a demo ended."""

    prefix: str
    expected: Counts
    found: Counts
    problems: tuple[str, ...]
    """What is wrong beyond the counts, a line each."""
    tables: dict[str, str]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether all is as it must be."""
        return self.expected == self.found and not self.problems


def run_demo(
    settings: Settings,
    messages: int,
    job_options: Sequence[str] | None,
    *,
    say: Callable[[str], None],
    show: Callable[[Progress], None],
) -> DemoResult:
    """Send traffic and wait until all of it is settled, or the time is up that the settings allow.

    Args:
        settings: the job's.
        messages: how many transactions to send, beside the few special ones.
        job_options: command-line options to start a job with; None if one is running.
        say: is told, in a sentence, what happens before and after the traffic.
        show: is told twice a second how far it is.

    Raises:
        SetupError: the package deltalake is missing, or the checkpoint is not on this machine.
        SettingsError: no Kafka is configured, or no ticks: time would stand still.
        TopicError: a topic breaks a rule.
        KafkaUnavailableError: Kafka cannot be reached.
        SendError: a half could not be stored.
        HalfwayError: the job of the demo ended, or a table cannot be read.
    """
    if job_options is not None and settings.resolution.tick_interval == 0:
        raise SettingsError("resolution.tick_interval is 0: nothing would ever fall due; set it to 1s")
    for report in create_topics(settings):
        if report.created:
            say(f"created the topic {report.topic} with {report.partitions} partitions")
    traffic = Traffic(settings, messages)
    with closing(Accountant(settings, traffic)) as accountant:
        if job_options is None:
            say("a job is running: using it")
        else:
            say(f"no job is running: starting one (its log: {job_log()})")
        with nullcontext(_nothing) if job_options is None else own_job(settings.storage, job_options) as check_job:
            say(f"sending {len(traffic.planned)} transactions and {len(traffic.quarantined)} wrong records as {traffic.prefix}*")
            account, seconds = _follow(settings, traffic, accountant, check_job, show)
            if job_options is not None:
                say("stopping the job")
    problems = list(account.problems)
    if not account.is_settled:
        problems.append(f"not all was settled in {seconds:.0f} s: is the job working, and with these settings?")
    tables = {str(table): table_path(settings.storage, table) for table in Table}
    return DemoResult(traffic.prefix, traffic.expected(), account.found, tuple(problems), tables, seconds)


def time_limit_s(settings: Settings) -> float:
    """Return how long a transaction may take that nobody answers, from its half to its discard (R4 to R6), with a minute's slack."""
    rules = settings.resolution
    return ((rules.transactionCheckMax + 1) * rules.transactionCheckInterval + rules.transactionTimeOut) / 1000 + _SLACK_S


def _follow(
    settings: Settings, traffic: Traffic, accountant: Accountant, check_job: Callable[[], None], show: Callable[[Progress], None]
) -> tuple[Account, float]:
    """Let the traffic run and look on until it is settled, or the time is up that begins when all is sent."""
    limit_s, started_s = time_limit_s(settings), time.monotonic()
    sent_s: float | None = None
    with traffic:
        while True:
            accountant.watch(_LOOK_S)
            check_job()
            if traffic.failure is not None:
                raise traffic.failure
            account = accountant.account()
            now_s = time.monotonic()
            show(Progress(traffic.sent, len(traffic.planned), account.found, now_s - started_s))
            if traffic.is_sent and sent_s is None:
                sent_s = now_s
            if account.is_settled or (sent_s is not None and now_s - sent_s > limit_s):
                return account, now_s - started_s


def _nothing() -> None:
    """Look after a job that is somebody else's."""
