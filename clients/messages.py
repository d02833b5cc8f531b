"""Defines what the client exchanges with an application: half messages, check requests and results of a send."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import ValidationError

from halfway.schemas.headers import DELAY_HEADERS, LocalTransactionState
from halfway.schemas.records import RESERVED_NAMES, CheckHeaders, HalfHeaders, Headers, Record, RecordError, decode_key, encode_key


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfMessage:
    """A message that consumers cannot read yet. Its `repr` shows neither body nor properties.

    Attributes:
        transaction_id: 1 to 255 bytes of UTF-8.
        topic: where the message goes once it is committed.
        body: opaque bytes.
        producer_group: the group whose instances answer its checks.
        queue_id: passed on with the message.
        tags: RocketMQ's tags.
        keys: RocketMQ's keys.
        properties: the user's own headers. None stands for a header without a value, which other clients may send.
        immunity_s: the seconds before the first check; None for the job's `transactionTimeOut` (R4).
        born_at_ms: when the message was made, in ms since 1970 UTC.
        incarnation: 0, and one more each time a discarded message is sent again (R12).
    """

    transaction_id: str
    topic: str
    body: bytes = field(repr=False)
    producer_group: str
    queue_id: int = 0
    tags: str | None = None
    keys: str | None = None
    properties: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    immunity_s: int | None = None
    born_at_ms: int | None = None
    incarnation: int = 0

    def to_record(self) -> Record:
        """Return the record for the half topic.

        Raises:
            RecordError: a field breaks the contract (docs/contract.md). It is a ValueError too.
        """
        return Record(encode_key(self.transaction_id), self.body, self.headers().to_headers())

    def headers(self) -> HalfHeaders:
        """Return the validated headers.

        Raises:
            RecordError: a field breaks the contract (docs/contract.md). It is a ValueError too.
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
        """Return the message that a record of the half topic holds. A null value is an empty body.

        Raises:
            RecordError: the record breaks the contract (docs/contract.md).
        """
        return cls(transaction_id=decode_key(key), body=value or b"", **_fields(HalfHeaders.from_headers(headers)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest(HalfMessage):
    """The half of a transaction whose outcome the job asks for.

    Attributes:
        check_times: the number of the check, from 1.
        check_id: the same each time this check is sent.
    """

    check_times: int
    check_id: str

    def to_record(self) -> Record:
        """Return the record for the check topic.

        Raises:
            RecordError: a field breaks the contract (docs/contract.md). It is a ValueError too.
        """
        half = HalfMessage.headers(self)
        try:
            headers = CheckHeaders(half=half, check_times=self.check_times, check_id=self.check_id)
        except ValidationError as error:
            raise RecordError.from_validation(error) from None
        return Record(encode_key(self.transaction_id), self.body, headers.to_headers())

    @classmethod
    def from_record(cls, key: bytes | None, value: bytes | None, headers: Headers | None) -> Self:
        """Return the request that a record of the check topic holds.

        Raises:
            RecordError: the record breaks the contract (docs/contract.md).
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
    """The result of a send: the partition and offset of the half, and the listener's answer.

    The state UNKNOWN is not a failure: a check asks the listener again.
    """

    transaction_id: str
    half_partition: int
    half_offset: int
    state: LocalTransactionState


def refuse_reserved(properties: Mapping[str, str]) -> None:
    """Refuse properties that a producer must not set.

    Raises:
        ValueError: a name is the contract's own, asks for a delay, is empty, or contains NUL, where librdkafka cuts it.
    """
    for name in properties:
        if name in DELAY_HEADERS:
            raise ValueError(f"property {name}: a transactional message cannot be delayed, RocketMQ loses or alters such messages")
        if name in RESERVED_NAMES:
            raise ValueError(f"property {name}: the name is reserved; topic, tags, keys and the like are arguments of the send")
        if not name or "\0" in name:
            raise ValueError("the name of a property is empty or contains a NUL character")


def _fields(headers: HalfHeaders) -> dict[str, Any]:
    names = ("producer_group", "queue_id", "tags", "keys", "properties", "immunity_s", "born_at_ms", "incarnation")
    return {"topic": headers.real_topic, **{name: getattr(headers, name) for name in names}}
