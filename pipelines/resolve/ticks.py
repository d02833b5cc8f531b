"""The tick publisher: time, told to every partition of the half and op topics (design §1.1)."""

import json
import logging
import threading
import time
from collections.abc import Callable, Collection

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from halfway.pipelines.kafka.admin import admin, librdkafka_log, partition_counts
from halfway.schemas.errors import KafkaUnavailableError
from halfway.schemas.headers import PARTITIONS, TICK
from halfway.schemas.settings import Settings

log = logging.getLogger(__name__)

_DELIVERY_LIMIT_MS = 10_000


class TickPublisher:
    """Writes a tick to every partition each `tick_interval`, in a thread of its own.

    A tick that Kafka does not take is not repeated: time stands still until the next one, and nothing falls due meanwhile.
    """

    def __init__(self, settings: Settings, absent_groups: Callable[[], Collection[str]] = tuple) -> None:
        """Prepare to publish to the topics of the settings.

        Args:
            settings: where to, and how often.
            absent_groups: the producer groups that are away, asked before each tick (R15).
        """
        self._topics = (settings.kafka.half_topic, settings.kafka.op_topic)
        self._interval_s = settings.resolution.tick_interval / 1000
        self._absent_groups = absent_groups
        self._admin = admin(settings)
        self._options = {
            **settings.kafka.as_librdkafka_dict(),
            "client.id": "halfway-ticks",
            "acks": "all",
            "enable.idempotence": "true",
            "linger.ms": "0",
            "message.timeout.ms": str(_DELIVERY_LIMIT_MS),
        }
        self._producer = self._new_producer()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticks", daemon=True)
        self._was_failing = False

    def publish(self) -> bool:
        """Write one tick to each partition and wait for Kafka to have them; return whether it has all."""
        try:
            partitions = partition_counts(self._admin, self._topics)
            value = json.dumps({"absent_groups": sorted(self._absent_groups())}).encode()
            failures: list[KafkaError] = []

            def delivered(error: KafkaError | None, _: Message) -> None:
                if error is not None:
                    failures.append(error)

            for topic, count in partitions.items():
                for partition in range(count):
                    now_ms = time.time_ns() // 1_000_000
                    headers: list[tuple[str, str | bytes | None]] = [(TICK, str(now_ms)), (PARTITIONS, str(count))]
                    self._producer.produce(topic, value, partition=partition, headers=headers, on_delivery=delivered)
            left = self._producer.flush(_DELIVERY_LIMIT_MS / 1000 + 5)
        except (KafkaUnavailableError, BufferError) as error:
            return self._failed(str(error))
        except KafkaException as error:
            # This one does not learn of a new partition for minutes, or has failed for good: a new one begins with what is true now.
            self._producer = self._new_producer()
            return self._failed(error.args[0].str())
        if failures or left or len(partitions) < len(self._topics):
            return self._failed(failures[0].str() if failures else "a topic is missing or Kafka is slow")
        if self._was_failing:
            log.info("event=ticks_resumed")
        self._was_failing = False
        return True

    def _new_producer(self) -> Producer:
        return Producer(self._options, logger=librdkafka_log)

    def _failed(self, cause: str) -> bool:
        if not self._was_failing:
            log.warning("event=tick_not_published effect=time_stands_still cause=%r", cause)
        self._was_failing = True
        return False

    def start(self) -> None:
        """Begin to publish; an interval of 0 publishes nothing, so that a test owns time."""
        if self._interval_s > 0:
            self._thread.start()

    def stop(self) -> None:
        """End publishing; waits for the tick that is under way."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_DELIVERY_LIMIT_MS / 1000 + 10)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopped.is_set():
            self.publish()
            due = max(due + self._interval_s, time.monotonic())
            self._stopped.wait(due - time.monotonic())
