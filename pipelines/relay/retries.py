"""Knows when each stopped topic has its turn. Services choose how many there are: no step looks at all of them."""

from collections import deque
from collections.abc import Callable


class Retries:
    """The stopped topics, each once: those that need not wait, and those that wait until it is time to try them again.

    Args:
        interval_s: how long a topic waits.
        clock: returns seconds.
    """

    def __init__(self, interval_s: float, clock: Callable[[], float]) -> None:
        """Begin without topics."""
        self._interval_s, self._clock = interval_s, clock
        self._soon: deque[str] = deque()
        self._later: deque[tuple[float, str]] = deque()
        """In the order of the times: all wait equally long."""

    def soon(self, named: str) -> None:
        """Add a topic that need not wait, behind the others."""
        self._soon.append(named)

    def later(self, named: str) -> None:
        """Add a topic that waits."""
        self._later.append((self._clock() + self._interval_s, named))

    def is_due(self) -> bool:
        """Return True if a topic has its turn."""
        return self.has_soon() or self._has_waited()

    def has_soon(self) -> bool:
        """Return True if there is a topic that need not wait."""
        return bool(self._soon)

    def take(self, most: int) -> list[str]:
        """Take out up to `most` topics that have waited, and as many that need not wait: neither hold the others up."""
        taken: list[str] = []
        while len(taken) < most and self._has_waited():
            taken.append(self._later.popleft()[1])
        return taken + [self._soon.popleft() for _ in range(min(most, len(self._soon)))]

    def _has_waited(self) -> bool:
        return bool(self._later) and self._later[0][0] <= self._clock()
