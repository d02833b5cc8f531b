"""The fuzzer's test oracle: judges one record by docs/contract.md and R14, independently of the product.

The contract does not say which reason the job names if several hold. So a judgement has all of them.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

HeaderList = list[tuple[str, bytes | None]]
_INT_32 = 2**31 - 1
_MAX_NAME_BYTES = 255
_MAX_INCARNATION = 999_999
_MAX_HEADERS_BYTES = 32_767
_MAX_TICK_BYTES = 32 * 1024
_YEAR_1_MS = -62_135_596_800_000
_YEAR_9999_MS = 253_402_300_799_999
# 19 digits are enough for every number of the contract. More digits make no number, even if they are leading zeros.
_NUMBER = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_DELAYS = ("DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS")
_ACTIONS = ("COMMIT", "ROLLBACK", "UNKNOWN", "UNKNOW")


class RecordKind(StrEnum):
    HALF = "half"
    OP = "op"
    TICK = "tick"
    NOTICE = "notice"
    """The job's notice of a lost half (R17)."""


@dataclass(frozen=True, slots=True)
class Record:
    """A record in Kafka."""

    of_half: bool
    """The record lies in the half topic, and not in the op topic."""
    partition: int
    key: bytes | None
    value: bytes | None
    headers: HeaderList
    at_ms: int


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a record is, and why the job may refuse it."""

    kind: RecordKind
    reasons: frozenset[str]
    """Every reason (R14) that holds. If there is none, the job must accept the record."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What the row of a good half must say."""

    transaction_id: str
    topic: str
    queue_id: int
    tags: str | None
    keys: str | None
    body: bytes
    properties: Mapping[str, str | None]
    producer_group: str
    born_ms: int
    half_ms: int
    incarnation: int


def judge(
    record: Record, max_body_bytes: int, max_clock_skew_ms: int = 300_000, is_forged: Callable[[Record], bool] = lambda _: False
) -> Judgement:
    """Return what a record is and what is wrong with it. Signatures are looked at last, as the contract says."""
    judgement = _judge_content(record, max_body_bytes, max_clock_skew_ms)
    return Judgement(judgement.kind, frozenset({"bad_signature"})) if not judgement.reasons and is_forged(record) else judgement


def _judge_content(record: Record, max_body_bytes: int, max_clock_skew_ms: int) -> Judgement:
    names = {name for name, _ in record.headers}
    if "TICK" in names:
        return Judgement(RecordKind.TICK, frozenset() if _is_tick(record, max_clock_skew_ms) else frozenset({"bad_tick"}))
    reasons = _wrong_with_key(record.key) | ({"headers_too_large"} if _has_too_much(record) else set())
    if not record.of_half:
        return Judgement(RecordKind.OP, frozenset(reasons | _wrong_with_op(record)))
    if "HALF_LOST" in names and "REAL_TOPIC" not in names:
        return Judgement(RecordKind.NOTICE, frozenset(reasons | _wrong_with(record, "HALF_LOST", _is_pointer)))
    if len(record.value or b"") > max_body_bytes:
        reasons.add("body_too_large")
    return Judgement(RecordKind.HALF, frozenset(reasons | _wrong_with_half(record)))


def meaning_of(record: Record) -> Meaning:
    """Return what the row of a half must say. The half must be good."""
    headers = {name: None if value is None else value.decode() for name, value in record.headers}
    own = {name: headers.pop(name, None) for name in _HALF}
    return Meaning(
        transaction_id=(record.key or b"").decode(),
        topic=own["REAL_TOPIC"] or "",
        queue_id=int(own["REAL_QID"] or 0),
        tags=own["TAGS"],
        keys=own["KEYS"],
        body=record.value or b"",
        properties=headers,
        producer_group=own["PGROUP"] or "",
        born_ms=int(own["BORN_TIMESTAMP"] or record.at_ms),
        half_ms=record.at_ms,
        incarnation=int(own["INCARNATION"] or 0),
    )


def _within(low: int, high: int) -> Callable[[str], bool]:
    return lambda text: _NUMBER.fullmatch(text) is not None and low <= int(text) <= high


def _any_text(_: str) -> bool:
    return True


def _is_name(text: str) -> bool:
    return 0 < len(text.encode()) <= _MAX_NAME_BYTES


def _is_group(text: str) -> bool:
    return _is_name(text) and "\0" not in text


def _is_pointer(text: str) -> bool:
    return re.fullmatch(r"[0-9]+:[0-9]+", text, re.ASCII) is not None


_HALF: dict[str, Callable[[str], bool]] = {
    "REAL_TOPIC": _is_name,
    "PGROUP": _is_group,
    "REAL_QID": _within(-_INT_32 - 1, _INT_32),
    "TAGS": _any_text,
    "KEYS": _any_text,
    "CHECK_IMMUNITY_TIME_IN_SECONDS": _within(1, _INT_32),
    "BORN_TIMESTAMP": _within(0, _YEAR_9999_MS),
    "INCARNATION": _within(0, _MAX_INCARNATION),
    "SIGNED_AT": _within(0, _YEAR_9999_MS),
    "SIGNATURE": _any_text,
}
_OP: dict[str, Callable[[str], bool]] = {
    "ACTION": _any_text,
    "PGROUP": _is_group,
    "INCARNATION": _within(0, _MAX_INCARNATION),
    "FROM_CHECK": _any_text,
    "CHECK_TIMES": _within(0, _INT_32),
    "REMARK": _any_text,
    "HALF_SIGNATURE": _any_text,
}


def _wrong_with_key(key: bytes | None) -> set[str]:
    if not key:
        return {"missing_key"}
    wrong = {"key_too_long"} if len(key) > 255 else set()
    return wrong if is_text(key) else wrong | {"key_not_utf8"}


def _wrong_with_half(record: Record) -> set[str]:
    wrong = _missing(record, "REAL_TOPIC", "PGROUP") | _wrong_with_time(record)
    for name, is_good in _HALF.items():
        wrong |= _wrong_with(record, name, is_good)
    for name, value in record.headers:
        if name in _DELAYS:
            wrong.add("delay_not_supported")
        if name not in _HALF and not (_is_shown(name) and (value is None or is_text(value))):
            wrong.add("bad_header")
    return wrong


def _wrong_with_op(record: Record) -> set[str]:
    wrong = _missing(record, "ACTION", "PGROUP") | _wrong_with_time(record)
    for name, is_good in _OP.items():
        wrong |= _wrong_with(record, name, is_good)
    for value in _values(record, "ACTION"):
        if value is not None and is_text(value) and value.decode() not in _ACTIONS:
            wrong |= {"unknown_action"} if value else {"unknown_action", "bad_header"}
    return wrong


def _wrong_with(record: Record, name: str, is_good: Callable[[str], bool]) -> set[str]:
    values = _values(record, name)
    wrong = {"duplicate_header"} if len(values) > 1 else set()
    are_good = all(value is not None and is_text(value) and is_good(value.decode()) for value in values)
    return wrong if are_good else wrong | {"bad_header"}


def _wrong_with_time(record: Record) -> set[str]:
    return set() if _YEAR_1_MS <= record.at_ms <= _YEAR_9999_MS else {"bad_header"}


def _missing(record: Record, *names: str) -> set[str]:
    return {"missing_header"} if any(not _values(record, name) for name in names) else set()


def _values(record: Record, name: str) -> list[bytes | None]:
    return [value for key, value in record.headers if key == name]


def is_text(value: bytes) -> bool:
    """Return True if a value is UTF-8."""
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_shown(name: str) -> bool:
    """Return True if the name is the one that was sent.

    Spark reads with Java's client, which puts this character into names that are not UTF-8. librdkafka ends a name at a
    NUL.
    """
    return "\N{REPLACEMENT CHARACTER}" not in name and "\0" not in name


def _has_too_much(record: Record) -> bool:
    size = sum(len(name.encode()) + len(value or b"") for name, value in record.headers)
    return max(size, len(record.headers)) > _MAX_HEADERS_BYTES


def _is_tick(record: Record, max_clock_skew_ms: int) -> bool:
    if record.key is not None or _has_too_much(record) or len(record.value or b"") > _MAX_TICK_BYTES:
        return False
    if any(len(_values(record, name)) != 1 for name in ("TICK", "PARTITIONS")):
        return False
    in_time = _within(max(0, record.at_ms - max_clock_skew_ms), min(_YEAR_9999_MS, record.at_ms + max_clock_skew_ms))
    time = _wrong_with(record, "TICK", in_time)
    # The number of partitions is greater than the number of the partition that holds the tick.
    count = _wrong_with(record, "PARTITIONS", _within(record.partition + 1, _INT_32))
    return not time and not count and _is_said(record.value or b"")


def _is_said(value: bytes) -> bool:
    """Return True if a tick's value is empty, or the contract's object, of which each part may be missing."""
    if not value:
        return True
    try:
        content = json.loads(value.decode())
    except ValueError:
        return False
    if not isinstance(content, dict):
        return False
    groups, asked = content.get("absent_groups", []), content.get("asked_ms", 0)
    is_number = isinstance(asked, int) and not isinstance(asked, bool) and 0 <= asked < 2**63
    is_text = isinstance(content.get("job", ""), str)
    return is_number and is_text and isinstance(groups, list) and all(isinstance(group, str) for group in groups)
