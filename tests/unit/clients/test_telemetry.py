"""One trace from an HTTP request to a consumer's span, through half, op, check and message; the client's metrics."""

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy
from fastapi import FastAPI, Request
from opentelemetry import baggage, context, metrics, propagate, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.testclient import TestClient

from halfway import CheckRequest, KafkaSettings, LocalTransactionState, SqlTransactions
from halfway.clients.telemetry import OpenTelemetry
from halfway.schemas.headers import Source
from halfway.schemas.records import Record
from halfway.testing import InMemoryHalfway, in_memory_halfway
from tests.support.client_world import Listener, fail

ADA = "ada@example.com"
CALLER = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "baggage": "tenant=blue"}
TRACE = 0x0AF7651916CD43DD8448EB211C80319C


class Reported:
    """What was reported in one test."""

    def __init__(self, spans: InMemorySpanExporter, metrics_reader: InMemoryMetricReader) -> None:
        self._spans, self._reader = spans, metrics_reader

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self._spans.get_finished_spans()}

    def points(self, name: str) -> list[Any]:
        data = self._reader.get_metrics_data()
        assert data is not None
        found = [metric for of in data.resource_metrics for scope in of.scope_metrics for metric in scope.metrics if metric.name == name]
        return [point for metric in found for point in metric.data.data_points]


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reported]:
    """Providers that keep what is reported. OpenTelemetry sets them once in a process, so the test puts them in."""
    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers, meters = TracerProvider(), MeterProvider([reader])
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(trace, "get_tracer", tracers.get_tracer)
    monkeypatch.setattr(metrics, "get_meter", meters.get_meter)
    yield Reported(spans, reader)
    tracers.shutdown()
    meters.shutdown()


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, bytes | None]]:
    """The headers of the ops that are sent."""
    found: list[dict[str, bytes | None]] = []
    append = InMemoryHalfway.append

    def noting(world: InMemoryHalfway, source: Source, record: Record) -> int:
        if source is Source.OP:
            found.append(dict(record.headers))
        return append(world, source, record)

    monkeypatch.setattr(InMemoryHalfway, "append", noting)
    return found


def shop_of(producer: Any) -> FastAPI:
    """A service that takes the caller's trace, as OpenTelemetry's instrumentation of FastAPI does."""
    app = FastAPI()

    @app.post("/orders")
    def place(request: Request) -> str:
        token = context.attach(propagate.extract(dict(request.headers)))
        with trace.get_tracer("shop").start_as_current_span("POST /orders"), producer.transaction() as tx:
            tx.send("orders", b"apples", properties={"colour": "red"})
        context.detach(token)
        return str(tx.transaction_id)

    return app


@pytest.mark.parametrize("crashes", [False, True], ids=["op", "check"])
def test_one_trace_leads_from_the_request_to_the_consumer(
    reported: Reported, ops: list[dict[str, bytes | None]], tmp_path: Path, *, crashes: bool
) -> None:
    def connect() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "shop.db", check_same_thread=False)

    with in_memory_halfway() as halfway:
        producer = halfway.producer(SqlTransactions(connect))
        if crashes:
            halfway.crash(producer)
        assert TestClient(shop_of(producer)).post("/orders", headers=CALLER).status_code == 200
        if crashes:
            halfway.producer(SqlTransactions(connect))
            halfway.advance("40s")
        [message] = halfway.messages("orders")
    found = {name: value for name, value in message.properties.items() if value is not None}
    assert (found["colour"], found["baggage"]) == ("red", "tenant=blue")
    carried = propagate.extract(found)
    assert baggage.get_baggage("tenant", carried) == "blue"
    with trace.get_tracer("consumer").start_as_current_span("process orders", carried):
        pass
    spans = reported.spans()
    names = {"POST /orders", "send transaction", "local transaction", "send transactions.op", "process orders"}
    assert spans.keys() == names | ({"process transactions.check"} if crashes else set())
    assert {span.context.trace_id for span in spans.values() if span.context} == {TRACE}
    by_id = {span.context.span_id: name for name, span in spans.items() if span.context}
    parents = {name: by_id.get(span.parent.span_id) for name, span in spans.items() if span.parent}
    assert parents["send transaction"] == "POST /orders"
    assert parents["local transaction"] == "send transaction"
    assert parents["process orders"] == "local transaction", "the message was added in the block"
    assert all(f"{TRACE:032x}" in str(op["traceparent"]) and op["baggage"] == b"tenant=blue" for op in ops)
    assert len(ops) == 1
    attributes = spans["send transactions.op"].attributes
    assert attributes is not None
    assert (attributes["messaging.system"], attributes["messaging.destination.name"]) == ("kafka", "transactions.op")


@pytest.mark.parametrize("kind", ["block", "listener", "task group"])
def test_an_error_has_its_type_alone(reported: Reported, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """The text of SQLAlchemy's errors has the parameters of the statement, in spans and in the log."""
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")

    def insert_twice(*_: object) -> None:
        with engine.begin() as connection:
            connection.execute(sqlalchemy.text("CREATE TABLE people (mail TEXT UNIQUE)"))
            try:
                for _ in range(2):
                    connection.execute(sqlalchemy.text("INSERT INTO people VALUES (:mail)"), {"mail": ADA})
            except sqlalchemy.exc.IntegrityError as error:
                if kind == "task group":
                    raise ExceptionGroup("tasks", [error]) from None
                raise ZeroDivisionError from error

    with in_memory_halfway() as halfway:
        if kind == "block":
            with pytest.raises(ZeroDivisionError), halfway.producer(SqlTransactions(engine)).transaction():
                insert_twice()
        else:
            halfway.producer(Listener(insert_twice)).send_in_transaction("orders", b"apples")
            assert "event=listener_gave_no_answer" in caplog.text
            assert "UNIQUE constraint failed" in caplog.text, "the driver's own text says what was wrong"
    spans = reported.spans()
    if kind == "block":
        assert {(span.attributes or {})["error.type"] for span in spans.values()} == {"ZeroDivisionError"}
        assert {span.status.description for span in spans.values()} == {"ZeroDivisionError"}
    assert ADA not in caplog.text + "".join(span.to_json() for span in spans.values())
    engine.dispose()


def test_the_span_of_a_check_names_the_topic_of_its_group(reported: Reported) -> None:
    settings = KafkaSettings(bootstrap_servers="in-memory:1", check_topics={"shop": "shop.check"})
    request = CheckRequest(transaction_id="t", topic="orders", body=b"", producer_group="shop", check_times=1, check_id="t:0.0:1")
    with OpenTelemetry(settings, "shop").check(request):
        pass
    assert reported.spans().keys() == {"process shop.check"}


def test_sends_failures_times_and_answers_are_counted(reported: Reported) -> None:
    with in_memory_halfway() as halfway:
        producer = halfway.producer(Listener(lambda *_: None, fail), "shop")
        for _ in range(3):
            producer.send_in_transaction("orders", b"")
        with pytest.raises(ValueError, match="reserved"):
            producer.send_in_transaction("orders", b"", properties={"PGROUP": "x"})
        halfway.advance("7s")
    sends = {tuple(sorted(point.attributes.items())): point.value for point in reported.points("halfway.client.sends")}
    assert sends == {(("halfway.group", "shop"),): 3, (("error.type", "ValueError"), ("halfway.group", "shop")): 1}
    assert sum(point.count for point in reported.points("halfway.client.send.duration")) == 4
    [checks] = reported.points("halfway.client.checks")
    assert checks.value == 3
    assert checks.attributes == {"halfway.group": "shop", "halfway.state": LocalTransactionState.UNKNOWN, "error.type": "ValueError"}


def test_without_a_trace_the_records_are_those_of_the_contract(reported: Reported) -> None:
    del reported
    with in_memory_halfway() as halfway:
        halfway.producer(Listener()).send_in_transaction("orders", b"", properties={"traceparent": "the caller's own"})
        assert halfway.messages()[0].properties["traceparent"] == "the caller's own"


def test_a_service_without_opentelemetry_loads_none() -> None:
    code = """
import sys
sys.modules["opentelemetry"] = sys.modules["opentelemetry.trace"] = None
from halfway.testing import in_memory_halfway
from halfway.clients.telemetry import Telemetry
from tests.support.client_world import Listener
with in_memory_halfway() as halfway:
    producer = halfway.producer(Listener())
    producer.send_in_transaction("orders", b"")
    assert type(producer._records.telemetry) is Telemetry
    assert halfway.messages()[0].properties == {}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


class _FailingProcessor(SimpleSpanProcessor):
    """A service's own, which fails at each span."""

    def __init__(self, fails_at: str) -> None:
        super().__init__(InMemorySpanExporter())
        self._fails_at = fails_at

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        del span, parent_context
        self._fail("start")

    def on_end(self, span: Any) -> None:
        del span
        self._fail("end")

    def _fail(self, at: str) -> None:
        if at == self._fails_at:
            raise RuntimeError("no place left")


class _FailingInstrument:
    """A counter or a histogram whose views or exemplars fail."""

    def __init__(self, *_: object) -> None:
        """Take any name, unit and description."""

    def add(self, *_: object) -> None:
        raise RuntimeError("no place left")

    record = add


@pytest.fixture
def _failing_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = SimpleNamespace(create_counter=_FailingInstrument, create_histogram=_FailingInstrument)
    monkeypatch.setattr(metrics, "get_meter", lambda *_: meter)


@pytest.mark.usefixtures("_failing_meter")
def test_a_meter_that_fails_takes_nothing_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with in_memory_halfway() as halfway:
        connect = partial(sqlite3.connect, tmp_path / "shop.db", check_same_thread=False)
        with halfway.producer(SqlTransactions(connect)).transaction() as tx:
            tx.send("orders", b"apples")
        assert [message.body for message in halfway.messages()] == [b"apples"]
        producer = halfway.producer(Listener(lambda *_: LocalTransactionState.UNKNOWN), "asked")
        producer.send_in_transaction("orders", b"plums")
        halfway.advance("7s")
        assert [message.body for message in halfway.messages()][1:] == [b"plums"], "the check is answered"
    assert caplog.text.count("event=telemetry_failed") == len(("block", "send", "answer"))


@pytest.mark.usefixtures("_failing_meter")
def test_a_meter_that_fails_after_a_block_did_logs_no_parameters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    insert = sqlalchemy.text("INSERT INTO nowhere VALUES (:mail)")
    with in_memory_halfway() as halfway:
        producer = halfway.producer(SqlTransactions(sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")))
        with pytest.raises(sqlalchemy.exc.OperationalError), producer.transaction() as tx:
            tx.execute(insert, {"mail": ADA})
    assert "no such table: nowhere" in caplog.text
    assert ADA not in caplog.text


@pytest.mark.parametrize("fails_at", ["start", "end"])
def test_a_span_processor_that_fails_takes_nothing_back(
    fails_at: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracers = TracerProvider()
    tracers.add_span_processor(_FailingProcessor(fails_at))
    monkeypatch.setattr(trace, "get_tracer", tracers.get_tracer)

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "shop.db", check_same_thread=False)

    with in_memory_halfway() as halfway:
        with halfway.producer(SqlTransactions(connect)).transaction() as tx:
            tx.send("orders", b"apples")
            tx.send("orders", b"pears")
        assert [message.body for message in halfway.messages()] == [b"apples", b"pears"], "both COMMITs are sent"
        producer = halfway.producer(Listener(lambda *_: LocalTransactionState.UNKNOWN), "asked")
        producer.send_in_transaction("orders", b"plums")
        halfway.advance("7s")
        assert [message.body for message in halfway.messages()][2:] == [b"plums"], "the check is answered"
    tracers.shutdown()
    assert caplog.text.count("event=telemetry_failed") == len(("block", "in it", "ops", "ops", "send", "listener", "op", "check", "answer"))
