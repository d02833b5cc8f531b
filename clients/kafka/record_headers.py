"""Returns the headers of a record, whatever bytes their names are."""

from operator import methodcaller
from typing import cast

from confluent_kafka import Message

from halfway.schemas.headers import HeaderList

_headers = methodcaller("headers")
"""confluent_kafka (2.16.1) returns a broken list, with an exception set, if a name is not UTF-8. Python finds that out
in a call from C, as here. In a loop `record.headers()` hands the list out, and the process dies of it."""


def headers_of(record: Message) -> HeaderList | None:
    """Return a record's headers; None if the name of one is not UTF-8, which confluent_kafka cannot show."""
    try:
        return cast(HeaderList, _headers(record) or [])
    except (SystemError, UnicodeDecodeError):
        return None
