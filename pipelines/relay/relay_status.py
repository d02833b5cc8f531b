"""Tells where the relays are, for `halfway status`: their bookmarks and stopped topics, and how many run."""

from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException

from halfway.clients.kafka.diagnosis import missing_right
from halfway.pipelines.kafka.admin import REQUEST_LIMIT_S, Admin, partition_counts, unavailable
from halfway.pipelines.relay.leader_election import relay_id
from halfway.pipelines.relay.position_reader import read_positions
from halfway.schemas.errors import AccessError
from halfway.schemas.settings import KafkaSettings


@dataclass(frozen=True)
class StoppedTopic:
    """A topic that has refused a message (docs/relay.md)."""

    topic: str
    transaction_id: str
    refusal: str
    cause: str
    after: str | None


@dataclass(frozen=True)
class RelayStatus:
    """A relay: its bookmark, EPOCH.BATCH or None before the first batch, and how many instances run. One is active."""

    name: str
    table: str
    """Delta's id of the table that the bookmark is of."""
    after: str | None
    instances: int
    stopped: tuple[StoppedTopic, ...]
    lost: int = 0
    """How many stopped topics Kafka has lost."""


def relay_states(client: Admin, kafka: KafkaSettings) -> list[RelayStatus]:
    """Return every relay that has a bookmark, by name; none if the relay's own topic is missing.

    Raises:
        AccessError: this user may not read the relay's own topic, or describe the group of a relay.
        RelayError: the topic holds something else.
        KafkaUnavailableError: Kafka cannot be reached.
    """
    if not partition_counts(client, [kafka.relay_topic]):
        return []
    states = []
    for name, positions in sorted(read_positions(client, kafka).items()):
        stopped = tuple(
            StoppedTopic(named, stop.transaction_id, str(stop.refusal), stop.cause, None if stop.after is None else str(stop.after))
            for named, stop in sorted(positions.stopped.items())
        )
        after = None if positions.after is None else str(positions.after)
        states.append(RelayStatus(name, positions.table, after, _members(client, relay_id(kafka, name)), stopped, positions.lost))
    return states


def _members(client: Admin, group: str) -> int:
    # Not in what runs for long: see `Admin.may_describe_group`.
    [future] = client.describe_consumer_groups([group], request_timeout=REQUEST_LIMIT_S).values()
    try:
        return len(client.result(future).members)
    except KafkaException as error:
        failure: KafkaError = error.args[0]
        if failure.code() == KafkaError.GROUP_ID_NOT_FOUND:
            return 0
        if failure.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
            raise AccessError(missing_right(client.user, "Describe", "group", group)) from None
        raise unavailable(client, failure) from None
