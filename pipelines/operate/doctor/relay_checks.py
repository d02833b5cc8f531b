"""Checks the relays for `halfway doctor`: the topic of their bookmarks, who runs, and which topics are stopped."""

from collections.abc import Iterator
from contextlib import suppress

from halfway.pipelines.kafka.admin import Admin
from halfway.pipelines.kafka.topic_setup import verify_relay_topic
from halfway.pipelines.operate.doctor.finding import Finding, Health
from halfway.pipelines.relay.positions import BEFORE_THE_FIRST, TablePosition
from halfway.pipelines.relay.relay_status import RelayStatus, relay_states
from halfway.pipelines.relay.relay_table import RelayTable
from halfway.schemas.bookmark import Bookmark
from halfway.schemas.errors import AccessError, HalfwayError, TopicError
from halfway.schemas.settings import Settings, StorageSettings

_CHECK = "relay"
_PAGE = '(docs/relay.md, "Starting, and a lost bookmark")'


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
    table = _table(settings.storage) if relays else None
    for relay in relays:
        problems = [*_problems(relay, settings, table)]
        for problem in problems:
            yield Finding(_CHECK, Health.PROBLEM, problem)
        if not relay.instances:
            yield Finding(_CHECK, Health.WARNING, f"no instance of {relay.name} runs: start `halfway relay`")
        elif not problems:
            yield Finding(_CHECK, Health.OK, f"{relay.name} runs, and no topic is stopped (bookmark {relay.after or BEFORE_THE_FIRST})")


def _problems(relay: RelayStatus, settings: Settings, table: tuple[str, Bookmark] | None) -> Iterator[str]:
    """Yield what is wrong with a relay. One of another name and table may be another job's, or of a former table."""
    table_id, end = table or (relay.table, None)
    if table_id != relay.table and relay.name == settings.relay.name:
        what = f"the bookmark of {relay.name} ({relay.after or BEFORE_THE_FIRST}) is of another table than the one in storage"
        yield f"{what}: this was recreated, and it does not start; or another job's relay has the same name {_PAGE}"
    elif table_id == relay.table and end is not None and relay.after is not None and end < TablePosition.parse(relay.after).bookmark:
        what = f"the bookmark of {relay.name} ({relay.after}) is ahead of the table, whose last message is in {end}"
        yield f"{what}: what comes before it would not be sent: were the tables put back? {_PAGE}"
    if relay.lost:
        yield f"{settings.kafka.relay_topic} has lost {relay.lost} of the topics that {relay.name} has stopped: it does not start {_PAGE}"
    for stop in relay.stopped:
        yield f"{relay.name} has stopped {stop.topic} at {stop.transaction_id}: {stop.cause}"


def _table(storage: StorageSettings) -> tuple[str, Bookmark] | None:
    """Return the table's id and its last bookmark; None if it cannot be read here, as without the extra `tables`."""
    with suppress(HalfwayError):
        table = RelayTable(storage)
        return table.id, table.end()
    return None
