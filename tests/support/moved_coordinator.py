"""A broker which answers look-ups of committed offsets as a former coordinator does."""

import struct
from pathlib import Path

from tests.support.proxied_broker import ProxiedBroker

_OFFSET_FETCH, _SYNC_GROUP = 9, 14
_NOT_COORDINATOR = 16


class MovedCoordinatorBroker(ProxiedBroker):
    """It refuses the next look-ups of offsets after `refuse_after_join`, once a member has got its partitions."""

    def __init__(self, directory: Path) -> None:
        """Refuse nothing yet."""
        super().__init__(directory)
        self._to_refuse = self._refusals_left = self._refused = 0

    def refuse_after_join(self, times: int) -> None:
        """Refuse this many look-ups after the next member has got its partitions."""
        with self._lock:
            self._to_refuse, self._refused = times, 0

    def refuses_now(self) -> bool:
        """Return True if some of the look-ups that are to be refused have been, and more will be."""
        with self._lock:
            return self._refused > 0 < self._refusals_left

    def has_refused(self) -> bool:
        """Return True if all look-ups that were to be refused have been."""
        with self._lock:
            return self._to_refuse == self._refusals_left == 0

    def _changed(self, key: int, version: int, request: bytes, response: bytes) -> bytes:
        if key == _SYNC_GROUP:
            with self._lock:
                self._refusals_left, self._to_refuse = self._refusals_left + self._to_refuse, 0
        elif key == _OFFSET_FETCH and self._refuses():
            return response[:4] + _refusal(version, request)
        return response

    def _refuses(self) -> bool:
        with self._lock:
            if not self._refusals_left:
                return False
            self._refusals_left -= 1
            self._refused += 1
            return True


def _refusal(version: int, request: bytes) -> bytes:
    """Return a response without its correlation id: no partition, and an error for the request as a whole.

    As Kafka's schema OffsetFetchResponse.json has it. A compact length is one more than the number of elements.
    """
    error = struct.pack(">h", _NOT_COORDINATOR)
    no_tags, no_throttle, no_topics, one_group = b"\0", bytes(4), b"\1", b"\2"
    if version < 6:
        raise AssertionError(f"OffsetFetch {version} is not known here")
    if version < 8:
        return no_tags + no_throttle + no_topics + error + no_tags
    (client_id_size,) = struct.unpack(">h", request[8:10])
    group_at = 10 + client_id_size + 2  # after the request's tags and the number of groups
    group = request[group_at : group_at + request[group_at]]
    return no_tags + no_throttle + one_group + group + no_topics + error + no_tags + no_tags
