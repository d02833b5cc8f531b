"""Lists the rights (ACLs) that the job and its commands need, and finds the missing ones."""

from collections.abc import Collection, Mapping

from confluent_kafka.admin import AclOperation

from halfway.clients.kafka.diagnosis import missing_right
from halfway.pipelines.kafka.admin import Admin, describe_topics
from halfway.schemas.errors import AccessError, KafkaUnavailableError
from halfway.schemas.headers import check_group
from halfway.schemas.settings import KafkaSettings

FETCH_GROUP, OPERATOR_GROUP = "halfway-fetch", "halfway-operator"
"""Group ids of consumers that never join a group. librdkafka still asks for the group's coordinator, and needs the
right to Describe it."""
_BELOW = "any"
"""Stands for what comes after a prefix: a right to a group of the prefix's own name covers none of the others."""
_COORDINATORS_ASKED = 3
JOB_GROUPS = {"groups": (FETCH_GROUP,), "group_prefixes": (check_group(""),)}
"""The groups that the job describes: its own, and those of the producer groups' instances (R15)."""


def job_rights(settings: KafkaSettings) -> dict[str, tuple[AclOperation, ...]]:
    """Return the operations that the job needs on each topic. It writes its ticks to both topics that it reads.

    It reads check requests again where a group may have missed them (R15).
    """
    both = (AclOperation.READ, AclOperation.WRITE)
    return {
        settings.half_topic: (*both, AclOperation.DESCRIBE_CONFIGS),
        settings.op_topic: both,
        **dict.fromkeys(settings.all_check_topics(), both),
    }


def missing_rights(
    client: Admin, topics: Mapping[str, Collection[AclOperation]], groups: Collection[str] = (), group_prefixes: Collection[str] = ()
) -> list[str]:
    """Return a line for each right that this user lacks, with the command that grants it; missing topics are skipped.

    Args:
        client: an admin client. Kafka answers with or without an authorizer.
        topics: the operations needed on each topic.
        groups: consumer groups to Describe.
        group_prefixes: prefixes of consumer groups to Describe.

    Raises:
        AccessError: this user may not describe one of the topics.
        KafkaUnavailableError: Kafka cannot be reached or does not answer for 10 s; in a failover, for 30 s.
    """
    missing = []
    for topic, description in describe_topics(client, topics, with_operations=True).items():
        allowed = set(description.authorized_operations or ())
        # A user that sees a topic may at least Describe it: a Kafka that names no operation does not report them.
        wanted = topics[topic] if allowed else ()
        missing += [missing_right(client.user, _name(operation), "topic", topic) for operation in wanted if operation not in allowed]
    for group in groups:
        if client.may_describe_group(group) is False:
            missing.append(missing_right(client.user, "Describe", "group", group))
    return missing + [
        _missing_prefix(client, prefix) for prefix in group_prefixes if client.may_describe_group(f"{prefix}{_BELOW}") is False
    ]


def verify_check_groups(client: Admin) -> None:
    """Refuse to believe a list of groups from which Kafka leaves the services' out: it names no reason there.

    Raises:
        AccessError: this user may not Describe the services' groups (any more).
        KafkaUnavailableError: Kafka does not tell.
    """
    prefix = check_group("")
    # Of several, because one coordinator may be down. It is no matter which answers: the right is to the prefix.
    answers = (client.may_describe_group(f"{prefix}{_BELOW}{number}") for number in range(_COORDINATORS_ASKED))
    may_describe = next((answer for answer in answers if answer is not None), None)
    if may_describe is None:
        raise KafkaUnavailableError(f"Kafka does not tell whether this user may Describe the groups {prefix}*: are all brokers up?")
    if not may_describe:
        raise AccessError(_missing_prefix(client, prefix))


def _missing_prefix(client: Admin, prefix: str) -> str:
    return missing_right(client.user, "Describe", "group", prefix, is_prefix=True)


def verify_rights(
    client: Admin, topics: Mapping[str, Collection[AclOperation]], groups: Collection[str] = (), group_prefixes: Collection[str] = ()
) -> None:
    """Refuse to start what would fail midway because a right is missing; see `missing_rights`.

    Raises:
        AccessError: a right is missing.
        KafkaUnavailableError: Kafka cannot be reached or does not answer for 10 s; in a failover, for 30 s.
    """
    missing = missing_rights(client, topics, groups, group_prefixes)
    if missing:
        raise AccessError("; ".join(missing))


def _name(operation: AclOperation) -> str:
    return str(operation.name).title().replace("_", "")
