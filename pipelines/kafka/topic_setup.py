"""Creates the topics, and checks that existing ones keep what the rules need (docs/contract.md, R17).

New topics begin with a tick in each partition. A job that starts only after a backlog then knows all partitions, and
time, from the first batch on.
"""

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import replace

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AclOperation, ConfigResource, NewTopic, ResourceType

from halfway.clients.kafka.diagnosis import alter_topic, missing_right, missing_topics
from halfway.pipelines.kafka.admin import REQUEST_LIMIT_S, Admin, admin_client, in_failover_too, partition_counts, unavailable
from halfway.pipelines.kafka.rights import verify_rights
from halfway.pipelines.kafka.tick_records import write_ticks
from halfway.pipelines.kafka.topic_rules import (
    UNLIMITED,
    TopicReport,
    is_timed,
    keeps_until_expired,
    new_topic_config,
    report_on,
    retention_problem,
    size_problem,
    verdicts_problem,
)
from halfway.pipelines.kafka.writer import RecordWriter
from halfway.schemas.errors import AccessError, KafkaUnavailableError, TopicError
from halfway.schemas.settings import Settings

DEFAULT_PARTITIONS = 4
BROKER_DEFAULT_REPLICATION = -1
RELAY_PARTITIONS = 1
"""Whoever has the partition is the active relay."""
_RELAY_TOPIC_CONFIG = {
    "cleanup.policy": "compact",
    # A relay that becomes active reads the whole topic. Kafka does not compact the newest segment.
    "segment.bytes": str(1024 * 1024),
    "segment.ms": "3600000",
    "min.cleanable.dirty.ratio": "0.1",
}
_POLL_S = 0.1
_TICK_LIMIT_MS = 10_000

log = logging.getLogger(__name__)


def create_relay_topic(settings: Settings, replication: int = BROKER_DEFAULT_REPLICATION) -> TopicReport:
    """Create the topic in which `halfway relay` keeps its bookmark, if it is missing, and verify it.

    Args:
        settings: all settings.
        replication: the number of replicas of a new topic; -1 for the broker's default.

    Raises:
        TopicError: Kafka refuses the topic, or an existing one would lose the bookmark.
        AccessError: a right is missing.
        KafkaUnavailableError: Kafka cannot be reached or refuses the connection.
    """
    client, topic = admin_client(settings.kafka), settings.kafka.relay_topic
    created = _create_missing(client, {topic: _RELAY_TOPIC_CONFIG}, RELAY_PARTITIONS, replication)
    config = verify_relay_topic(client, topic)
    return _report(topic, RELAY_PARTITIONS, config, created=topic in created)


def create_real_topic(settings: Settings, topic: str, partitions: int, replication: int) -> TopicReport:
    """Create a topic for the messages that `halfway relay` sends on, with the brokers' defaults, if it is missing.

    Args:
        settings: all settings.
        topic: its name.
        partitions: how many a new topic has.
        replication: the number of replicas of a new topic; -1 for the broker's default.

    Raises:
        TopicError: Kafka refuses the topic.
        AccessError: a right is missing.
        KafkaUnavailableError: Kafka cannot be reached or refuses the connection.
    """
    client = admin_client(settings.kafka)
    created = _create_missing(client, {topic: {}}, partitions, replication)
    count = partition_counts(client, [topic]).get(topic, partitions)  # Not every broker may know it yet.
    return _report(topic, count, _configs(client, [topic])[topic], created=topic in created)


def _report(topic: str, partitions: int, config: Mapping[str, str], *, created: bool) -> TopicReport:
    return TopicReport(
        topic=topic,
        partitions=partitions,
        created=created,
        timestamp_type=config["message.timestamp.type"],
        retention_ms=int(config["retention.ms"]) if "delete" in config["cleanup.policy"] else UNLIMITED,
        max_message_bytes=int(config["max.message.bytes"]),
        min_insync_replicas=int(config["min.insync.replicas"]),
    )


def verify_relay_topic(client: Admin, topic: str) -> dict[str, str]:
    """Return the configuration of the relay's own topic, which keeps its bookmarks.

    Raises:
        TopicError: it would lose them.
        AccessError: a right is missing.
        KafkaUnavailableError: Kafka cannot be reached.
    """
    config, [partitions] = _configs(client, [topic])[topic], partition_counts(client, [topic]).values()
    if config["cleanup.policy"] != "compact":
        what = f"topic {topic} is not compacted, so that it would lose the relay's bookmark"
        raise TopicError(f"{what}: {alter_topic(topic, 'cleanup.policy', 'compact')}")
    verify_one_partition(topic, partitions)
    return config


def verify_one_partition(topic: str, partitions: int) -> None:
    """Refuse a topic of bookmarks to which partitions were added: an older one could be taken for the last.

    Raises:
        TopicError: it has several partitions.
    """
    if partitions != RELAY_PARTITIONS:
        raise TopicError(f"topic {topic} has {partitions} partitions, and the relay needs one: name another topic in kafka.relay_topic")


def create_topics(
    settings: Settings, partitions: int = DEFAULT_PARTITIONS, replication: int = BROKER_DEFAULT_REPLICATION
) -> list[TopicReport]:
    """Create the missing topics, write their first ticks, and verify them all.

    Where the ticks cannot be written, the reports of the new topics have a note. No `tick_interval`, no ticks.

    Args:
        settings: the job's settings.
        partitions: the number of partitions of each new topic.
        replication: the number of replicas of each new topic; -1 for the broker's default.

    Raises:
        TopicError: Kafka refuses a topic, or an existing topic breaks a rule (R17).
        AccessError: a right is missing.
        KafkaUnavailableError: Kafka cannot be reached or refuses the connection.
    """
    client = admin_client(settings.kafka)
    wanted = {topic: new_topic_config(settings, topic) for topic in settings.kafka.job_topics()}
    created = _create_missing(client, wanted, partitions, replication)
    timed = {topic: partitions for topic in created if is_timed(settings, topic)}
    problem = _write_first_ticks(client, settings, timed) if timed and settings.resolution.tick_interval > 0 else None
    reports = _verify(client, settings, created, partitions)
    if problem is None:
        return reports
    note = f"no first tick, so that time begins with the job's own ticks: {problem}"
    return [replace(report, notes=(*report.notes, note)) if report.topic in timed else report for report in reports]


def inspect_topics(client: Admin, settings: Settings) -> list[TopicReport]:
    """Return a report on each of the topics that exists.

    Raises:
        KafkaUnavailableError: Kafka cannot be reached or refuses the connection.
    """
    counts = partition_counts(client, settings.kafka.job_topics())
    configs = _configs(client, list(counts)) if counts else {}
    reports = [report_on(settings, topic, counts[topic], configs[topic]) for topic in counts]
    problem = verdicts_problem(settings, configs)
    if problem is None:
        return reports
    op_topic = settings.kafka.op_topic
    return [replace(report, problems=(*report.problems, problem)) if report.topic == op_topic else report for report in reports]


def verify_topics(client: Admin, settings: Settings, *, adopt: bool = False) -> None:
    """Refuse topics that break a rule. Each start of the job calls it.

    - The half topic keeps halves until they expire (R17).
    - The op topic keeps verdicts as long; for an adoption as long as the half topic keeps halves, because a new
      checkpoint would otherwise read a half that was rolled back without its verdict, and ask about it.
    - The check topics take what the half topic takes.

    What may only do harm later is logged. A user who may not describe the op or a check topic is not refused.

    Args:
        client: asks Kafka.
        settings: the job's settings.
        adopt: the start takes over existing tables with a new checkpoint.

    Raises:
        TopicError: a topic is missing, or one keeps or takes too little; the message says what to set.
        AccessError: this user may not describe the half topic's configuration.
        KafkaUnavailableError: Kafka cannot be reached or refuses the connection.
    """
    half, op, *checks = settings.kafka.job_topics()
    _verify_existing(settings, partition_counts(client, settings.kafka.job_topics()))
    configs = _configs(client, [half])
    for topic in (op, *checks):
        try:
            configs |= _configs(client, [topic])
        except AccessError as error:
            log.warning("event=topic_not_verified topic=%r cause=%r", topic, str(error))
    problems = [retention_problem(settings, half, configs[half])]
    notes: list[str | None] = []
    verdicts = verdicts_problem(settings, configs)
    if verdicts:
        enough = keeps_until_expired(settings, configs[op]) and not adopt
        (notes if enough else problems).append(verdicts)
    for check in (topic for topic in checks if topic in configs):
        room = size_problem(settings, check, configs[check])
        if room:
            enough = int(configs[check]["max.message.bytes"]) >= int(configs[half]["max.message.bytes"])
            (notes if enough else problems).append(room)
        notes.append(retention_problem(settings, check, configs[check]))
    for note in filter(None, notes):
        log.warning("event=topic_to_correct cause=%r", note)
    found = [problem for problem in problems if problem]
    if found:
        raise TopicError("; ".join(found))


def _create_missing(client: Admin, wanted: Mapping[str, Mapping[str, str]], partitions: int, replication: int) -> list[str]:
    """Create the topics that are missing, each with its configuration, and return those that were created."""
    existing = partition_counts(client, list(wanted))
    missing = [topic for topic in wanted if topic not in existing]
    created = [topic for topic in missing if _create(client, topic, partitions, replication, wanted[topic])]
    _wait_until_known(client, missing)
    return created


def _create(client: Admin, topic: str, partitions: int, replication: int, config: Mapping[str, str]) -> bool:
    """Create one topic; return False if it exists by now."""
    new = NewTopic(topic, num_partitions=partitions, replication_factor=replication, config=dict(config))
    future = client.create_topics([new], request_timeout=REQUEST_LIMIT_S)[topic]
    try:
        future.result()
    except KafkaException as error:
        failure: KafkaError = error.args[0]
        if failure.code() == KafkaError.TOPIC_ALREADY_EXISTS:
            return False
        if failure.code() in (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED):
            raise AccessError(missing_right(client.user, "Create", "topic", topic)) from None
        if failure.code() < 0:  # an error of librdkafka: no broker has answered
            raise unavailable(client, failure) from None
        raise TopicError(f"Kafka does not create topic {topic}: {failure.str()}") from None
    log.info("event=topic_created topic=%r partitions=%d", topic, partitions)
    return True


def _wait_until_known(client: Admin, topics: list[str]) -> None:
    """Wait until the brokers know new topics. The answer to a creation comes from the controller alone."""
    deadline_s = time.monotonic() + REQUEST_LIMIT_S
    while len(partition_counts(client, topics)) < len(topics):
        if time.monotonic() > deadline_s:
            raise KafkaUnavailableError(f"topics were created, but no broker knows them after {REQUEST_LIMIT_S:g} s: {', '.join(topics)}")
        time.sleep(_POLL_S)


def _write_first_ticks(client: Admin, settings: Settings, partitions: Mapping[str, int]) -> str | None:
    """Write a tick to each partition of new topics; return what prevented it."""
    try:
        verify_rights(client, dict.fromkeys(partitions, (AclOperation.WRITE,)))
        write_ticks(
            RecordWriter(settings.kafka, limit_ms=_TICK_LIMIT_MS, linger_ms=0), partitions, keyring=settings.kafka.signing.keyring()
        )
    except (AccessError, KafkaUnavailableError) as error:
        return str(error)
    except KafkaException as error:
        return str(error.args[0].str())
    return None


def _verify(client: Admin, settings: Settings, created: list[str], partitions: int) -> list[TopicReport]:
    reports = inspect_topics(client, settings)
    _verify_existing(settings, {report.topic for report in reports})
    problems = [problem for report in reports for problem in report.problems]
    if problems:
        raise TopicError("; ".join(problems))
    for number, report in enumerate(reports):
        other = f"has {report.partitions} partitions, not {partitions}: existing topics are left as they are"
        notes = report.notes if report.partitions == partitions else (*report.notes, other)
        reports[number] = replace(report, created=report.topic in created, notes=notes)
    return reports


def _verify_existing(settings: Settings, known: Collection[str]) -> None:
    missing = [topic for topic in settings.kafka.job_topics() if topic not in known]
    if missing:
        raise TopicError(missing_topics(missing))


def _configs(client: Admin, topics: list[str]) -> dict[str, dict[str, str]]:
    resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]

    def ask(limit_s: float) -> dict[str, dict[str, str]]:
        configs = {}
        for resource, future in client.describe_configs(resources, request_timeout=limit_s).items():
            try:
                configs[resource.name] = {name: str(entry.value) for name, entry in future.result().items()}
            except KafkaException as error:
                if error.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                    raise AccessError(missing_right(client.user, "DescribeConfigs", "topic", resource.name)) from None
                raise
        return configs

    return in_failover_too(client, ask)
