"""CloudEvents as properties of a message: the attributes of an event are headers, and its data are the body."""

import re
import uuid
from datetime import datetime

_EXTENSION = re.compile(r"[a-z0-9]+")
_ATTRIBUTES = ("specversion", "id", "type", "datacontenttype")


def cloud_event(
    event_type: str,
    source: str,
    *,
    event_id: str | None = None,
    subject: str | None = None,
    time: datetime | None = None,
    content_type: str = "application/json",
    **extensions: str,
) -> dict[str, str]:
    """Return the properties that make a message a CloudEvent 1.0, in the binary mode of its binding for Kafka.

    Args:
        event_type: what has happened, such as `com.example.order.placed`.
        source: where, as a URI reference.
        event_id: unique within its source; a random one if None.
        subject: what it has happened to.
        time: when, with a time zone.
        content_type: the media type of the body.
        **extensions: further attributes.

    Returns:
        The headers `ce_id`, `ce_type` and so on, for the `properties` of a send.

    Raises:
        ValueError: a required attribute or the subject is empty, a time has no time zone, or the name of an extension
            is not of lower-case letters and digits, or that of an attribute.

    Example:
        tx.send("orders", b'{"item": "apples"}', properties=cloud_event("com.example.order.placed", "/shop"))
    """
    if not (event_type and source and event_id != ""):
        raise ValueError("no CloudEvent: its type, source or id is empty")
    if subject == "":
        raise ValueError("no CloudEvent: its subject is empty")
    for name in extensions:
        if name in _ATTRIBUTES:
            raise ValueError(f"no CloudEvent: {name} is no extension, but an attribute, which has another argument or none")
        if not _EXTENSION.fullmatch(name):
            raise ValueError(f"no CloudEvent: the name of its extension {name} must have lower-case letters and digits only")
    if time is not None and time.tzinfo is None:
        raise ValueError("no CloudEvent: its time has no time zone")
    attributes = {
        **extensions,
        "specversion": "1.0",
        "id": event_id or str(uuid.uuid4()),
        "type": event_type,
        "source": source,
        "subject": subject,
        "time": None if time is None else time.isoformat(),
    }
    return {**{f"ce_{name}": value for name, value in attributes.items() if value is not None}, "content-type": content_type}
