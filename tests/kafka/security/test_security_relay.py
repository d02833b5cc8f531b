"""With ACLs a relay needs just the rights of docs/security.md, and Write on the real topics. A missing one is named."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AclOperation, NewTopic, ResourceType

from halfway.pipelines.kafka.admin import admin_client, describe_each
from halfway.pipelines.kafka.topic_setup import create_relay_topic
from halfway.pipelines.relay.positions import Refusal
from halfway.pipelines.relay.relay import Relay
from halfway.schemas.errors import AccessError
from halfway.schemas.settings import Settings
from tests.support.relay_world import EARLIEST, append_rows, row
from tests.support.secure_broker import Right, SecureBroker
from tests.support.secure_world import USERS, Configure, TakeAway, named, rights_of, settings_in

REAL = "real.orders"
WRITE = Right(ResourceType.TOPIC, REAL, AclOperation.WRITE)


@pytest.fixture
def relay(secure_broker: SecureBroker, configure: Configure, tmp_path: Path) -> Iterator[Settings]:
    """The settings of the relay's user, a table with a message, and a real topic that the user may not write to yet."""
    create_relay_topic(settings_in(configure("setup")), 1)
    client = secure_broker.admin()
    client.create_topics([NewTopic(REAL, 1, 1)])[REAL].result()
    append_rows(tmp_path / "warehouse", 0, 0, [row("a", REAL)])
    yield settings_in(configure("relay"))
    client.delete_topics([REAL])[REAL].result()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_relay_needs_just_the_rights_of_the_page(relay: Settings, secure_broker: SecureBroker, without: TakeAway) -> None:
    for right in rights_of("relay"):
        without("relay", right)
        with pytest.raises(AccessError, match=r"kafka-acls\.sh") as refused:
            Relay(relay, EARLIEST).run(available_now=True)
        shown = named(right._replace(operation=AclOperation.DESCRIBE) if right.kind is ResourceType.GROUP else right)
        assert shown in str(refused.value), refused.value
        secure_broker.allow(USERS["relay"], [right])
    first = Relay(relay, EARLIEST)
    first.run(available_now=True)
    assert first.report.positions is not None
    stop = first.report.positions.stopped[REAL]
    assert (stop.refusal, stop.transaction_id) == (Refusal.NO_RIGHT, "a")
    assert f"--topic {REAL}" in stop.cause
    secure_broker.allow(USERS["relay"], [WRITE])
    second = Relay(relay)
    second.run(available_now=True)
    assert second.report.relayed == 1
    assert second.report.positions is not None
    assert second.report.positions.stopped == {}


@pytest.mark.timeout(200)
def test_topics_that_a_relay_may_not_see_are_asked_for_at_once(relay: Settings, secure_broker: SecureBroker) -> None:
    """A service chooses the names. Kafka's refusal of one hides no other."""
    secure_broker.allow(USERS["relay"], [WRITE])
    hidden = [f"hidden{number}" for number in range(500)]
    found = describe_each(admin_client(relay.kafka), [*hidden, REAL], with_operations=True)
    secure_broker.forbid(USERS["relay"], WRITE)
    assert {name for name, answer in found.items() if isinstance(answer, AccessError)} == set(hidden)
    assert len(found[REAL].partitions) == 1  # type: ignore[union-attr]
