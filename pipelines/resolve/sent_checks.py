"""Knows which of the job's checks count: those that somebody had the time to answer (R5)."""

from collections.abc import Callable
from threading import Lock
from time import monotonic

from halfway.schemas.batch_status import SentStatus

_MOST_WAITING = 100


class SentChecks:
    """The horizons up to which checks were sent, and when.

    A check is decided at a horizon and sent later: in a backlog much later, and after a crash as late as the start that
    repeats its batch. How far the horizon has moved since does not tell how much time there was for an answer.
    """

    def __init__(self, interval_ms: int, clock_s: Callable[[], float] = monotonic) -> None:
        """Start without any.

        Args:
            interval_ms: `transactionCheckInterval`. A check counts when half of it has passed.
            clock_s: the time in seconds, of any beginning.
        """
        self._wait_s, self._clock_s = interval_ms / 2_000, clock_s
        self._waiting: list[tuple[float, int]] = []
        """When all checks up to a horizon had been sent, and the horizon. Close ones are one: the list stays short."""
        self._asked_ms = 0
        self._lock = Lock()
        """The batches add, and the ticks' thread reads: neither may undo what the other has noted."""

    def add(self, horizon_ms: int, *, any_due: bool = True) -> None:
        """Note that all checks up to a horizon are in the check topic.

        Args:
            horizon_ms: the horizon.
            any_due: a check was sent or put off (R8) at it just now. What was noted earlier of this horizon is void
                then, because it did not cover that check.
        """
        with self._lock:
            waiting = [each for each in self._waiting if each[1] > self._asked_ms]
            if any_due:
                waiting = [each for each in waiting if each[1] < horizon_ms]
                self._asked_ms = min(self._asked_ms, horizon_ms - 1)
            if len(waiting) > 1 and waiting[-1][0] - waiting[-2][0] < self._wait_s / 8:
                waiting.pop()
            if len(waiting) > _MOST_WAITING:  # Kafka has not told for long who is absent. Half of the times do.
                waiting = waiting[1::2]
            self._waiting = [*waiting, (self._clock_s(), horizon_ms)]

    def asked_ms(self, as_of_s: float | None = None) -> int:
        """Return the horizon up to which checks count; 0 if none do.

        Args:
            as_of_s: the time by `clock_s` at which to decide; None for now.
        """
        before_s = (self._clock_s() if as_of_s is None else as_of_s) - self._wait_s
        with self._lock:
            self._asked_ms = max([self._asked_ms, *(horizon_ms for at_s, horizon_ms in self._waiting if at_s <= before_s)])
            return self._asked_ms

    def status(self) -> SentStatus:
        """Return what a later run takes up."""
        now_s, asked_ms = self._clock_s(), self._asked_ms
        waiting = tuple((round((now_s - at_s) * 1000), horizon_ms) for at_s, horizon_ms in self._waiting if horizon_ms > asked_ms)
        return SentStatus(asked_ms, waiting)

    def take_up(self, former: SentStatus, ms_ago: int) -> None:
        """Take up what a former run has sent. What it decided and did not send, a repeated batch sends.

        Args:
            former: what `status` returned then.
            ms_ago: how long ago that was.
        """
        now_s, since_s = self._clock_s(), max(0, ms_ago) / 1000
        waiting = [(now_s - since_s - each_ms / 1000, horizon_ms) for each_ms, horizon_ms in former.ms_ago]
        # What counted before counts again when it is known who is absent.
        self._asked_ms, self._waiting = 0, [(now_s - since_s - self._wait_s, former.asked_ms), *waiting]
