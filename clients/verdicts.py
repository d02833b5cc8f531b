"""Remembers the verdicts that one instance knows, so that a check of one needs no look-up. No Kafka and no clock."""

import threading
from collections import OrderedDict

from halfway.clients.messages import HalfMessage
from halfway.schemas.headers import LocalTransactionState

REMEMBERED_VERDICTS = 100_000
"""The latest ones: 25 MB, if ids are as long as UUIDs."""


class KnownVerdicts:
    """COMMIT or ROLLBACK of the latest transactions, by id and incarnation. Safe for threads."""

    def __init__(self, limit: int = REMEMBERED_VERDICTS) -> None:
        """Start without verdicts. Remember at most `limit`."""
        self._limit = limit
        self._lock = threading.Lock()
        self._states: OrderedDict[tuple[str, int], LocalTransactionState] = OrderedDict()

    def note(self, message: HalfMessage, state: LocalTransactionState) -> None:
        """Remember what the listener said of a transaction. UNKNOWN is no verdict."""
        if state is LocalTransactionState.UNKNOWN:
            return
        with self._lock:
            self._states[message.transaction_id, message.incarnation] = state
            if len(self._states) > self._limit:
                self._states.popitem(last=False)

    def of(self, message: HalfMessage) -> LocalTransactionState | None:
        """Return the verdict of a transaction; None if it is not known here."""
        with self._lock:
            return self._states.get((message.transaction_id, message.incarnation))
