"""Waiting in tests: for a condition within a time limit, never for a fixed time."""

import time
from collections.abc import Callable

LIMIT_S = 150.0
_LOOK_S = 0.05


class NotInTimeError(AssertionError):
    """A condition did not become true within the time limit."""


def until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S, progress: Callable[[], object] = lambda: None) -> None:
    """Wait until `condition` returns True.

    Args:
        condition: what to wait for.
        what: names it in the error.
        limit_s: how long to wait.
        progress: the limit begins anew when this returns something else, because a busy machine is slow and no error.

    Raises:
        NotInTimeError: it did not within `limit_s`.
    """
    seen, deadline_s = progress(), time.monotonic() + limit_s
    while not condition():
        now_s, found = time.monotonic(), progress()
        if found != seen:
            seen, deadline_s = found, now_s + limit_s
        if now_s >= deadline_s:
            raise NotInTimeError(f"not within {limit_s:.0f} s: {what}")
        time.sleep(_LOOK_S)
