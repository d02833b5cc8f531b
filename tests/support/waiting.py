"""Waiting in tests: for a condition within a time limit, never for a fixed time."""

import time
from collections.abc import Callable

LIMIT_S = 150.0
_LOOK_S = 0.05


class NotInTimeError(AssertionError):
    """A condition did not become true within the time limit."""


def until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait until `condition` returns True.

    Raises:
        NotInTimeError: it did not within `limit_s`; the message names `what`.
    """
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= deadline_s:
            raise NotInTimeError(f"not within {limit_s:.0f} s: {what}")
        time.sleep(_LOOK_S)
