"""A message with the headers of a CloudEvent is one for the `cloudevents` package, and the other way round."""

from datetime import datetime, timedelta, timezone

import pytest
from cloudevents.core.bindings.kafka import KafkaMessage, from_binary, to_binary
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent

from halfway import HalfMessage, cloud_event
from halfway.testing import in_memory_halfway
from tests.support.client_world import Listener

AT = datetime(2026, 7, 1, 12, 30, 15, 250_000, timezone(timedelta(hours=2)))


def sent(body: bytes, properties: dict[str, str]) -> HalfMessage:
    """Send a message through the protocol, and return it as consumers read it."""
    with in_memory_halfway() as halfway:
        halfway.producer(Listener()).send_in_transaction("orders", body, properties=properties)
        [message] = halfway.messages("orders")
    return message


def headers_of(message: HalfMessage) -> dict[str, bytes]:
    return {name: value.encode() for name, value in message.properties.items() if value is not None}


def test_the_package_reads_what_was_sent() -> None:
    properties = cloud_event("com.example.order.placed", "/shop", event_id="17", subject="order ä", time=AT, tenant="blue")
    message = sent(b'{"item": "apples"}', properties)
    event = from_binary(KafkaMessage(headers_of(message), None, message.body), JSONFormat())
    assert event.get_data() == {"item": "apples"}
    assert event.get_attributes() == {
        "specversion": "1.0",
        "id": "17",
        "type": "com.example.order.placed",
        "source": "/shop",
        "subject": "order ä",
        "time": AT,
        "datacontenttype": "application/json",
        "tenant": "blue",
    }


def test_what_the_package_writes_comes_back() -> None:
    event = CloudEvent({"type": "placed", "source": "/shop", "datacontenttype": "application/json"}, {"item": "apples"})
    written = to_binary(event, JSONFormat())
    message = sent(written.value, {name: value.decode() for name, value in written.headers.items()})
    assert (headers_of(message), message.body) == (written.headers, written.value)
    read = from_binary(KafkaMessage(headers_of(message), None, message.body), JSONFormat())
    assert (read.get_attributes(), read.get_data()) == (event.get_attributes(), event.get_data())


def test_each_event_has_an_id_of_its_own() -> None:
    first, second = cloud_event("placed", "/shop"), cloud_event("placed", "/shop")
    assert first["ce_id"] != second["ce_id"]
    assert first.keys() == {"ce_specversion", "ce_id", "ce_type", "ce_source", "content-type"}


@pytest.mark.parametrize(
    ("wrong", "text"),
    [({"source": ""}, "empty"), ({"event_id": ""}, "empty"), ({"time": datetime(2026, 7, 1)}, "time zone"), ({"Tenant": "x"}, "Tenant")],  # noqa: DTZ001
    ids=["source", "id", "time", "extension"],
)
def test_what_is_no_event_is_refused(wrong: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        cloud_event("placed", **{"source": "/shop", **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["id", "type", "specversion", "datacontenttype"])
def test_an_attribute_is_no_extension(name: str) -> None:
    """It would be dropped in silence."""
    with pytest.raises(ValueError, match=f"{name} is no extension, but an attribute"):
        cloud_event("placed", "/shop", **{name: "x"})


def test_a_subject_is_not_empty() -> None:
    with pytest.raises(ValueError, match="its subject is empty"):
        cloud_event("placed", "/shop", subject="")
