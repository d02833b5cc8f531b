"""Checks the relays for `halfway doctor`: the topic of their bookmarks, who runs, and which topics are stopped."""

from collections.abc import Iterator
from contextlib import suppress

from halfway.clients.reading.message_reader import MessageReader
from halfway.pipelines.kafka.admin import Admin
from halfway.pipelines.kafka.topic_setup import verify_relay_topic
from halfway.pipelines.operate.doctor.finding import Finding, Health
from halfway.pipelines.relay.positions import BEFORE_THE_FIRST, TablePosition
from halfway.pipelines.relay.relay_status import RelayStatus, relay_states
from halfway.schemas.bookmark import Bookmark
from halfway.schemas.errors import AccessError, HalfwayError, TopicError
from halfway.schemas.settings import Settings, StorageSettings

_CHECK = "relay"


def relay_findings(client: Admin, settings: Settings) -> Iterator[Finding]:
    """Check every relay that has a bookmark. Yield nothing without one, or if this user may not look.

    Raises:
        RelayError: the topic holds something else.
        KafkaUnavailableError: Kafka cannot be reached.
    """
    kafka = settings.kafka
    relays: list[RelayStatus] = []
    try:
        relays = relay_states(client, kafka)
        if relays:
            verify_relay_topic(client, kafka.relay_topic)
    except TopicError as error:
        yield Finding(_CHECK, Health.PROBLEM, str(error))
    except AccessError:
        pass
    end = _end_of_table(settings.storage) if relays else None
    for relay in relays:
        is_ahead = end is not None and relay.after is not None and end < TablePosition.parse(relay.after).bookmark
        if is_ahead:
            what = f"the bookmark of {relay.name} ({relay.after}) is ahead of the table, whose last message is in {end}"
            remedy = 'what comes before it would not be sent: were the tables put back? (docs/relay.md, "Starting, and a lost bookmark")'
            yield Finding(_CHECK, Health.PROBLEM, f"{what}: {remedy}")
        if relay.lost:
            what = f"{kafka.relay_topic} has lost {relay.lost} of the topics that {relay.name} has stopped"
            yield Finding(_CHECK, Health.PROBLEM, f'{what}: it does not start (docs/relay.md, "Starting, and a lost bookmark")')
        if not relay.instances:
            yield Finding(_CHECK, Health.WARNING, f"no instance of {relay.name} runs: start `halfway relay`")
        for stop in relay.stopped:
            yield Finding(_CHECK, Health.PROBLEM, f"{relay.name} has stopped {stop.topic} at {stop.transaction_id}: {stop.cause}")
        if relay.instances and not relay.stopped and not is_ahead:
            yield Finding(_CHECK, Health.OK, f"{relay.name} runs, and no topic is stopped (bookmark {relay.after or BEFORE_THE_FIRST})")


def _end_of_table(storage: StorageSettings) -> Bookmark | None:
    """Return the bookmark of the last message; None if the table cannot be read here, as without the extra `tables`."""
    with suppress(HalfwayError):
        return MessageReader(storage).end()
    return None
