"""Judges the configuration of topics: what they must keep and take (docs/contract.md, R17).

A problem breaks a rule, and a note is a difference that breaks none. Asks Kafka nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from halfway.clients.kafka.diagnosis import alter_topic
from halfway.schemas.settings import Settings

UNLIMITED = -1
UNCOMPRESSED = "uncompressed"
"""`max.message.bytes` then limits what a batch holds, and not only what it was compressed to."""
_DAY_MS, _HOUR_MS = 86_400_000, 3_600_000
_LATEST_TIME = "message.timestamp.after.max.ms"


@dataclass(frozen=True)
class TopicReport:
    """The settings of one topic. `notes` are differences that break no rule, `problems` are those that do."""

    topic: str
    partitions: int
    created: bool
    timestamp_type: str
    retention_ms: int
    max_message_bytes: int
    min_insync_replicas: int
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def retention_text(self) -> str:
        """Return how long the topic keeps its records: `7 d`, or `for ever`."""
        return "for ever" if self.retention_ms == UNLIMITED else f"{self.retention_ms / _DAY_MS:.3g} d"


def new_topic_config(settings: Settings, topic: str) -> dict[str, str]:
    """Return the configuration of a new topic.

    The op topic keeps its records as long as the half topic: a job that reads both from the earliest offset must find
    the verdict of each half. A check topic does too: a request that is deleted before its group has passed it would
    count (R15).
    """
    return {
        "message.timestamp.type": "LogAppendTime",
        "cleanup.policy": "delete",
        "max.message.bytes": str(_needed_bytes(settings, topic)),
        "retention.ms": str(_good_retention_ms(settings)),
        "compression.type": UNCOMPRESSED,
    }


def is_timed(settings: Settings, topic: str) -> bool:
    """Return True if the job reads its time from the topic: it is no check topic."""
    return topic in (settings.kafka.half_topic, settings.kafka.op_topic)


def _good_retention_ms(settings: Settings) -> int:
    return max(7 * _DAY_MS, settings.resolution.half_retention + _DAY_MS)


def report_on(settings: Settings, topic: str, partitions: int, config: Mapping[str, str]) -> TopicReport:
    """Return a report on an existing topic, with its problems and notes."""
    return TopicReport(
        topic=topic,
        partitions=partitions,
        created=False,
        timestamp_type=config["message.timestamp.type"],
        retention_ms=int(config["retention.ms"]),
        max_message_bytes=int(config["max.message.bytes"]),
        min_insync_replicas=int(config["min.insync.replicas"]),
        notes=tuple(_notes(settings, topic, config)),
        problems=tuple(_problems(settings, topic, config)),
    )


def _problems(settings: Settings, topic: str, config: Mapping[str, str]) -> list[str]:
    problems = []
    if topic == settings.kafka.half_topic:
        problems.append(retention_problem(settings, topic, config))
    if "compact" in config["cleanup.policy"]:
        what = f"topic {topic} is compacted, which loses all but the last record of an id"
        problems.append(f"{what}: {alter_topic(topic, 'cleanup.policy', 'delete')}")
    problems.append(size_problem(settings, topic, config))
    return [problem for problem in problems if problem]


def _notes(settings: Settings, topic: str, config: Mapping[str, str]) -> list[str]:
    notes = []
    if config["message.timestamp.type"] != "LogAppendTime":
        notes.append("CreateTime: producers and the job set the record times by their clocks, not the broker alone")
        if is_timed(settings, topic) and settings.kafka.signing.keys:
            notes.append("CreateTime, with keys: halves of a client whose clock is 5 minutes behind are refused, and it does not notice")
        if is_timed(settings, topic) and int(config.get(_LATEST_TIME, 0)) > _HOUR_MS:
            notes.append(f"one record with an absurd time would end the job: {alter_topic(topic, _LATEST_TIME, _HOUR_MS)}")
    if int(config.get("retention.bytes", UNLIMITED)) != UNLIMITED:
        notes.append("retention.bytes is set: under load Kafka deletes records before retention.ms is over")
    if not is_timed(settings, topic) and (note := retention_problem(settings, topic, config)):
        notes.append(note)
    if config["compression.type"] != UNCOMPRESSED:
        what = "a small compressed batch may hold any amount of data, which its readers take into memory"
        notes.append(f"{what}: {alter_topic(topic, 'compression.type', UNCOMPRESSED)}")
    return notes


def _needed_bytes(settings: Settings, topic: str) -> int:
    """Return the size of the largest record. A check request is larger than its half."""
    return settings.resolution.max_record_bytes if is_timed(settings, topic) else settings.resolution.max_check_bytes


def size_problem(settings: Settings, topic: str, config: Mapping[str, str]) -> str | None:
    """Return what is wrong if the topic takes no record of the largest size, or None."""
    taken, needed = int(config["max.message.bytes"]), _needed_bytes(settings, topic)
    if taken >= needed:
        return None
    what = f"topic {topic} takes messages up to {taken} bytes, fewer than max_body_bytes and headers need"
    return f"{what}: {alter_topic(topic, 'max.message.bytes', needed)}, or lower resolution.max_body_bytes"


def keeps_until_expired(settings: Settings, config: Mapping[str, str]) -> bool:
    """Return True if the topic keeps a record until a half of its time expires."""
    retention_ms = int(config["retention.ms"])
    return retention_ms == UNLIMITED or retention_ms >= settings.resolution.half_retention


def retention_problem(settings: Settings, topic: str, config: Mapping[str, str]) -> str | None:
    """Return what is wrong if the topic keeps its records shorter than `half_retention`, or None.

    Then a half may be lost (R17), or a group that is stuck is no longer behind, because the check request that it has
    not passed is deleted (R15).
    """
    if keeps_until_expired(settings, config):
        return None
    retention_ms, needed_ms = int(config["retention.ms"]), settings.resolution.half_retention
    records = "halves" if topic == settings.kafka.half_topic else "check requests"
    what = f"topic {topic} keeps {records} for {retention_ms} ms, shorter than half_retention ({needed_ms} ms)"
    return f"{what}: {alter_topic(topic, 'retention.ms', _good_retention_ms(settings))}, or lower resolution.half_retention"


def verdicts_problem(settings: Settings, configs: Mapping[str, Mapping[str, str]]) -> str | None:
    """Return what is wrong if the op topic keeps verdicts shorter than the half topic keeps halves, or None."""
    half, op = settings.kafka.half_topic, settings.kafka.op_topic
    if half not in configs or op not in configs:
        return None
    halves_ms, verdicts_ms = int(configs[half]["retention.ms"]), int(configs[op]["retention.ms"])
    if verdicts_ms == UNLIMITED or (halves_ms != UNLIMITED and verdicts_ms >= halves_ms):
        return None
    kept = "for ever" if halves_ms == UNLIMITED else f"for {halves_ms} ms"
    what = f"topic {op} keeps verdicts for {verdicts_ms} ms, shorter than {half} keeps their halves ({kept})"
    return f"{what}: {alter_topic(op, 'retention.ms', halves_ms)}"
