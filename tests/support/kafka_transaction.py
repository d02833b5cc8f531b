"""A Kafka transaction in the topics of a job, which tests leave open, commit or abort."""

from confluent_kafka import Producer

from tests.support.job_world import START_MS, World, half_headers, op_headers


class Transaction:
    """A Kafka transaction of a producer of its own, open until it is committed or aborted."""

    def __init__(self, w: World, name: str) -> None:
        self.w = w
        self.id = f"{name}-{w.settings.kafka.half_topic}"
        self._producer = Producer({"bootstrap.servers": w.settings.kafka.servers(), "transactional.id": self.id})
        self._producer.init_transactions(30)
        self._producer.begin_transaction()

    def half(self, key: str, at_ms: int, partition: int = 0, **headers: bytes | None) -> "Transaction":
        self._send(self.w.settings.kafka.half_topic, key, half_headers(**headers), at_ms, partition)
        return self

    def op(self, key: str, action: bytes, at_ms: int, partition: int = 0) -> "Transaction":
        self._send(self.w.settings.kafka.op_topic, key, op_headers(action), at_ms, partition)
        return self

    def _send(self, topic: str, key: str, headers: list[tuple[str, bytes | None]], at_ms: int, partition: int) -> None:
        self._producer.produce(topic, b"body", key, headers=headers, timestamp=START_MS + at_ms, partition=partition)
        assert self._producer.flush(30) == 0

    def commit(self) -> None:
        self._producer.commit_transaction(30)

    def abort(self) -> None:
        self._producer.abort_transaction(30)
