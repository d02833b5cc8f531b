"""A job with its own topics and tables on real Kafka, Spark and Delta. Only the clock is the test's."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Producer
from pyspark.sql import Row, SparkSession

from halfway.pipelines.kafka.admin import admin_client, partition_counts
from halfway.pipelines.resolve.job import ResolveJob
from halfway.pipelines.resolve.report import BatchReport
from halfway.pipelines.storage.delta_tables import read_table
from halfway.schemas.headers import Source
from halfway.schemas.settings import Settings
from halfway.schemas.signing import Signable, sha256_of
from halfway.schemas.tables import Table
from tests.support.partition_records import topic_records
from tests.support.raw_headers import send_raw

Headers = list[tuple[str, bytes | None]]
SMALL_JOB = {
    "state.buckets": 4,
    "state.shuffle_partitions": 1,
    "resolution.tick_interval": 0,
    "trigger.available_now": True,
}
"""Settings of a job whose time the test moves. It ends when it has read everything."""
START_MS = 1_700_000_000_000
"""Time 0 of the tests: 14 November 2023, a date that every tool accepts."""


def half_headers(**changes: bytes | None) -> Headers:
    """Return the headers of a valid half with some changed; None leaves one out."""
    headers: dict[str, bytes | None] = {"REAL_TOPIC": b"orders", "PGROUP": b"g", **changes}
    return [(name, value) for name, value in headers.items() if value is not None]


def op_headers(action: bytes = b"COMMIT", **changes: bytes | None) -> Headers:
    """Return the headers of a valid op with some changed; None leaves one out."""
    headers: dict[str, bytes | None] = {"ACTION": action, "PGROUP": b"g", **changes}
    return [(name, value) for name, value in headers.items() if value is not None]


@dataclass
class World:
    """Produces records at times that the test chooses, runs the job over them, and reads the results."""

    spark: SparkSession
    settings: Settings
    reports: list[BatchReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._producer = Producer(
            {
                "bootstrap.servers": self.settings.kafka.servers(),
                "partitioner": "murmur2_random",
                "acks": "all",
                "message.max.bytes": 16_000_000,
                "log_level": 0,  # it is still there when the broker stops
            }
        )
        kafka = self.settings.kafka
        self._keyring = kafka.signing.keyring()
        self._partitions = partition_counts(admin_client(self.settings.kafka), [kafka.half_topic, kafka.op_topic])

    def produce(
        self, source: Source, key: bytes | str | None, value: bytes | None, headers: Headers, at_ms: int = 0, partition: int = -1
    ) -> tuple[int, int]:
        """Send one record, and return its partition and offset."""
        placed: list[tuple[int, int]] = []

        def delivered(error: Any, message: Any) -> None:
            assert error is None, error
            placed.append((message.partition(), message.offset()))

        topic = self.settings.kafka.half_topic if source is Source.HALF else self.settings.kafka.op_topic
        self._producer.flush(30)
        self._producer.produce(topic, value, key, partition=partition, timestamp=START_MS + at_ms, headers=headers, on_delivery=delivered)
        self._producer.flush(30)
        return placed[0]

    def produce_odd(self, key: str, value: bytes, headers: Headers, at_ms: int = 0) -> None:
        """Send a record to the half topic with one header more, whose name is not UTF-8: confluent_kafka shows none."""
        raw = [(name.encode(), said or b"") for name, said in headers]
        kafka = self.settings.kafka
        send_raw(kafka.servers(), kafka.half_topic, key.encode(), value, [*raw, (b"\xff", b"x")], START_MS + at_ms)

    def produce_later(self, source: Source, key: str, value: bytes, headers: Headers, at_ms: int = 0) -> None:
        """Queue one record. The next record that `produce` sends comes after it."""
        topic = self.settings.kafka.half_topic if source is Source.HALF else self.settings.kafka.op_topic
        while True:
            try:
                self._producer.produce(topic, value, key, timestamp=START_MS + at_ms, headers=headers)
            except BufferError:
                self._producer.poll(0.1)
            else:
                return

    def half(self, key: str, at_ms: int = 0, body: bytes | None = b"body", **headers: bytes | None) -> tuple[int, int]:
        return self.produce(Source.HALF, key, body, half_headers(**headers), at_ms)

    def op(self, key: str, action: bytes, at_ms: int = 0, **headers: bytes | None) -> tuple[int, int]:
        return self.produce(Source.OP, key, b"", op_headers(action, **headers), at_ms)

    def tick(self, at_ms: int, value: bytes = b"") -> None:
        """Move the horizon to `at_ms`."""
        topics = {Source.HALF: self.settings.kafka.half_topic, Source.OP: self.settings.kafka.op_topic}
        for source, topic in topics.items():
            for partition in range(self._partitions[topic]):
                headers: Headers = [("TICK", str(START_MS + at_ms).encode()), ("PARTITIONS", str(self._partitions[topic]).encode())]
                if self._keyring is not None:
                    signature = self._keyring.sign_as_job(Signable(topic, None, sha256_of(value), headers, partition))
                    headers += [("SIGNATURE", signature.encode())] if signature else []
                self.produce(source, None, value, headers, at_ms, partition)

    def resolve(self, settings: Settings | None = None, *, adopt: bool = False) -> list[BatchReport]:
        """Run the job over everything unread, and return the report of each batch."""
        reports: list[BatchReport] = []
        ResolveJob(settings or self.settings, adopt=adopt, on_batch=reports.append).run(lambda: self.spark)
        self.reports.extend(reports)
        return reports

    def rows(self, table: Table) -> list[Row]:
        """Return a table's rows, by partition and offset of their record."""
        place = ("source_topic", "source_partition", "source_offset") if table is Table.QUARANTINE else ("half_partition", "half_offset")
        return read_table(self.spark, self.settings.storage, table).orderBy(*place).collect()

    def by_id(self, table: Table) -> dict[str, Row]:
        """Return a table's rows by transaction id. Fails if an id has two rows."""
        rows = self.rows(table)
        by_id = {row["transaction_id"]: row for row in rows}
        assert len(by_id) == len(rows)
        return by_id

    def checks(self) -> list[tuple[str, bytes, dict[str, bytes | None]]]:
        """Return all check requests (key, value, headers), by transaction id and CHECK_ID."""
        found = topic_records(self.settings.kafka.servers(), self.settings.kafka.check_topic)
        checks = [((check.key() or b"").decode(), check.value() or b"", dict(check.headers() or ())) for check in found]
        return sorted(checks, key=lambda check: (check[0], check[2]["CHECK_ID"] or b""))

    def away(self, *groups: str) -> bytes:
        """Return the value of a tick that says these producer groups are away."""
        return json.dumps({"absent_groups": list(groups)}).encode()


MakeWorld = Callable[..., World]
"""What the fixtures `job_world` and `world` of tests/kafka/conftest.py return."""
