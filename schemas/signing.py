"""Signed records: who may say what in topics that several services share (docs/security.md, docs/contract.md)."""

import hashlib
import hmac
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from halfway.schemas.headers import SIGNATURE

MIN_KEY_BYTES = 32

_SCHEME = "halfway-1"
_NULL = b"\xff\xff\xff\xff"


class Signable(NamedTuple):
    """What a signature covers, beside the name of the cluster."""

    topic: str
    key: bytes | None
    value_sha256: bytes
    headers: Sequence[tuple[str, bytes | None]]
    """All headers in their order. The one that holds the signature is left out."""
    partition: int | None = None
    """The partition of a tick. It is None for other records, whose partition follows from their key."""
    signature_header: str = SIGNATURE


@lru_cache(maxsize=1024)
def _text(text: str) -> bytes:
    """Return a field of text. The same names occur in each record."""
    field = text.encode()
    return len(field).to_bytes(4, "big") + field


def sha256_of(value: bytes | None) -> bytes:
    """Return the SHA-256 of a record's value; a null value counts as empty."""
    return hashlib.sha256(value or b"").digest()


def signature_of(key: bytes, cluster: str, record: Signable) -> str:
    """Return a record's signature: HMAC-SHA256 in lower-case hexadecimal.

    Each signed field is preceded by its length in bytes (4 bytes, big endian), so that no two records have the same
    signed bytes.

    Args:
        key: the secret key.
        cluster: `kafka.signing.cluster`.
        record: the record.
    """
    place = b"" if record.partition is None else str(record.partition).encode()
    parts = [_text(_SCHEME), _text(cluster), _text(record.topic)]
    for field in (place, record.key or b"", record.value_sha256):
        parts += (len(field).to_bytes(4, "big"), field)
    for name, value in record.headers:
        if name != record.signature_header:
            parts += (_text(name), _NULL) if value is None else (_text(name), len(value).to_bytes(4, "big"), value)
    return hmac.digest(key, b"".join(parts), "sha256").hex()


def binding_of(half_signature: str | None) -> int:
    """Return what binds an op to its half: 64 bits of a digest of the half's signature; 0 for an unsigned half.

    Nobody can choose it without the group's key, so 64 bits are enough, and the state keeps only them.
    """
    if half_signature is None:
        return 0
    return int.from_bytes(hashlib.sha256(half_signature.encode()).digest()[:8], "big", signed=True)


class Keyring:
    """The keys of producer groups and of the job. Signs with the first key, verifies with any, and never shows one."""

    def __init__(
        self,
        keys: Mapping[str, Sequence[bytes]],
        *,
        required: bool,
        cluster: str = "",
        job_keys: Sequence[bytes] = (),
        topics: Mapping[str, Collection[str]] | None = None,
        accept_unsigned: bool = False,
    ) -> None:
        """Store the keys.

        Args:
            keys: producer group → its keys.
            required: True to refuse the records of a group without a key.
            cluster: the name of this Kafka.
            job_keys: the keys that sign ticks and notices of lost halves.
            topics: producer group → the `REAL_TOPIC`s that it may send to; a group without an entry may send to any.
            accept_unsigned: True to refuse wrong signatures only, not missing ones.
        """
        self._keys = {group: tuple(of_group) for group, of_group in keys.items()}
        self._job_keys, self._cluster = tuple(job_keys), cluster
        self._topics = {group: frozenset(of_group) for group, of_group in (topics or {}).items()}
        self.required, self._accept_unsigned = required, accept_unsigned

    def has(self, producer_group: str) -> bool:
        """Return True if a group has a key."""
        return producer_group in self._keys

    def sign(self, producer_group: str, record: Signable) -> str | None:
        """Return the signature of a half, op or check; None if its group has no key."""
        keys = self._keys.get(producer_group)
        return signature_of(keys[0], self._cluster, record) if keys else None

    def sign_as_job(self, record: Signable) -> str | None:
        """Return the signature of a tick or of a notice of a lost half; None without a key of the job."""
        return signature_of(self._job_keys[0], self._cluster, record) if self._job_keys else None

    def problem(self, producer_group: str, record: Signable, signature: str | None) -> str | None:
        """Return why a signature is refused (R14); None if it is valid, or the group needs none."""
        keys = self._keys.get(producer_group)
        if keys is None:
            return f"there is no key for group {producer_group}" if self.required else None
        return self._problem(keys, record, signature)

    def problem_of_job(self, record: Signable, signature: str | None) -> str | None:
        """Return why a signature of the job is refused (R14); None if it is valid, or the job has no key."""
        return self._problem(self._job_keys, record, signature) if self._job_keys else None

    def topic_problem(self, producer_group: str, topic: str) -> str | None:
        """Return why a group's half is refused for its `REAL_TOPIC`; None if the group may send to that topic."""
        allowed = self._topics.get(producer_group)
        return None if allowed is None or topic in allowed else f"group {producer_group} may not send to {topic}"

    def _problem(self, keys: Iterable[bytes], record: Signable, signature: str | None) -> str | None:
        if signature is None:
            return None if self._accept_unsigned else "the record is not signed"
        right = (signature_of(key, self._cluster, record) for key in keys)
        # Every key is compared, so that the time taken does not tell which one matched.
        matches = [hmac.compare_digest(each.encode(), signature.encode()) for each in right]
        return None if any(matches) else "the signature does not fit this record, its topic and its cluster"
