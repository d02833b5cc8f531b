"""The records of the Kafka contract (docs/contract.md) as validated models, to and from Kafka headers.

A record that breaks the contract raises `RecordError`, with the reason for which the job quarantines it (R14). The job
itself does not use these models: `transforms/decoding.py` decodes columns.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from operator import methodcaller
from typing import Annotated, Any, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from halfway.schemas import headers as h
from halfway.schemas.errors import HalfwayError
from halfway.schemas.headers import HeaderList, LocalTransactionState
from halfway.schemas.outcomes import Reason
from halfway.schemas.signing import Keyring, Signable, sha256_of

Headers = Sequence[tuple[str, bytes | None]]
"""What a function that reads headers takes: any sequence of them."""

RESERVED_NAMES = frozenset((*h.HALF_HEADERS, *h.OP_HEADERS, *h.CHECK_HEADERS, *h.DELAY_HEADERS, h.TICK, h.PARTITIONS, h.HALF_LOST))
"""Names that a producer must not use for its own properties."""

_read_headers = methodcaller("headers")
"""confluent_kafka (2.16.1) returns a broken list, with an exception set, if a name is not UTF-8. Python finds that out
in a call from C, as here. In a loop `record.headers()` hands the list out, and what comes next fails."""
_UNREADABLE = re.compile("[\0\N{REPLACEMENT CHARACTER}]")
"""librdkafka ends a name at a NUL. The other character is what the job reads in names that are not UTF-8."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_NOT_IN_A_HALF = frozenset((*h.HALF_HEADERS, *h.DELAY_HEADERS, h.TICK))
_ORDER = list(Reason)
_NUMBER = re.compile(r"-?[0-9]{1,19}")


class RecordError(HalfwayError, ValueError):
    """A record, or the input for one, breaks the contract (docs/contract.md).

    Attributes:
        reason: the reason for which the job quarantines such a record (R14).
        detail: which header or key is wrong, and why. It never holds the value.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        """Store reason and detail; the message holds both."""
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    @classmethod
    def from_validation(cls, error: ValidationError) -> Self:
        """Return the error for the problem that the job would name, of all that pydantic found."""
        found = error.errors(include_url=False, include_context=False)
        return min((cls._of(each["loc"], each["type"], each["msg"], each["input"]) for each in found), key=_rank)

    @classmethod
    def _of(cls, place: tuple[int | str, ...], kind: str, message: str, value: object) -> Self:
        name = str(next((part for part in place if part != "properties"), "headers"))
        if kind == "missing":
            return cls(Reason.MISSING_HEADER, name)
        reason = Reason.UNKNOWN_ACTION if place == (h.ACTION,) else Reason.BAD_HEADER
        told = f", not {type_of(value)}" if kind.endswith("_type") else ""
        return cls(reason, f"{name}: {message.removeprefix('Value error, ')}{told}")


def type_of(value: object) -> str:
    """Return what a value is, for an error that must not hold it."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _rank(error: RecordError) -> int:
    """Return how many problems the job looks for before this one."""
    return _ORDER.index(error.reason)


class Record(NamedTuple):
    """A record to send. Its partition follows from the key (murmur2, docs/contract.md)."""

    key: bytes
    value: bytes | None
    headers: HeaderList


def headers_of(record: Any) -> HeaderList | None:
    """Return the headers of a record of confluent_kafka; None if the name of one is not UTF-8, which it cannot show."""
    try:
        headers: HeaderList | None = _read_headers(record)
    except (SystemError, UnicodeDecodeError):
        return None
    return headers or []


def encode_key(transaction_id: str) -> bytes:
    """Return the record key of a transaction id.

    Raises:
        RecordError: the id is empty, longer than 255 bytes of UTF-8, or not valid Unicode.
        TypeError: it is no text, such as a `UUID`.
    """
    if not isinstance(transaction_id, str):
        raise TypeError(f"a transaction id is a str, not {type_of(transaction_id)}: give str(...)")
    try:
        key = transaction_id.encode()
    except UnicodeEncodeError:
        raise RecordError(Reason.KEY_NOT_UTF8, "the transaction id has a lone surrogate") from None
    _check_key_length(key)
    return key


def decode_key(key: bytes | None) -> str:
    """Return the transaction id of a record key.

    Raises:
        RecordError: the key is missing or empty, longer than 255 bytes, or not UTF-8.
    """
    _check_key_length(key or b"")
    try:
        return (key or b"").decode()
    except UnicodeDecodeError:
        raise RecordError(Reason.KEY_NOT_UTF8, "the record key is not UTF-8") from None


def _check_key_length(key: bytes) -> None:
    if not key:
        raise RecordError(Reason.MISSING_KEY, "the transaction id, which is the record's key, has at least 1 byte")
    if len(key) > h.MAX_KEY_BYTES:
        raise RecordError(Reason.KEY_TOO_LONG, f"{len(key)} bytes, at most {h.MAX_KEY_BYTES}")


def _number(value: object) -> object:
    """Parse the decimal text of a header. Python's int() also accepts `1_000`, spaces and digits of other scripts."""
    if not isinstance(value, str):
        return value
    if not _NUMBER.fullmatch(value):
        raise ValueError("not a number")
    return int(value)


def _action(value: object) -> object:
    """Parse an action."""
    return h.ACTIONS.get(value, value) if isinstance(value, str) else value


def _flag(value: object) -> object:
    return value.lower() == "true" if isinstance(value, str) else value


def _short(value: str) -> str:
    if len(value.encode()) > h.MAX_NAME_BYTES:
        raise ValueError(f"over {h.MAX_NAME_BYTES} bytes")
    return value


def _without_nul(value: str) -> str:
    """Refuse a group under whose name another group would get its checks: librdkafka ends `txn-check-…` at a NUL."""
    if "\0" in value:
        raise ValueError("it has a NUL")
    return value


def _unicode(value: str) -> str:
    """Refuse what UTF-8 cannot say. In a header's name it would kill the process in confluent_kafka (SIGSEGV)."""
    if not value.isascii() and _SURROGATE.search(value):
        raise ValueError("it has a lone surrogate")
    return value


def _own_properties(properties: Mapping[str, str | None]) -> Mapping[str, str | None]:
    taken = sorted(name for name in properties if name in _NOT_IN_A_HALF or _UNREADABLE.search(name))
    if taken:
        raise ValueError(f"{', '.join(taken)} cannot be a user property")
    return properties


_Number = BeforeValidator(_number)
_Text = Annotated[str, AfterValidator(_unicode)]
_Required = Annotated[_Text, Field(min_length=1)]
_Name = Annotated[_Required, AfterValidator(_short)]
_Group = Annotated[_Name, AfterValidator(_without_nul)]
_Incarnation = Annotated[int, _Number, Field(strict=True, ge=0, le=h.MAX_INCARNATION)]
_NotNegative = Annotated[int, _Number, Field(strict=True, ge=0, le=h.MAX_INT)]
_Positive = Annotated[int, _Number, Field(strict=True, gt=0, le=h.MAX_INT)]
_TimeMs = Annotated[int, _Number, Field(strict=True, ge=0, le=h.MAX_TIMESTAMP_MS)]


class _Headers(BaseModel):
    """Base of the models. A field's alias is its header, so that reading and writing follow from the declaration."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, hide_input_in_errors=True)

    @classmethod
    def _read(cls, headers: Headers, names: Collection[str], problems: Sequence[RecordError] = (), **others: Any) -> Self:
        """Parse the first header of each of the names. Of all problems, raise the one that the job would name."""
        found = [*problems, *_too_large(headers)]
        values: dict[str, str | None] = {}
        for name, value in headers:
            if name in values:
                found.append(RecordError(Reason.DUPLICATE_HEADER, name))
            elif name in names:
                values[name] = _text(value)
                if values[name] is None:
                    found.append(RecordError(Reason.BAD_HEADER, f"{name} is null or not UTF-8"))
        try:
            read = cls.model_validate({**values, **others})
        except ValidationError as error:
            found.append(RecordError.from_validation(error))
        if found:
            raise min(found, key=_rank) from None
        return read

    def _own_headers(self) -> HeaderList:
        """Return a header for each field that has a value."""
        written: HeaderList = []
        for name, alias in _aliases(type(self)):
            value = getattr(self, name)
            if value is not None:
                text = str(value).lower() if isinstance(value, bool) else str(value)
                written.append((alias, text.encode()))
        return written


@cache
def _aliases(model: type[_Headers]) -> list[tuple[str, str]]:
    """Return the fields of a model that are headers, with their names. Cached, because every record asks for them."""
    return [(name, field.alias) for name, field in model.model_fields.items() if field.alias is not None]


class HalfHeaders(_Headers):
    """The headers of a half: the topic and producer group of its message, and the user's own properties.

    Example:
        >>> half = HalfHeaders(real_topic="orders", producer_group="shop", properties={"colour": "red"})
        >>> HalfHeaders.from_headers(half.to_headers()) == half
        True
    """

    real_topic: Annotated[_Name, Field(alias=h.REAL_TOPIC)]
    producer_group: Annotated[_Group, Field(alias=h.PGROUP)]
    queue_id: Annotated[int, _Number, Field(alias=h.REAL_QID, strict=True, ge=-h.MAX_INT - 1, le=h.MAX_INT)] = 0
    tags: Annotated[_Text | None, Field(alias=h.TAGS)] = None
    keys: Annotated[_Text | None, Field(alias=h.KEYS)] = None
    immunity_s: Annotated[_Positive | None, Field(alias=h.CHECK_IMMUNITY_TIME_IN_SECONDS)] = None
    born_at_ms: Annotated[_TimeMs | None, Field(alias=h.BORN_TIMESTAMP)] = None
    incarnation: Annotated[_Incarnation, Field(alias=h.INCARNATION)] = 0
    signed_at_ms: Annotated[_TimeMs | None, Field(alias=h.SIGNED_AT)] = None
    signature: Annotated[str | None, Field(alias=h.SIGNATURE)] = None
    properties: Annotated[Mapping[_Text, _Text | None], AfterValidator(_own_properties)] = {}

    @classmethod
    def from_headers(cls, headers: Headers | None) -> Self:
        """Parse a half's headers.

        Each header that the contract does not name is a user property. Of two with one name, the last one counts.

        Raises:
            RecordError: a required header is missing, a header is bad or occurs twice, or the half asks for a delay.
        """
        headers = headers or ()
        problems = [RecordError(Reason.BAD_HEADER, f"{name} is not UTF-8") for name, value in headers if value and _text(value) is None]
        own = {name: _text(value) for name, value in headers if name not in h.HALF_HEADERS}
        problems += [RecordError(Reason.DELAY_NOT_SUPPORTED, name) for name in h.DELAY_HEADERS if name in own]
        properties = {name: value for name, value in own.items() if name not in h.DELAY_HEADERS}
        return cls._read(headers, h.HALF_HEADERS, problems, properties=properties)

    def signed(self, key: bytes, value: bytes, topic: str, keyring: Keyring | None, at_ms: int) -> Self:
        """Return a copy, signed at `at_ms` for this key, this value and the half topic if its group has a key."""
        if keyring is None or not keyring.has(self.producer_group):
            return self
        timed = self.model_copy(update={"signed_at_ms": at_ms, "signature": None})
        signature = keyring.sign(self.producer_group, Signable(topic, key, sha256_of(value), timed.to_headers()))
        return timed.model_copy(update={"signature": signature})

    def is_refused(self, record: Signable, at_ms: int, keyring: Keyring) -> bool:
        """Return True if the job refuses the half as `bad_signature` (R14).

        Args:
            record: the half's record.
            at_ms: its timestamp.
            keyring: the job's keys.
        """
        group = self.producer_group
        if keyring.topic_problem(group, self.real_topic) or keyring.problem(group, record, self.signature):
            return True
        if self.signature is None or not keyring.has(group):
            return False
        return self.signed_at_ms is None or abs(self.signed_at_ms - at_ms) > h.SIGNED_WINDOW_MS

    def to_headers(self) -> HeaderList:
        """Return the headers of the record. The user's properties come last.

        Raises:
            RecordError: they have more than 32,767 bytes.
        """
        properties = [(name, None if value is None else value.encode()) for name, value in self.properties.items()]
        return _fitting(self._own_headers() + properties)


class OpHeaders(_Headers):
    """The headers of an op: what a producer knows about its local transaction."""

    action: Annotated[LocalTransactionState, BeforeValidator(_action), Field(alias=h.ACTION)]
    producer_group: Annotated[_Group, Field(alias=h.PGROUP)]
    incarnation: Annotated[_Incarnation, Field(alias=h.INCARNATION)] = 0
    from_check: Annotated[bool | None, BeforeValidator(_flag), Field(alias=h.FROM_CHECK)] = None
    check_times: Annotated[_NotNegative | None, Field(alias=h.CHECK_TIMES)] = None
    remark: Annotated[_Text | None, Field(alias=h.REMARK)] = None
    half_signature: Annotated[str | None, Field(alias=h.HALF_SIGNATURE)] = None
    traceparent: Annotated[str | None, Field(alias="traceparent")] = None
    tracestate: Annotated[str | None, Field(alias="tracestate")] = None
    baggage: Annotated[str | None, Field(alias="baggage")] = None
    signature: Annotated[str | None, Field(alias=h.SIGNATURE)] = None

    @classmethod
    def from_headers(cls, headers: Headers | None) -> Self:
        """Parse an op's headers. Headers that the contract does not name are ignored.

        Raises:
            RecordError: a required header is missing, a header is bad or occurs twice, or the action is unknown.
        """
        return cls._read(headers or (), (*h.OP_HEADERS, h.SIGNATURE))

    def signed(self, transaction_id: str, topic: str, keyring: Keyring | None) -> Self:
        """Return a copy of the op, signed for a transaction and the op topic if its group has a key."""
        if keyring is None:
            return self
        signable = Signable(topic, encode_key(transaction_id), sha256_of(None), self.to_headers())
        return self.model_copy(update={"signature": keyring.sign(self.producer_group, signable)})

    def to_headers(self) -> HeaderList:
        """Return the headers of the record.

        Raises:
            RecordError: they have more than 32,767 bytes.
        """
        return _fitting(self._own_headers())


class CheckHeaders(_Headers):
    """The headers of a check request: those of its half, the number of the check, its `CHECK_ID`, and a signature.

    `CHECK_ID` stays the same when the request is resent.
    """

    half: HalfHeaders
    check_times: Annotated[_Positive, Field(alias=h.TRANSACTION_CHECK_TIMES)]
    check_id: Annotated[_Required, Field(alias=h.CHECK_ID)]
    check_signature: Annotated[str | None, Field(alias=h.CHECK_SIGNATURE)] = None

    @classmethod
    def from_headers(cls, headers: Headers | None) -> Self:
        """Parse a check's headers.

        The job appends its own headers to the half's. A half of another client may have a property of the same name, so
        the last one counts.

        Raises:
            RecordError: as for a half; or one of the check's own headers is missing or bad.
        """
        of_half = [(name, value) for name, value in headers or () if name not in h.CHECK_HEADERS]
        own = {name: value for name, value in headers or () if name in h.CHECK_HEADERS}
        return cls._read([*own.items()], h.CHECK_HEADERS, half=HalfHeaders.from_headers(of_half))

    def to_headers(self) -> HeaderList:
        """Return the headers of the record: those of the half, then the check's own."""
        return self.half.to_headers() + self._own_headers()


def _text(value: bytes | None) -> str | None:
    """Return a header's value as text; None if it is null or not UTF-8."""
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


def _too_large(headers: Headers) -> list[RecordError]:
    """Return the problem of headers that are too large together, if they are."""
    size = sum(len(name.encode(errors="replace")) + len(value or b"") for name, value in headers)
    found = {f"{size} bytes": size, f"{len(headers)} headers": len(headers)}
    limit = h.MAX_HEADERS_BYTES
    return [RecordError(Reason.HEADERS_TOO_LARGE, f"{text}, at most {limit}") for text, number in found.items() if number > limit]


def _fitting(headers: HeaderList) -> HeaderList:
    """Return headers, or raise the error if they are too large to be sent."""
    for error in _too_large(headers):
        raise error
    return headers
