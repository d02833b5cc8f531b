"""The tick publisher: writes the time to every partition of the half and op topics (decision 1)."""

import logging
import threading
import time
from collections.abc import Callable, Collection

from confluent_kafka import KafkaException

from halfway.pipelines.kafka.admin import Admin, partition_counts
from halfway.pipelines.kafka.tick_records import write_ticks
from halfway.pipelines.kafka.writer import RecordWriter
from halfway.schemas.errors import KafkaUnavailableError
from halfway.schemas.settings import Settings

log = logging.getLogger(__name__)

_DELIVERY_LIMIT_MS = 10_000


class TickPublisher:
    """Writes a tick (a heartbeat) to every partition each `tick_interval`, in a thread of its own.

    It does not resend a tick that Kafka does not take: time stands still until the next one, and nothing falls due
    meanwhile.
    """

    def __init__(self, settings: Settings, client: Admin, absent_groups: Callable[[], Collection[str]] = tuple) -> None:
        """Make the producer. Publishes nothing yet.

        Args:
            settings: name the topics and the interval.
            client: an admin client, to ask for the partitions before each tick.
            absent_groups: returns the producer groups that are away (R15), called before each tick.
        """
        self._kafka = settings.kafka
        self._interval_s = settings.resolution.tick_interval / 1000
        self._absent_groups = absent_groups
        self._client = client
        self._writer = self._new_writer()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticks", daemon=True)
        self._was_failing = False

    def publish(self) -> bool:
        """Write one tick to each partition and wait until Kafka has them; return False if one is missing."""
        topics = (self._kafka.half_topic, self._kafka.op_topic)
        try:
            partitions = partition_counts(self._client, topics)
            write_ticks(self._writer, partitions, self._absent_groups())
        except KafkaUnavailableError as error:
            return self._failed(str(error))
        except KafkaException as error:
            # This producer learns of a new partition only after minutes, or has failed for good. A new one knows the
            # present state.
            self._writer = self._new_writer()
            return self._failed(error.args[0].str())
        if len(partitions) < len(topics):
            return self._failed("a topic is missing")
        if self._was_failing:
            log.info("event=ticks_resumed")
        self._was_failing = False
        return True

    def start(self) -> None:
        """Begin to publish. An interval of 0 publishes nothing, so that a test controls time."""
        if self._interval_s > 0:
            self._thread.start()

    def stop(self) -> None:
        """Stop publishing; waits for the tick that is under way."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_DELIVERY_LIMIT_MS / 1000 + 10)

    def _new_writer(self) -> RecordWriter:
        return RecordWriter(self._kafka, limit_ms=_DELIVERY_LIMIT_MS, linger_ms=0)

    def _failed(self, cause: str) -> bool:
        if not self._was_failing:
            log.warning("event=tick_not_published effect=time_stands_still cause=%r", cause)
        self._was_failing = True
        return False

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopped.is_set():
            self.publish()
            due = max(due + self._interval_s, time.monotonic())
            self._stopped.wait(due - time.monotonic())
