"""What the client hands to an application and gets from it: half messages, check requests, results of a send."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import ValidationError

from halfway.schemas.headers import DELAY_HEADERS, LocalTransactionState
from halfway.schemas.records import RESERVED_NAMES, CheckHeaders, HalfHeaders, Headers, Record, RecordError, decode_key, encode_key


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfMessage:
    """A message that nobody can read yet. `topic` is where it goes once committed; its body never shows in a `repr`."""

    transaction_id: str
    topic: str
    body: bytes = field(repr=False)
    producer_group: str
    queue_id: int = 0
    tags: str | None = None
    keys: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    immunity_s: int | None = None
    born_at_ms: int | None = None
    incarnation: int = 0

    def to_record(self) -> Record:
        """Return the half topic's record.

        Raises:
            RecordError: a field is not what design §2 allows; a ValueError too.
        """
        return Record(encode_key(self.transaction_id), self.body, self.headers().to_headers())

    def headers(self) -> HalfHeaders:
        """Return the validated headers.

        Raises:
            RecordError: a field is not what design §2 allows; a ValueError too.
        """
        try:
            return HalfHeaders(
                real_topic=self.topic,
                producer_group=self.producer_group,
                queue_id=self.queue_id,
                tags=self.tags,
                keys=self.keys,
                immunity_s=self.immunity_s,
                born_at_ms=self.born_at_ms,
                incarnation=self.incarnation,
                properties=self.properties,
            )
        except ValidationError as error:
            raise RecordError.from_validation(error) from None

    @classmethod
    def from_record(cls, key: bytes | None, value: bytes | None, headers: Headers | None) -> Self:
        """Read a record of the half topic; a null value is an empty body.

        Raises:
            RecordError: it breaks design §2.
        """
        return cls(transaction_id=decode_key(key), body=value or b"", **_fields(HalfHeaders.from_headers(headers)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest(HalfMessage):
    """The question how a half's local transaction ended: the half again, with the number of the check (from 1) and its id."""

    check_times: int
    check_id: str

    def to_record(self) -> Record:
        """Return the check topic's record.

        Raises:
            RecordError: a field is not what design §2 allows; a ValueError too.
        """
        half = HalfMessage.headers(self)
        try:
            headers = CheckHeaders(half=half, check_times=self.check_times, check_id=self.check_id)
        except ValidationError as error:
            raise RecordError.from_validation(error) from None
        return Record(encode_key(self.transaction_id), self.body, headers.to_headers())

    @classmethod
    def from_record(cls, key: bytes | None, value: bytes | None, headers: Headers | None) -> Self:
        """Read a record of the check topic.

        Raises:
            RecordError: it breaks design §2.
        """
        check = CheckHeaders.from_headers(headers)
        return cls(
            transaction_id=decode_key(key),
            body=value or b"",
            check_times=check.check_times,
            check_id=check.check_id,
            **_fields(check.half),
        )


@dataclass(frozen=True, slots=True)
class SendResult:
    """What became of a send: where its half lies, and what the listener said of the local transaction.

    UNKNOWN is not a failure: the listener is asked again, by a check.
    """

    transaction_id: str
    half_partition: int
    half_offset: int
    state: LocalTransactionState


def refuse_reserved(properties: Mapping[str, str]) -> None:
    """Refuse properties that a producer cannot set.

    Raises:
        ValueError: a name is one of the contract's own, asks for a delay, is empty, or has a NUL, at which librdkafka would cut it.
    """
    for name in properties:
        if name in DELAY_HEADERS:
            raise ValueError(f"property {name}: a transactional message cannot be delayed, RocketMQ loses or alters such messages")
        if name in RESERVED_NAMES:
            raise ValueError(f"property {name}: the name is reserved; topic, tags, keys and the like are arguments of the send")
        if not name or "\0" in name:
            raise ValueError("a property has an empty name or one with a NUL character")


def _fields(headers: HalfHeaders) -> dict[str, Any]:
    names = ("producer_group", "queue_id", "tags", "keys", "properties", "immunity_s", "born_at_ms", "incarnation")
    return {"topic": headers.real_topic, **{name: getattr(headers, name) for name in names}}
