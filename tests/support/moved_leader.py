"""A broker that does not lead a partition yet when it is asked where it begins, and does when asked where it ends."""

import struct
from pathlib import Path

from tests.support.proxied_broker import ProxiedBroker

_LIST_OFFSETS = 2
_NOT_LEADER = 6
_EARLIEST = struct.pack(">q", -2)
_UNTOLD = struct.pack(">qqi", -1, -1, -1)
"""No time, no offset and no epoch."""


class MovedLeaderBroker(ProxiedBroker):
    """It refuses to tell the beginning of the partition that is asked about next after `refuse_begin`."""

    def __init__(self, directory: Path) -> None:
        """Refuse nothing yet."""
        super().__init__(directory)
        self._to_refuse = False

    def refuse_begin(self) -> None:
        """Refuse the next request for where a partition begins."""
        with self._lock:
            self._to_refuse = True

    def has_refused(self) -> bool:
        """Return True if what was to be refused has been."""
        with self._lock:
            return not self._to_refuse

    def _changed(self, key: int, version: int, request: bytes, response: bytes) -> bytes:
        if key != _LIST_OFFSETS or _EARLIEST not in request:
            return response
        with self._lock:
            is_refused, self._to_refuse = self._to_refuse, False
        return _refusal(version, response) if is_refused else response


def _refusal(version: int, response: bytes) -> bytes:
    """Return a response about one partition with an error. As Kafka's schema ListOffsetsResponse.json has it.

    It ends in the partition's error, time, offset and epoch, and the empty tags of partition, topic and response.
    """
    if version < 6:
        raise AssertionError(f"ListOffsets {version} is not known here")
    error_at = len(response) - 3 - len(_UNTOLD) - 2
    return response[:error_at] + struct.pack(">h", _NOT_LEADER) + _UNTOLD + response[-3:]
