"""Defines what the client exchanges with an application: half messages, check requests and results of a send."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypedDict

from pydantic import ValidationError

from halfway.schemas.headers import DELAY_HEADERS, LocalTransactionState
from halfway.schemas.outcomes import Reason
from halfway.schemas.records import RESERVED_NAMES, CheckHeaders, HalfHeaders, Headers, Record, RecordError, decode_key, encode_key, type_of
from halfway.schemas.signing import Keyring

_NUMBERS = ("queue_id", "immunity_s", "incarnation")
_TEXTS = ("transaction_id", "topic", "producer_group", "tags", "keys")


class MessageFields(TypedDict, total=False):
    """The fields of a `HalfMessage` that a send may leave out."""

    tags: str | None
    keys: str | None
    queue_id: int
    immunity_s: int | None
    incarnation: int


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
        signed_at_ms: when it was signed, in ms since 1970 UTC; None if its group has no key.
        signature: its signature (docs/security.md).
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
    signed_at_ms: int | None = None
    signature: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Keep a `bytearray` or another buffer as `bytes`, and the members of an enumeration of `str` as `str`.

        Raises:
            TypeError: the body is a `str` or another object without bytes.
        """
        for name in _TEXTS:
            text = getattr(self, name)
            if type(text) is not str and isinstance(text, str):
                object.__setattr__(self, name, str.__str__(text))
        if isinstance(self.body, str):
            raise TypeError("the body is a str, and Kafka stores bytes: send `text.encode()`")
        if not isinstance(self.body, bytes):
            try:
                object.__setattr__(self, "body", bytes(memoryview(self.body)))
            except TypeError:
                raise TypeError(f"the body is {type_of(self.body)}, and Kafka stores bytes") from None

    def signed(self, topic: str, keyring: Keyring | None, at_ms: int) -> Self:
        """Return a copy, signed for the half topic at `at_ms` if its group has a key.

        Raises:
            RecordError: a field breaks the contract (docs/contract.md). It is a ValueError too.
        """
        headers = self.headers().signed(encode_key(self.transaction_id), self.body, topic, keyring, at_ms)
        return replace(self, signed_at_ms=headers.signed_at_ms, signature=headers.signature)

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
        for name in _NUMBERS:
            if isinstance(getattr(self, name), str):  # HalfHeaders takes the text of a header.
                raise RecordError(Reason.BAD_HEADER, f"{name}: Input should be a valid integer, not a str")
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
                signed_at_ms=self.signed_at_ms,
                signature=self.signature,
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
    """The result of a send: where and when all in-sync replicas had the half, and how its local transaction ended.

    The op with the state is queued for Kafka, and not waited for. The state UNKNOWN is not a failure: a check asks.

    Attributes:
        transaction_id: the message's own id.
        half_partition: the partition of the half topic.
        half_offset: the offset in it.
        half_at_ms: the half's time in Kafka, in ms since 1970 UTC. The times of checks count from it (R4).
        state: COMMIT, ROLLBACK or UNKNOWN.
    """

    transaction_id: str
    half_partition: int
    half_offset: int
    half_at_ms: int
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
        if not isinstance(name, str):
            raise TypeError(f"the name of a property is {type_of(name)}, and not a str")
        if not name or "\0" in name:
            raise ValueError("the name of a property is empty or contains a NUL character")


def _fields(headers: HalfHeaders) -> dict[str, Any]:
    """Return what headers say, by the names of the fields of a `HalfMessage`."""
    fields = {name: getattr(headers, name) for name in HalfHeaders.model_fields}
    return {"topic": fields.pop("real_topic"), **fields}
