"""Signed ops: only a holder of a group's key can settle its transactions (docs/security.md)."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence

_WHAT = b"halfway-op-1"
MIN_KEY_BYTES = 32


def signature_of(key: bytes, transaction_id: str, action: str, producer_group: str, incarnation: int) -> str:
    """Return the value of the `SIGNATURE` header: HMAC-SHA256 in lower-case hexadecimal.

    The signature covers five fields. Each is preceded by its length in bytes (4 bytes, big endian), so that no two ops
    have the same signed bytes.

    Args:
        key: the group's secret key.
        transaction_id: the record key as text.
        action: COMMIT, ROLLBACK or UNKNOWN.
        producer_group: `PGROUP`.
        incarnation: `INCARNATION`, or 0 without that header.
    """
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for field in (_WHAT, transaction_id.encode(), action.encode(), producer_group.encode(), str(incarnation).encode()):
        mac.update(len(field).to_bytes(4, "big") + field)
    return mac.hexdigest()


class Keyring:
    """The keys of producer groups. Signs with a group's first key, verifies with any of them, and never shows one."""

    def __init__(self, keys: Mapping[str, Sequence[bytes]], *, required: bool) -> None:
        """Store the keys.

        Args:
            keys: producer group → its keys.
            required: True to refuse the ops of a group without a key.
        """
        self._keys = {group: tuple(of_group) for group, of_group in keys.items()}
        self.required = required

    def has(self, producer_group: str) -> bool:
        """Return True if a group has a key."""
        return producer_group in self._keys

    def sign(self, transaction_id: str, action: str, producer_group: str, incarnation: int) -> str | None:
        """Return the signature of an op; None if its group has no key."""
        keys = self._keys.get(producer_group)
        return signature_of(keys[0], transaction_id, action, producer_group, incarnation) if keys else None

    def problem(self, transaction_id: str, action: str, producer_group: str, incarnation: int, signature: str | None) -> str | None:
        """Return why an op's signature is refused (R14); None if it is valid, or the group needs none."""
        keys = self._keys.get(producer_group)
        if keys is None:
            return f"there is no key for group {producer_group}" if self.required else None
        if signature is None:
            return "the op is not signed"
        right = (signature_of(key, transaction_id, action, producer_group, incarnation) for key in keys)
        # Every key is compared, so that the time taken does not tell which one matched.
        matches = [hmac.compare_digest(each.encode(), signature.encode()) for each in right]
        return None if any(matches) else "the signature does not fit this id, action, group and incarnation"
