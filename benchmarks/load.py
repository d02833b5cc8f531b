"""Traffic for the benchmarks: different incompressible bodies, 85 % COMMIT, 10 % ROLLBACK, 5 % without an answer."""

import os
import random
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from confluent_kafka import Producer

from halfway.schemas.headers import RECORD_OVERHEAD_BYTES
from halfway.schemas.settings import KafkaSettings

GROUP = "bench"
"""The prefix of the names of producer groups."""
_POOL_BYTES = 16 * 1024 * 1024
_PER_SECOND = 500


@dataclass
class Sent:
    """The numbers of transactions sent."""

    committed: int = 0
    rolled_back: int = 0
    unanswered: int = 0

    @property
    def transactions(self) -> int:
        """Return the number of halves."""
        return self.committed + self.rolled_back + self.unanswered

    @property
    def events(self) -> int:
        """Return the number of halves and ops."""
        return 2 * (self.committed + self.rolled_back) + self.unanswered


class Load:
    """Sends transactions as a client does, but without waiting for each."""

    def __init__(
        self,
        kafka: KafkaSettings,
        *,
        body_bytes: int = 1024,
        seed: int = 1,
        groups: int = 1,
        topics: int = 1,
        ids: Iterator[str] | None = None,
        commit: float = 0.85,
        roll_back: float = 0.1,
    ) -> None:
        """Prepare to send bodies of `body_bytes`. The seed fixes the verdicts, and the ids unless `ids` are given.

        Groups and topics are used in turn. `commit` and `roll_back` are the shares of these verdicts.
        """
        self._kafka = kafka
        self._body_bytes, self._groups, self._topics = body_bytes, groups, topics
        self._random = random.Random(seed)
        self._ids = ids
        self._commit, self._answered = commit, commit + roll_back
        self._pool = os.urandom(_POOL_BYTES)
        self._producer = Producer(
            {
                **kafka.as_librdkafka_dict(),
                "partitioner": "murmur2_random",
                "linger.ms": "20",
                "batch.size": "1000000",
                "message.max.bytes": str(body_bytes + RECORD_OVERHEAD_BYTES),
                "queue.buffering.max.messages": "1000000",
                "queue.buffering.max.kbytes": "1048576",
            }
        )
        self.sent = Sent()

    def send(self, transactions: int, *, answered: bool = True) -> None:
        """Send transactions as fast as Kafka takes them. Without `answered` no transaction gets a verdict."""
        for _ in range(transactions):
            self._send_one(answered)
        self._producer.flush()

    def send_paced(self, seconds: float) -> None:
        """Send at a steady rate, of 500 transactions a second."""
        started = time.monotonic()
        for number in range(int(_PER_SECOND * seconds)):
            wait_s = started + number / _PER_SECOND - time.monotonic()
            if wait_s > 0:
                self._producer.poll(wait_s)
            self._send_one(answered=True)
        self._producer.flush()

    def _send_one(self, answered: bool) -> None:
        transaction_id = uuid.UUID(int=self._random.getrandbits(128)).hex if self._ids is None else next(self._ids)
        at = self._random.randrange(_POOL_BYTES - self._body_bytes)
        number = self.sent.transactions
        topic, group = f"orders{number % self._topics}", f"{GROUP}{number % self._groups}"
        headers = [("REAL_TOPIC", topic), ("PGROUP", group), ("TAGS", "TagA"), ("KEYS", transaction_id), ("trace", "abc")]
        self._produce(self._kafka.half_topic, transaction_id, self._pool[at : at + self._body_bytes], headers)
        chance = self._random.random()
        if not answered or chance >= self._answered:
            self.sent.unanswered += 1
            return
        action = "COMMIT" if chance < self._commit else "ROLLBACK"
        self.sent.committed += action == "COMMIT"
        self.sent.rolled_back += action == "ROLLBACK"
        self._produce(self._kafka.op_topic, transaction_id, b"", [("ACTION", action), ("PGROUP", group)])

    def _produce(self, topic: str, key: str, value: bytes, headers: list[tuple[str, str]]) -> None:
        while True:
            try:
                self._producer.produce(topic, value, key, headers=list(headers))
            except BufferError:
                self._producer.poll(0.1)
            else:
                self._producer.poll(0)
                return
