"""A table `messages` that a test appends to with delta-rs, relays in this process or their own, and what they wrote."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from confluent_kafka import Consumer, Message, TopicPartition
from confluent_kafka.admin import NewTopic
from deltalake import write_deltalake

from halfway.clients.reading.message_files import MESSAGE_SCHEMA
from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.admin import partition_counts
from halfway.pipelines.kafka.topic_setup import create_relay_topic
from halfway.pipelines.relay.relay import Begin, Relay
from halfway.schemas.settings import Settings
from tests.support.commands import as_options, halfway_command
from tests.support.kafka_topics import patient_admin
from tests.support.paths import ROOT
from tests.support.waiting import until

_AT = datetime(2026, 1, 2, 3, 4, 5, 678_000, UTC)
_READ_S = 30.0
EARLIEST = Begin(None)


class Sent(NamedTuple):
    """A record of a real topic, as a `read_committed` consumer gets it."""

    partition: int
    transaction_id: str
    key: str
    value: bytes
    headers: list[tuple[str, str | None]]


def row(transaction_id: str, topic: str = "orders", **changes: object) -> dict[str, object]:
    """Return a row of `messages` without its batch."""
    known: dict[str, object] = {
        "transaction_id": transaction_id,
        "topic": topic,
        "queue_id": 0,
        "body": transaction_id.encode(),
        "properties": [],
        "producer_group": "shop",
        "born_at": _AT,
        "half_at": _AT,
        "committed_at": _AT,
        "check_times": 0,
        "incarnation": 0,
        "half_partition": 0,
        "half_offset": 0,
        "op_partition": 0,
        "op_offset": 0,
    }
    return {**known, **changes}


def append_rows(warehouse: Path, epoch: int, batch_id: int, rows: Sequence[Mapping[str, object]], offset: int = 0) -> None:
    """Append a batch to the table `messages`; `offset` is the op offset of its first row."""
    numbered = [
        {"tags": None, "keys": None, **each, "op_offset": offset + place, "epoch": epoch, "batch_id": batch_id}
        for place, each in enumerate(rows)
    ]
    write_deltalake(f"{warehouse}/messages", pa.Table.from_pylist(numbered, schema=MESSAGE_SCHEMA), mode="append")


class RelayWorld:
    """A table, and topics of this test's own, whose names have a suffix that no other test uses."""

    def __init__(self, broker: str, folder: Path, name: str, **overrides: object) -> None:
        """Create the relay's own topic."""
        self.name, self._folder, self._runs, self._offset = name, folder, 0, 0
        self.options: dict[str, object] = {
            "kafka.bootstrap_servers": broker,
            **{f"kafka.{kind}_topic": f"{kind}-{name}" for kind in ("half", "op", "check", "relay")},
            "storage.warehouse": str(folder / "warehouse"),
            "storage.checkpoint": str(folder / "checkpoint"),
            "relay.name": name,
            "relay.retry_interval": "200ms",
            "relay.poll_interval": "20ms",
            **overrides,
        }
        self.settings = self.with_settings()
        create_relay_topic(self.settings, 1)
        self.processes: list[subprocess.Popen[bytes]] = []

    def with_settings(self, **changed: object) -> Settings:
        return load_settings(environ={}, overrides={**self.options, **changed})

    # The table.

    def append(self, epoch: int, batch_id: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Append a batch, as the job does: all rows of it at once."""
        append_rows(self._folder / "warehouse", epoch, batch_id, rows, self._offset)
        self._offset += len(rows)

    # Kafka.

    def topic(self, name: str) -> str:
        """Return the name of a topic of this test."""
        return f"{name}-{self.name}"

    def make_topic(self, name: str, partitions: int = 1, **config: str) -> str:
        """Create a topic of this test, and wait until it is known."""
        topic, client = self.topic(name), patient_admin(self.settings.kafka)
        client.create_topics([NewTopic(topic, num_partitions=partitions, replication_factor=1, config=config)])[topic].result()
        until(lambda: topic in partition_counts(client, [topic]), topic)
        return topic

    def sent(self, name: str) -> list[Sent]:
        """Return what a `read_committed` consumer gets from a topic now, by partition and offset."""
        return [_sent(message) for message in committed_records(self.settings.kafka.servers(), self.topic(name))]

    def ids(self, name: str) -> list[str]:
        """Return the transaction ids of a topic, by partition and offset."""
        return [each.transaction_id for each in self.sent(name)]

    def has_no_open_transaction(self, name: str) -> bool:
        """Return True if consumers with `read_committed` see as much of partition 0 as others do."""
        place, ends = TopicPartition(self.topic(name), 0), set()
        for level in ("read_committed", "read_uncommitted"):
            options = {"bootstrap.servers": self.settings.kafka.servers(), "group.id": "reader", "isolation.level": level}
            with Consumer(options) as consumer:
                ends.add(consumer.get_watermark_offsets(place, timeout=_READ_S)[1])
        return len(ends) == 1

    # Relays.

    def relay(self, begin: Begin | None = None, **changed: object) -> Relay:
        """Relay what the table holds now, in this process, and return the relay."""
        relay = Relay(self.with_settings(**changed), begin)
        relay.run(available_now=True)
        return relay

    def start(self, *arguments: str, module: Sequence[str] = (), **changed: object) -> subprocess.Popen[bytes]:
        """Start a relay in a process of its own."""
        self._runs += 1
        options = as_options({**self.options, **changed})
        command = halfway_command("relay", *options, *arguments)
        if module:
            command = [command[0], "-m", *module, "relay", *options, *arguments]
        with self.log_file(self._runs).open("wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, start_new_session=True)
        self.processes.append(process)
        return process

    def log_file(self, run: int) -> Path:
        return self._folder / f"relay-{run}.log"

    def log(self, run: int) -> str:
        """Return what a run, counted from 1, has written so far."""
        return self.log_file(run).read_text(errors="replace")

    def close(self) -> None:
        """Kill what runs."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT)
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


class RunningRelay:
    """A relay in a thread, until the block ends."""

    def __init__(self, settings: Settings, begin: Begin | None = None) -> None:
        self.relay = Relay(settings, begin)
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.relay.run()
        except BaseException as error:
            self._errors.append(error)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def __enter__(self) -> Relay:
        self._thread.start()
        return self.relay

    def __exit__(self, *_: object) -> None:
        self.relay.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self._errors:
            raise self._errors[0]


def committed_records(servers: str, topic: str) -> list[Message]:
    """Return the committed records of a topic, by partition and offset, without what is behind an open transaction."""
    options: dict[str, Any] = {
        "bootstrap.servers": servers,
        "group.id": "reader",
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
        "receive.message.max.bytes": 2**31 - 1,
    }
    found: list[Message] = []
    with Consumer(options) as consumer:
        for partition in consumer.list_topics(topic, timeout=_READ_S).topics[topic].partitions:
            consumer.assign([TopicPartition(topic, partition, 0)])
            found += _to_the_end(consumer)
    return found


def _to_the_end(consumer: Consumer) -> Iterable[Message]:
    while True:
        message = consumer.poll(_READ_S)
        assert message is not None, "Kafka does not answer"
        if message.error() is not None:
            assert message.error().name() == "_PARTITION_EOF", message.error()
            return
        yield message


def _sent(message: Message) -> Sent:
    headers: list[tuple[str, str | None]] = [(name, None if value is None else value.decode()) for name, value in message.headers() or []]
    key, name = (message.key() or b"").decode(), dict(headers)["TRANSACTION_ID"]
    return Sent(message.partition() or 0, str(name), key, message.value() or b"", headers)
