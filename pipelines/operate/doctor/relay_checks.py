"""Checks the relays for `halfway doctor`: the topic of their bookmarks, who runs, and which topics are stopped."""

from collections.abc import Iterator

from halfway.pipelines.kafka.admin import Admin
from halfway.pipelines.kafka.topic_setup import verify_relay_topic
from halfway.pipelines.operate.doctor.finding import Finding, Health
from halfway.pipelines.relay.positions import BEFORE_THE_FIRST
from halfway.pipelines.relay.relay_status import RelayStatus, relay_states
from halfway.schemas.errors import AccessError, TopicError
from halfway.schemas.settings import KafkaSettings

_CHECK = "relay"


def relay_findings(client: Admin, kafka: KafkaSettings) -> Iterator[Finding]:
    """Check every relay that has a bookmark. Yield nothing without one, or if this user may not look.

    Raises:
        RelayError: the topic holds something else.
        KafkaUnavailableError: Kafka cannot be reached.
    """
    relays: list[RelayStatus] = []
    try:
        relays = relay_states(client, kafka)
        if relays:
            verify_relay_topic(client, kafka.relay_topic)
    except TopicError as error:
        yield Finding(_CHECK, Health.PROBLEM, str(error))
    except AccessError:
        pass
    for relay in relays:
        if relay.lost:
            what = f"{kafka.relay_topic} has lost {relay.lost} of the topics that {relay.name} has stopped"
            yield Finding(_CHECK, Health.PROBLEM, f'{what}: it does not start (docs/relay.md, "Starting, and a lost bookmark")')
        if not relay.instances:
            yield Finding(_CHECK, Health.WARNING, f"no instance of {relay.name} runs: start `halfway relay`")
        for stop in relay.stopped:
            yield Finding(_CHECK, Health.PROBLEM, f"{relay.name} has stopped {stop.topic} at {stop.transaction_id}: {stop.cause}")
        if relay.instances and not relay.stopped:
            yield Finding(_CHECK, Health.OK, f"{relay.name} runs, and no topic is stopped (bookmark {relay.after or BEFORE_THE_FIRST})")
