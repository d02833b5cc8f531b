"""Waiting in tests: for a condition, with a limit, never for a time."""

import time
from collections.abc import Callable

LIMIT_S = 120.0


def until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Look until `condition` holds."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not come within {limit_s:.0f} s"
        time.sleep(0.05)
