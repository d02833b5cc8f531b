"""Signed and forged records for the fuzzer, and what makes a signature right: by docs/contract.md, without the product.

`Forger` signs the generator's records as services and the job would, and forges some of them as somebody would who can
write both topics and has no key. Control transactions are always signed well, and forged records of their ids follow
them: those must change nothing.
"""

import hashlib
import hmac
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tests.fuzz.generator import BASE_MS, HOUR_MS, Generator, NewRecord
from tests.fuzz.judge import HeaderList, Record

WINDOW_MS = 300_000
"""A half may be stored this long before or after its `SIGNED_AT`."""
LATEST_MS = BASE_MS - HOUR_MS // 3
"""The horizon is not past this time before all records are read."""
_RECENT = 500
_STRANGERS_KEY = "stranger" * 4


@dataclass(frozen=True)
class Signing:
    """The keys of groups and job, and the topics that groups may send to."""

    cluster: str
    half_topic: str
    op_topic: str
    keys: Mapping[str, tuple[str, ...]]
    """Group → its keys. The first one signs. The records of other groups are not signed."""
    job_key: str
    topics: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, half_topic: str, op_topic: str) -> "Signing":
        """Return the keys of the fuzzer's groups, one of which changes its key."""
        keys = {"g": ("g" * 32,), "h": ("h-new" * 8, "h-old" * 8), "größe": ("größe" * 8,)}
        return cls("fuzz", half_topic, op_topic, keys, "job" * 12, {"h": ("others",), "größe": ("elsewhere",)})

    def settings(self) -> dict[str, object]:
        """Return the job's settings."""
        own = {"cluster": self.cluster, "keys": self.keys, "job_keys": [self.job_key], "topics": self.topics}
        return {f"kafka.signing.{name}": value for name, value in own.items()}

    def signature(self, key: str, record: Record | NewRecord, cluster: str | None = None) -> bytes:
        """Return the signature of a record over all its headers but SIGNATURE."""
        topic = self.half_topic if record.of_half else self.op_topic
        place = str(record.partition) if _is_tick(record.headers) else ""
        fields: list[bytes | None] = [b"halfway-1", (cluster or self.cluster).encode(), topic.encode(), place.encode(), record.key or b""]
        fields.append(hashlib.sha256(record.value or b"").digest())
        for name, value in record.headers:
            if name != "SIGNATURE":
                fields += [name.encode(), value]
        signed = b"".join(b"\xff\xff\xff\xff" if field is None else len(field).to_bytes(4, "big") + field for field in fields)
        return hmac.new(key.encode(), signed, hashlib.sha256).hexdigest().encode()

    def refuses(self, record: Record) -> bool:
        """Return True if a record that keeps the rest of the contract is not signed as it must be."""
        # An op's REAL_TOPIC and a notice's PGROUP say nothing, and may be any bytes.
        group = (_value(record.headers, "PGROUP") or b"").decode(errors="replace")
        if _is_tick(record.headers) or _is_notice(record):
            keys: tuple[str, ...] = (self.job_key,)
        elif group in self.keys:
            keys = self.keys[group]
        else:
            return self._is_elsewhere(record, group)
        if _value(record.headers, "SIGNATURE") not in [self.signature(key, record) for key in keys]:
            return True
        if _is_tick(record.headers) or _is_notice(record) or not record.of_half:
            return False
        signed_at = _value(record.headers, "SIGNED_AT")
        return signed_at is None or abs(int(signed_at) - record.at_ms) > WINDOW_MS or self._is_elsewhere(record, group)

    def _is_elsewhere(self, record: Record, group: str) -> bool:
        topic = (_value(record.headers, "REAL_TOPIC") or b"").decode(errors="replace")
        return record.of_half and group in self.topics and topic not in self.topics[group]


class Forger:
    """Signs and forges the records of a generator. The same seed makes the same records."""

    def __init__(self, generator: Generator, signing: Signing, seed: int) -> None:
        self._generator, self._signing = generator, signing
        self._random = random.Random(seed + 1)
        self._signatures: dict[bytes, bytes] = {}
        """Transaction id → the signature of its last half."""
        self._recent: deque[NewRecord] = deque(maxlen=_RECENT)
        self._ways: tuple[Callable[[NewRecord], NewRecord], ...] = (
            lambda record: record._replace(headers=_without_signature(record.headers)),
            lambda record: self._signed_by(_STRANGERS_KEY, record),
            lambda record: self._signed_by(signing.job_key, record),
            lambda record: self._signed_by(signing.keys["h"][0], record),
            lambda record: self._signed_by(signing.keys["g"][0], record, cluster="another"),
            lambda record: self._signed_by(signing.keys["g"][0], record._replace(of_half=not record.of_half))._replace(
                of_half=record.of_half
            ),
            lambda record: record._replace(value=(record.value or b"") + b"!"),
            lambda record: record._replace(headers=[*record.headers, ("own-too", b"x")]),
            lambda record: record._replace(headers=[*reversed(record.headers)]),
            lambda record: self._with_signature(record, self._random.choice((b"", b"\xff", b"0" * 64, b"none", b"G" * 64))),
            lambda record: self._with_signature(record, _value(self._any_recent(record).headers, "SIGNATURE") or b""),
            lambda record: record._replace(key=b"moved-" + (record.key or b"")[:200]) if record.key else record,
            lambda record: self._signed_by(
                signing.keys["g"][0], _at(record, record.at_ms + self._random.choice((-1, 1)) * (WINDOW_MS + 1))
            ),
        )

    def ticks(self, at_ms: int) -> Iterator[NewRecord]:
        """Yield one round of the job's ticks."""
        yield from map(self._honest, self._generator.ticks(at_ms))

    def records(self, count: int) -> Iterator[NewRecord]:
        """Yield the generator's records, signed or forged, and copies of earlier ones."""
        for made in self._generator.records(count):
            honest = self._honest(made)
            chance = self._random.random()
            if (made.key or b"").startswith(b"control-"):
                yield honest
                if chance < 0.2:
                    yield self._forged_of(made)
            else:
                yield honest if chance < 0.5 else self._random.choice(self._ways)(honest)
            if chance < 0.03 and self._recent:
                yield self._random.choice(self._recent)  # byte for byte, and at the same time
            if made.key:
                self._recent.append(honest)

    def _forged_of(self, made: NewRecord) -> NewRecord:
        """Return a forged record of a control transaction: another body, another verdict, or a verdict on itself."""
        if made.of_half and self._random.random() < 0.5:
            return self._signed_by(_STRANGERS_KEY, _at(made._replace(value=b"forged"), made.at_ms))
        action = self._random.choice((b"COMMIT", b"ROLLBACK"))
        headers: HeaderList = [("ACTION", action), ("PGROUP", b"g")]
        forged = NewRecord(False, made.key, None, headers, made.at_ms - self._random.randrange(3))
        return self._signed_by(self._random.choice((_STRANGERS_KEY, self._signing.job_key, self._signing.keys["h"][0])), forged)

    def _honest(self, record: NewRecord) -> NewRecord:
        """Return a record as its sender would sign it, if it has a key."""
        record = record._replace(headers=_without_signature(record.headers))
        group = (_value(record.headers, "PGROUP") or b"").decode(errors="replace")
        if _is_tick(record.headers) or _is_notice(record):
            return self._signed_by(self._signing.job_key, record)
        if group not in self._signing.keys:
            return record
        key = self._random.choice(self._signing.keys[group]) if not record.of_half else self._signing.keys[group][0]
        if record.of_half:
            has_time = _value(record.headers, "SIGNED_AT") is not None
            signed = self._signed_by(key, record if has_time else _at(record, record.at_ms))
            self._signatures[record.key or b""] = _value(signed.headers, "SIGNATURE") or b""
            return signed
        return self._signed_by(key, self._answering(record))

    def _answering(self, op: NewRecord) -> NewRecord:
        """Return an op that names its half, if there is one already; some name none, as those that are sent by hand."""
        if any(name == "HALF_SIGNATURE" for name, _ in op.headers):
            return op
        half = self._generator.control_halves.get(op.key or b"")
        if half is not None:
            named = _value(self._signed_by(self._signing.keys["g"][0], _at(half, half.at_ms)).headers, "SIGNATURE")
        else:
            named = self._signatures.get(op.key or b"")
        if named is None or self._random.random() < 0.1:
            return op
        return op._replace(headers=[*op.headers, ("HALF_SIGNATURE", named)])

    def _any_recent(self, record: NewRecord) -> NewRecord:
        return self._random.choice(self._recent) if self._recent else record

    def _signed_by(self, key: str, record: NewRecord, cluster: str | None = None) -> NewRecord:
        return self._with_signature(record, self._signing.signature(key, record, cluster))

    @staticmethod
    def _with_signature(record: NewRecord, signature: bytes) -> NewRecord:
        return record._replace(headers=[*_without_signature(record.headers), ("SIGNATURE", signature)])


def is_late(half: Record) -> bool:
    """Return True if a half's signature is valid until a horizon at which the half may be unread."""
    signed_at = _value(half.headers, "SIGNED_AT")
    return signed_at is not None and int(signed_at) + WINDOW_MS < LATEST_MS


def _at(half: NewRecord, signed_ms: int) -> NewRecord:
    """Return a half with a time of signing."""
    headers = [(name, value) for name, value in half.headers if name != "SIGNED_AT"]
    return half._replace(headers=[*headers, ("SIGNED_AT", b"%d" % signed_ms)])


def _without_signature(headers: HeaderList) -> HeaderList:
    return [(name, value) for name, value in headers if name != "SIGNATURE"]


def _value(headers: HeaderList, name: str) -> bytes | None:
    """Return the first value of a header."""
    return next((value for each, value in headers if each == name), None)


def _is_tick(headers: HeaderList) -> bool:
    return any(name == "TICK" for name, _ in headers)


def _is_notice(record: Record | NewRecord) -> bool:
    names = {name for name, _ in record.headers}
    return record.of_half and "HALF_LOST" in names and "REAL_TOPIC" not in names
