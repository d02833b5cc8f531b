"""Checks Kafka for `halfway doctor`: connection, topics, access rights, replicas, the broker's clock."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import chain
from time import time

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, KafkaException, Message
from confluent_kafka.admin import TopicDescription

from halfway.clients.kafka.diagnosis import alter_topic, missing_topics
from halfway.pipelines.kafka.admin import REQUEST_LIMIT_S, Admin, admin_client, describe_topics, unavailable
from halfway.pipelines.kafka.open_transactions import open_transactions
from halfway.pipelines.kafka.rights import JOB_GROUPS, job_rights, missing_rights
from halfway.pipelines.kafka.tick_records import last_ticks, other_jobs, tick_ms
from halfway.pipelines.kafka.topic_rules import TopicReport
from halfway.pipelines.kafka.topic_setup import inspect_topics
from halfway.pipelines.operate.doctor.finding import Finding, Health, errors_as_findings
from halfway.pipelines.operate.doctor.relay_checks import relay_findings
from halfway.pipelines.runtime.session import spark_session
from halfway.pipelines.storage.file_systems import local_path
from halfway.pipelines.storage.local_ownership import read_local_ownership
from halfway.schemas.security import SigningSettings
from halfway.schemas.settings import KafkaSettings, Settings, StorageSettings

_GOOD_CLOCK_MS = 10_000


def kafka_findings(settings: Settings) -> Iterator[Finding]:
    """Check Kafka and the topics. If Kafka cannot be reached, the topics are not checked."""
    yield from errors_as_findings("signing", lambda: _signing(settings.kafka.signing))
    clients: list[Admin] = []
    yield from errors_as_findings("kafka", lambda: _reachable(settings.kafka, clients))
    if not clients:
        yield Finding("topics", Health.UNKNOWN, "not checked: Kafka cannot be reached")
        return
    reports: list[TopicReport] = []
    yield from errors_as_findings("topics", lambda: _topics(clients[0], settings, reports))
    descriptions: dict[str, TopicDescription] = {}
    yield from errors_as_findings("access", lambda: _access(clients[0], settings.kafka, descriptions))
    yield from _replicas(reports, descriptions)
    timed = [topic for topic in (settings.kafka.half_topic, settings.kafka.op_topic) if topic in descriptions]
    yield from errors_as_findings("time", lambda: _open_transactions(clients[0], settings, timed))
    if settings.kafka.half_topic in descriptions:
        ticks: list[Message] = []
        yield from errors_as_findings("clock", lambda: _clock(clients[0], settings, ticks))
        yield from errors_as_findings("jobs", lambda: _other_jobs(ticks, settings.storage))
    yield from errors_as_findings("relay", lambda: relay_findings(clients[0], settings))


def _signing(signing: SigningSettings) -> Iterator[Finding]:
    signing.keyring_of_job()
    if not {*chain.from_iterable(signing.keys.values())}.isdisjoint(signing.job_keys):
        yield Finding("signing", Health.WARNING, "one of kafka.signing.job_keys is a group's key too: its services could forge time")
    if signing.accept_unsigned:
        text = "kafka.signing.accept_unsigned is true, so that nobody needs a signature: set it to false when everybody signs"
        yield Finding("signing", Health.WARNING, text)


def _reachable(kafka: KafkaSettings, clients: list[Admin]) -> Iterator[Finding]:
    client = admin_client(kafka)
    try:
        brokers = client.list_topics(timeout=REQUEST_LIMIT_S).brokers
    except KafkaException as error:
        raise unavailable(client, error.args[0]) from None
    clients.append(client)
    count = f"{len(brokers)} broker{'s' if len(brokers) != 1 else ''}"
    yield Finding("kafka", Health.OK, f"{kafka.servers()} answers: {count}, {kafka.security.protocol}")


def _topics(client: Admin, settings: Settings, reports: list[TopicReport]) -> Iterator[Finding]:
    reports.extend(inspect_topics(client, settings))
    missing = [name for name in settings.kafka.job_topics() if name not in {report.topic for report in reports}]
    if missing:
        yield Finding("topics", Health.PROBLEM, missing_topics(missing))
    for report in reports:
        yield from (Finding("topics", Health.PROBLEM, problem) for problem in report.problems)
        yield from (Finding("topics", Health.WARNING, f"{report.topic}: {note}") for note in report.notes)
        if not report.problems and not report.notes:
            partitions = f"{report.partitions} partition{'s' if report.partitions != 1 else ''}"
            yield Finding("topics", Health.OK, f"{report.topic}: {partitions}, {report.timestamp_type}, kept {report.retention_text}")


def _access(client: Admin, settings: KafkaSettings, descriptions: dict[str, TopicDescription]) -> Iterator[Finding]:
    """Ask Kafka for the rights of this user, and describe the topics."""
    descriptions.update(describe_topics(client, job_rights(settings)))
    missing = missing_rights(client, job_rights(settings), **JOB_GROUPS)
    yield from (Finding("access", Health.PROBLEM, text) for text in missing)
    if descriptions and not missing:
        yield Finding("access", Health.OK, "this user may read and write what the job reads and writes")


def _replicas(reports: list[TopicReport], descriptions: Mapping[str, TopicDescription]) -> Iterator[Finding]:
    """Check the number of replicas, how many are in sync, and `min.insync.replicas`."""
    wrong: list[Finding] = []
    for report in reports:
        partitions = descriptions[report.topic].partitions if report.topic in descriptions else []
        # The partition with the fewest in-sync replicas stands for its topic.
        in_sync, replicas = min(((len(partition.isr), len(partition.replicas)) for partition in partitions), default=(0, 0))
        for state, text in replica_problems(report.topic, replicas, in_sync, report.min_insync_replicas):
            wrong.append(Finding("replicas", state, f"{report.topic} {text}"))
    yield from wrong
    if reports and not wrong:
        yield Finding("replicas", Health.OK, "no message is lost if one broker is lost")


def replica_problems(topic: str, replicas: int, in_sync: int, min_in_sync: int) -> Iterator[tuple[Health, str]]:
    """Yield what is wrong with the replication of a topic.

    Args:
        topic: its name.
        replicas: replicas of its worst partition; 0 if they are unknown.
        in_sync: how many of them are in sync.
        min_in_sync: `min.insync.replicas`.
    """
    if not replicas:
        return
    if in_sync < min(min_in_sync, replicas) or min_in_sync > replicas:
        remedy = f"start the brokers that are down, or set min.insync.replicas to at most {max(1, replicas - 1)}"
        yield (
            Health.PROBLEM,
            f"takes no writes: {in_sync} of {replicas} replicas are in sync, and min.insync.replicas is {min_in_sync}; {remedy}",
        )
    elif in_sync < replicas:
        yield Health.WARNING, f"has {in_sync} of {replicas} replicas in sync: a broker is down or slow"
    if replicas == 1:
        yield Health.WARNING, "has one replica: losing its broker loses messages; use 3, and min.insync.replicas=2, in production"
    elif min_in_sync == 1:
        remedy = alter_topic(topic, "min.insync.replicas", 2)
        yield Health.WARNING, f"has min.insync.replicas=1: a write may be on one broker only; use 2 of 3 in production: {remedy}"
    elif min_in_sync == replicas:
        yield Health.WARNING, f"has min.insync.replicas={replicas} of {replicas} replicas: with one broker down nothing can be written"


def _open_transactions(client: Admin, settings: Settings, topics: list[str]) -> Iterator[Finding]:
    """Name the Kafka transactions that are open in the topics that tell the time (R18)."""
    now_ms = time() * 1000
    for each in open_transactions(client, settings.kafka, topics, lambda: spark_session(settings, small=True)):
        age = "" if each.since_ms is None else f", for {max(0, now_ms - each.since_ms) / 1000:.0f} s"
        what = f"a Kafka transaction is open in {each}{age}: the horizon waits for its end"
        place = f"--topic {each.topic} --partition {each.partition} --start-offset {each.offset}"
        remedy = f"if it lasts, end its producer, or abort it by `kafka-transactions.sh --bootstrap-server … abort {place}`"
        yield Finding("time", Health.WARNING, f"{what}; {remedy}")


def _clock(client: Admin, settings: Settings, ticks: list[Message]) -> Iterator[Finding]:
    """Read the last `ticks`. Show how far the clocks of broker and job are apart: a job refuses ticks that are far."""
    kafka = settings.kafka
    ticks += last_ticks(client, kafka)
    if not ticks:
        yield Finding("clock", Health.OK, f"unknown: no job has lately written a tick to partition 0 of {kafka.half_topic}")
        return
    kind, broker_ms = ticks[-1].timestamp()
    if kind != TIMESTAMP_LOG_APPEND_TIME:
        yield Finding("clock", Health.OK, "not compared: the half topic has CreateTime")
        return
    ahead_ms = broker_ms - (tick_ms(ticks[-1]) or 0)
    when = datetime.fromtimestamp(broker_ms / 1000, UTC).isoformat(timespec="seconds")
    ago_s = max(0.0, time() - broker_ms / 1000)
    far = f"{abs(ahead_ms)} ms {'ahead of' if ahead_ms >= 0 else 'behind'} the job's"
    text = f"the broker's is {far}, delivery included (last tick {when}, {ago_s:.0f} s ago)"
    limit_ms = settings.resolution.max_clock_skew
    if abs(ahead_ms) > limit_ms:
        text += f": the job refuses ticks that are more than resolution.max_clock_skew ({limit_ms} ms) off, and time stands still: use NTP"
        yield Finding("clock", Health.PROBLEM, text)
    else:
        yield Finding("clock", Health.OK if abs(ahead_ms) <= _GOOD_CLOCK_MS else Health.WARNING, text)


def _other_jobs(ticks: list[Message], storage: StorageSettings) -> Iterator[Finding]:
    """Warn of a job that ticks and has other tables than those of the settings."""
    if storage.catalog_schema or any(local_path(uri) is None for uri in (storage.warehouse, storage.checkpoint)):
        return
    for told in other_jobs(ticks, read_local_ownership(storage).queries()):
        yield Finding("jobs", Health.WARNING, told)
