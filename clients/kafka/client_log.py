"""Logs what a client of librdkafka reports: an error once, and while it goes on at growing intervals."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from confluent_kafka import KafkaError

log = logging.getLogger(__name__)
_librdkafka_log = logging.getLogger("halfway.clients.librdkafka")
# Without a handler, Python prints librdkafka's warnings to stderr in an application that configures no logging.
_librdkafka_log.addHandler(logging.NullHandler())

_FIRST_INTERVAL_S = 10.0
_LONGEST_INTERVAL_S = 600.0
_OVER_AFTER_S = 60.0
"""An error that was not reported for this long is over: the next one is logged at once."""


@dataclass(slots=True)
class _Logged:
    next_s: float
    interval_s: float
    seen_s: float
    left_out: int = 0


class ClientLog:
    """The log of one client: its `error_cb`, and in place of librdkafka's own `logger`.

    Without Kafka, librdkafka reports each attempt to connect, ten times a second, in both ways.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without errors. `clock` returns seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._logged: dict[str, _Logged] = {}

    def error(self, error: KafkaError) -> None:
        """Log a connection error. librdkafka recovers from all but the fatal ones."""
        left_out = self._left_out(error.name())
        if left_out is not None:
            level = logging.ERROR if error.fatal() else logging.WARNING
            log.log(level, "event=kafka_error code=%s times=%d error=%r", error.name(), left_out + 1, error.str())

    def log(self, level: int, form: str, *parts: str) -> None:
        """Log a line of librdkafka: what it is about, of which client, and the text."""
        if self._left_out(f"log {parts[0]}") is not None:
            _librdkafka_log.log(level, form, *parts)

    def _left_out(self, what: str) -> int | None:
        """Return how often this was left out since it was last logged; None if it is to be left out again."""
        now_s = self._clock()
        with self._lock:
            known = self._logged.get(what)
            if known is None or now_s - known.seen_s > _OVER_AFTER_S:
                self._logged[what] = _Logged(now_s + _FIRST_INTERVAL_S, _FIRST_INTERVAL_S, now_s)
                return 0
            known.seen_s = now_s
            if now_s < known.next_s:
                known.left_out += 1
                return None
            known.interval_s = min(2 * known.interval_s, _LONGEST_INTERVAL_S)
            left_out, known.left_out, known.next_s = known.left_out, 0, now_s + known.interval_s
            return left_out
