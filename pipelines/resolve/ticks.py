"""The tick publisher: writes the time to every partition of the half and op topics (decision 1)."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping

from confluent_kafka import KafkaException

from halfway.pipelines.kafka.admin import Admin, describe_topics
from halfway.pipelines.kafka.tick_records import write_ticks
from halfway.pipelines.kafka.writer import RecordWriter
from halfway.pipelines.resolve.sent_checks import SentChecks
from halfway.schemas.errors import HalfwayError, KafkaUnavailableError
from halfway.schemas.settings import Settings
from halfway.schemas.tick_value import TickValue

log = logging.getLogger(__name__)

_DELIVERY_LIMIT_MS = 10_000
_FIRST_LIMIT_S = 60.0
HANGS_MS = 600_000
"""After this time plus `trigger.interval` in which no batch has ended, the job publishes a tick each `_SLOW_MS`."""
_SLOW_MS = 60_000


class TickPace:
    """Says when a tick is due: at each interval, but once a minute where no batch has ended for long.

    The thread of a job that hangs in a batch goes on. Its ticks do not know of the checks of the job that has taken its
    place: while they are the latest, none of those counts (R5). Safe for threads.
    """

    def __init__(self, interval_ms: int, hangs_ms: int) -> None:
        """Begin with a tick each `interval_ms`. After `hangs_ms` of them without a batch, one a minute is due."""
        self._interval_ms, self._hangs_ms = interval_ms, hangs_ms
        self._since_batch_ms = self._last_ms = 0
        self._lock = threading.Lock()

    def is_due(self, now_ms: int) -> bool:
        """Return True if a tick is due."""
        return self._since_batch_ms < self._hangs_ms or now_ms - self._last_ms >= _SLOW_MS

    def note_tick(self, now_ms: int) -> None:
        """Note that Kafka has taken the tick of an interval."""
        with self._lock:
            was_ms, self._since_batch_ms = self._since_batch_ms, self._since_batch_ms + self._interval_ms
        self._last_ms = now_ms
        if was_ms < self._hangs_ms <= was_ms + self._interval_ms:
            log.warning("event=no_batch_ends effect=one_tick_a_minute")

    def note_batch(self) -> None:
        """Note that a batch has ended: the job reads its ticks."""
        with self._lock:
            was_ms, self._since_batch_ms = self._since_batch_ms, 0
        if was_ms >= self._hangs_ms:
            log.info("event=batches_end_again")


class TickPublisher:
    """Writes a tick (a heartbeat) to every partition each `tick_interval`, in a thread of its own.

    It does not resend a tick that Kafka does not take: time stands still until the next one, and nothing falls due
    meanwhile.
    """

    def __init__(self, settings: Settings, client: Admin, sent: SentChecks, job: str = "") -> None:
        """Store the configuration. Publishes nothing yet.

        Args:
            settings: name the topics and the interval.
            client: an admin client, to ask for the partitions before each tick.
            sent: knows which checks count (R5).
            job: the checkpoint's query, of whose checks the ticks tell.
        """
        self._kafka, self._keyring = settings.kafka, settings.kafka.signing.keyring()
        self._interval_s = settings.resolution.tick_interval / 1000
        self.pace = TickPace(settings.resolution.tick_interval, HANGS_MS + settings.trigger.interval)
        self.absent_groups: Callable[[], Collection[str]] = tuple
        """Returns the producer groups that are away or behind (R15), called before each tick."""
        self.known_s: Callable[[], float | None] = lambda: None
        """Returns as of when it is known who is absent, or None. A check counts only when that is known (R5)."""
        self.topic_ids: Mapping[str, str] = {}
        """Kafka's ids of the topics, as of the last tick."""
        self._client, self._sent, self._job = client, sent, job
        self._writer: RecordWriter | None = None
        self._broker_ahead_ms = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticks", daemon=True)
        self._failure: str | None = None

    def publish(self) -> str | None:
        """Write one tick to each partition and wait until Kafka has them; return why one is missing."""
        failure = self._try()
        if failure is not None and self._failure is None:
            log.warning("event=tick_not_published effect=time_stands_still cause=%r", failure)
        elif failure is None and self._failure is not None:
            log.info("event=ticks_resumed")
        self._failure = failure
        return failure

    def publish_first(self) -> None:
        """Publish a tick, with some patience.

        Raises:
            KafkaUnavailableError: no tick could be published, and without one nothing falls due.
        """
        deadline_s = time.monotonic() + _FIRST_LIMIT_S
        while (failure := self.publish()) is not None:
            if time.monotonic() >= deadline_s:
                raise KafkaUnavailableError(f"no tick could be published, and without one nothing falls due: {failure}")
            self._stopped.wait(1.0)

    def now_ms(self) -> int:
        """Return the time by which Kafka stamps records, as far as the last tick tells."""
        return time.time_ns() // 1_000_000 + self._broker_ahead_ms

    def start(self) -> None:
        """Begin to publish."""
        self._thread.start()

    def stop(self) -> None:
        """Stop publishing; waits for the tick that is under way."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_DELIVERY_LIMIT_MS / 1000 + 10)

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._stopped.is_set():
            now_ms = time.monotonic_ns() // 1_000_000
            if self.pace.is_due(now_ms) and self.publish() is None:
                self.pace.note_tick(now_ms)
            due_s = max(due_s + self._interval_s, time.monotonic())
            self._stopped.wait(due_s - time.monotonic())

    def _try(self) -> str | None:
        topics = (self._kafka.half_topic, self._kafka.op_topic)
        try:
            self._writer = self._writer or RecordWriter(self._kafka, limit_ms=_DELIVERY_LIMIT_MS, linger_ms=0)
            found = describe_topics(self._client, topics)
            self.topic_ids = {topic: str(each.topic_id) for topic, each in found.items()}
            partitions = {topic: len(each.partitions) for topic, each in found.items() if each.partitions}
            known_s = self.known_s()
            asked_ms = 0 if known_s is None else self._sent.asked_ms(known_s)
            value = TickValue(tuple(self.absent_groups()), self._job, asked_ms).to_bytes()
            if self._stopped.is_set():  # The job ends, and this tick is left out: neither a failure nor a success.
                return self._failure
            self._broker_ahead_ms = write_ticks(self._writer, partitions, value, keyring=self._keyring)
        except HalfwayError as error:
            return str(error)
        except Exception as error:
            # This producer learns of a new partition only after minutes, or has failed for good. A new one knows the
            # present state. Whatever else it is, the thread must not end: time would stand still and nobody know why.
            self._writer = None
            if isinstance(error, KafkaException):
                return str(error.args[0].str())
            if self._failure is None:
                log.exception("event=tick_failed")
            return f"{type(error).__name__}: {error}"
        return "a topic is missing" if len(partitions) < len(topics) else None
