"""What the blocks of `producer.transaction()` send is signed, and the job takes it."""

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry import context, propagate

from halfway import KafkaSettings, QueueFullError, SendError, SqlTransactions, TransactionProducer
from halfway.clients.instance import GroupInstance
from halfway.schemas.events import RECORD_SCHEMA, EventKind
from halfway.schemas.headers import SIGNED_AT, SIGNED_WINDOW_MS
from halfway.schemas.records import Record
from halfway.schemas.settings import ResolutionSettings
from halfway.schemas.signing import sha256_of
from halfway.transforms.decoding import DecoderConfig, decode

SETTINGS = KafkaSettings.model_validate(
    {"bootstrap_servers": "127.0.0.1:1", "signing": {"cluster": "test", "required": True, "keys": {"shop": ["k" * 32]}}}
)
CONFIG = DecoderConfig.of(ResolutionSettings(), SETTINGS)


class Wire:
    """A sender that keeps what it is given."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Record]] = []
        self.clock_ahead_ms = 0
        """By how much the broker's clock is ahead of this machine's."""
        self.room, self.waits = 100, 0

    def send(self, topic: str, record: Record, on_delivery: Callable[[None, Any], None]) -> None:
        if len(self.sent) == self.room:
            self.waits += 1
            raise QueueFullError("the queue stayed full")
        self.sent.append((topic, record))
        at_ms = time.time_ns() // 1_000_000 + self.clock_ahead_ms
        on_delivery(None, SimpleNamespace(partition=lambda: 0, offset=lambda: len(self.sent), timestamp=lambda: (2, at_ms)))

    def close(self, _: float) -> bool:
        return True


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire()
    monkeypatch.setattr(GroupInstance, "make_sender", lambda _: wire)
    monkeypatch.setattr("halfway.clients.checks.CheckAnswerer.start", lambda _: None)
    return wire


def rows_of(wire: Wire) -> list[dict[str, Any]]:
    """Return what the job's decoder makes of the records, at the time at which they were signed."""
    signed_ms = next(int(value or b"") for _, record in wire.sent for name, value in record.headers if name == SIGNED_AT)
    records = [
        {
            "source": int(topic == SETTINGS.op_topic),
            "partition": 0,
            "offset": offset,
            "at_ms": signed_ms,
            "timestamp_type": 1,
            "key": record.key,
            "headers": [{"key": name, "value": value} for name, value in record.headers],
            "value_bytes": len(record.value or b""),
            "value_sha256": sha256_of(record.value),
        }
        for offset, (topic, record) in enumerate(wire.sent)
    ]
    events: list[dict[str, Any]] = decode(pa.RecordBatch.from_pylist(records, schema=RECORD_SCHEMA), CONFIG).events.to_pylist()
    return events


@pytest.fixture(params=[False, True], ids=["", "in a trace"])
def _in_a_trace(request: pytest.FixtureRequest) -> Iterator[None]:
    """A trace adds headers to halves and ops, which are signed too."""
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "baggage": "tenant=blue"}
    token = context.attach(propagate.extract(headers if request.param else {}))
    yield
    context.detach(token)


@pytest.mark.usefixtures("_in_a_trace")
def test_halves_of_a_block_are_signed_and_its_ops_name_their_halves(wire: Wire, tmp_path: Path) -> None:
    producer = TransactionProducer(SETTINGS, "shop", SqlTransactions(lambda: sqlite3.connect(tmp_path / "shop.db")))
    with producer.transaction() as tx:
        tx.send("orders", b"apples")
        tx.send("invoices", b"pears")
    rows = rows_of(wire)
    assert [(row["event"], row["reason"]) for row in rows] == [(kind, None) for kind in [EventKind.HALF] * 2 + [EventKind.OP] * 2]
    halves, ops = ({row["transaction_id"]: row["binding"] for row in part} for part in (rows[:2], rows[2:]))
    assert halves == ops
    assert len(set(halves.values()) - {0}) == 2


@pytest.mark.parametrize("ahead", [-1, 1])
def test_a_half_that_the_job_would_refuse_for_its_time_commits_nothing(wire: Wire, tmp_path: Path, ahead: int) -> None:
    """Kafka acknowledges it. If the service committed, its message would never become readable."""
    producer = TransactionProducer(SETTINGS, "shop", SqlTransactions(lambda: sqlite3.connect(tmp_path / "shop.db")))
    wire.clock_ahead_ms = ahead * (SIGNED_WINDOW_MS + 10_000)
    refusal = r"is not valid \(Kafka stored it .* after it was signed, at most 300000\).* set the clocks"

    def order() -> None:
        with producer.transaction() as tx:
            tx.execute("CREATE TABLE orders (item TEXT)")
            tx.send("orders", b"apples")
            tx.send("orders", b"pears")

    with pytest.raises(SendError, match=refusal):
        order()
    assert [dict(record.headers).get("ACTION") for _, record in wire.sent] == [None, None, b"ROLLBACK", b"ROLLBACK"]
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        assert database.execute("SELECT 1 FROM sqlite_master WHERE name = 'orders'").fetchall() == []


@pytest.mark.parametrize("room", [3, 5])
def test_in_a_queue_that_stays_full_a_block_waits_for_one_half_and_one_op(wire: Wire, tmp_path: Path, room: int) -> None:
    """Each wait lasts `send_timeout_ms`, and before the rollback the block holds its locks."""
    producer = TransactionProducer(SETTINGS, "shop", SqlTransactions(lambda: sqlite3.connect(tmp_path / "shop.db")))
    wire.room = room

    def order() -> None:
        with producer.transaction() as tx:
            for item in range(4):
                tx.send("orders", b"%d" % item)

    if room < 4:
        with pytest.raises(QueueFullError):
            order()
    else:
        order()
    assert (len(wire.sent), wire.waits) == (room, 2 if room < 4 else 1), "a half, and one op"
