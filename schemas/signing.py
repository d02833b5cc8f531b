"""Signed ops: a group's verdicts come from who holds its key, not from whoever may write to the op topic (docs/security.md)."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence

_WHAT = b"halfway-op-1"
MIN_KEY_BYTES = 32


def signature_of(key: bytes, transaction_id: str, action: str, producer_group: str, incarnation: int) -> str:
    """Return the value of the `SIGNATURE` header: HMAC-SHA256 in lower-case hexadecimal.

    What is signed is unambiguous: five fields, each after its length in bytes (4 bytes, big endian).

    Args:
        key: the group's secret.
        transaction_id: the record key.
        action: COMMIT, ROLLBACK or UNKNOWN.
        producer_group: `PGROUP`.
        incarnation: `INCARNATION`, 0 where the header is not there.
    """
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for field in (_WHAT, transaction_id.encode(), action.encode(), producer_group.encode(), str(incarnation).encode()):
        mac.update(len(field).to_bytes(4, "big") + field)
    return mac.hexdigest()


class Keyring:
    """The keys of producer groups: signs with a group's first one, takes any of them. It never shows them."""

    def __init__(self, keys: Mapping[str, Sequence[bytes]], *, required: bool) -> None:
        """Hold `keys`; if `required`, a group without a key cannot settle anything."""
        self._keys = {group: tuple(of_group) for group, of_group in keys.items()}
        self.required = required

    def has(self, producer_group: str) -> bool:
        """Tell whether a group has a key."""
        return producer_group in self._keys

    def sign(self, transaction_id: str, action: str, producer_group: str, incarnation: int) -> str | None:
        """Return an op's signature; None for a group without a key."""
        keys = self._keys.get(producer_group)
        return signature_of(keys[0], transaction_id, action, producer_group, incarnation) if keys else None

    def problem(self, transaction_id: str, action: str, producer_group: str, incarnation: int, signature: str | None) -> str | None:
        """Return why an op's signature is no good (R14), None if it is, or none is asked for."""
        keys = self._keys.get(producer_group)
        if keys is None:
            return f"there is no key for group {producer_group}" if self.required else None
        if signature is None:
            return "the op is not signed"
        right = (signature_of(key, transaction_id, action, producer_group, incarnation) for key in keys)
        # All keys are tried, whichever fits: the time it takes tells nothing.
        matches = [hmac.compare_digest(each.encode(), signature.encode()) for each in right]
        return None if any(matches) else "the signature does not fit this id, action, group and incarnation"
