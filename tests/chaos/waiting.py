"""Waiting in the chaos run, with the error that it reports."""

from collections.abc import Callable

from tests.support import waiting

LIMIT_S = 2 * waiting.LIMIT_S
"""Three processes of a world compete with whatever else a slow machine runs."""


class ChaosError(Exception):
    """A fault could not be made, or the world did not recover from it."""


def until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait until `condition` returns True.

    Raises:
        ChaosError: it did not within `limit_s`.
    """
    try:
        waiting.until(condition, what, limit_s)
    except waiting.NotInTimeError as error:
        raise ChaosError(str(error)) from None
