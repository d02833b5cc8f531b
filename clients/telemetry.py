"""Spans, metrics and W3C trace context of the client, if OpenTelemetry is installed (`halfway[otel]`).

Names and attributes are those of OpenTelemetry's conventions for messaging. Without the package nothing is done.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any, NamedTuple

from halfway.clients.listener import Answer, hide_parameters
from halfway.clients.messages import HalfMessage
from halfway.schemas.headers import LocalTransactionState
from halfway.schemas.settings import KafkaSettings

log = logging.getLogger(__name__)

_SCOPE = "halfway"


class OpSpan(NamedTuple):
    """The span of an op: the headers that carry it, and what ends it, with the error if the op is not delivered."""

    headers: Mapping[str, Any]
    end: Callable[[object], None]


_NO_OP_SPAN = OpSpan({}, lambda _: None)


class Telemetry:
    """What a client reports of its work: nothing."""

    def headers(self) -> Mapping[str, str]:
        """Return the headers that carry the caller's span and baggage: `traceparent`, `tracestate`, `baggage`."""
        return {}

    def sending(self, destination: str) -> AbstractContextManager[None]:
        """Report a send, from its begin to its op: a span, its time, and its error."""
        del destination
        return nullcontext()

    def local_transaction(self) -> AbstractContextManager[None]:
        """Report a local transaction: a span."""
        return nullcontext()

    def check(self, message: HalfMessage) -> AbstractContextManager[None]:
        """Report the answering of a check: a span in the trace of its half."""
        del message
        return nullcontext()

    def answered(self, answer: Answer) -> None:
        """Count an answer to a check."""

    def op(self, message: HalfMessage, state: LocalTransactionState) -> OpSpan:
        """Begin the span of an op, in the caller's trace or else in that of its half."""
        del message, state
        return _NO_OP_SPAN


class OpenTelemetry(Telemetry):
    """Reports to OpenTelemetry.

    Args:
        settings: the names of the topics.
        group: the producer group, an attribute of spans and metrics.

    Raises:
        ModuleNotFoundError: OpenTelemetry is not installed.
    """

    def __init__(self, settings: KafkaSettings, group: str) -> None:
        """Get a tracer and a meter of the providers that the application has set, or sets later."""
        self._context: Any = import_module("opentelemetry.context")
        self._trace: Any = import_module("opentelemetry.trace")
        self._tracer = self._trace.get_tracer(_SCOPE)
        contexts = import_module("opentelemetry.trace.propagation.tracecontext").TraceContextTextMapPropagator()
        baggage = import_module("opentelemetry.baggage.propagation").W3CBaggagePropagator()
        self._propagators = (contexts, baggage)
        meter = import_module("opentelemetry.metrics").get_meter(_SCOPE)
        self._duration = meter.create_histogram("halfway.client.send.duration", "s", "Time of a send, from its begin to its queued op.")
        self._sent = meter.create_counter("halfway.client.sends", "{send}", "Sends, with error.type if they failed.")
        self._checks = meter.create_counter(
            "halfway.client.checks", "{check}", "Answers to checks, by state, with error.type if the look-up failed."
        )
        self._settings, self._group = settings, {"halfway.group": group}

    def headers(self) -> Mapping[str, str]:
        """Return the headers that carry the caller's span and baggage: `traceparent`, `tracestate`, `baggage`."""
        return self._headers_of(self._context.get_current())

    @contextmanager
    def sending(self, destination: str) -> Iterator[None]:
        """Report a send, from its begin to its op: a span, its time, and its error."""
        began_s, labels = time.perf_counter(), dict(self._group)
        try:
            with self._span(f"send {destination}", self._trace.SpanKind.PRODUCER, self._attributes("send", destination)):
                yield
        except BaseException as error:
            labels["error.type"] = type(error).__name__
            raise
        finally:
            with _failures_logged():
                self._sent.add(1, labels)
                self._duration.record(time.perf_counter() - began_s, labels)

    def local_transaction(self) -> AbstractContextManager[None]:
        """Report a local transaction: a span."""
        return self._span("local transaction", self._trace.SpanKind.INTERNAL, self._group)

    @contextmanager
    def check(self, message: HalfMessage) -> Iterator[None]:
        """Report the answering of a check: a span in the trace of its half."""
        token = self._context.attach(self._context_of(message))
        try:
            topic = self._settings.check_topic_of(message.producer_group)
            with self._span(f"process {topic}", self._trace.SpanKind.CONSUMER, self._attributes("process", topic)):
                yield
        finally:
            self._context.detach(token)

    def answered(self, answer: Answer) -> None:
        """Count an answer to a check."""
        labels = {**self._group, "halfway.state": str(answer.state)}
        if answer.error is not None:
            labels["error.type"] = type(answer.error).__name__
        with _failures_logged():
            self._checks.add(1, labels)

    def op(self, message: HalfMessage, state: LocalTransactionState) -> OpSpan:
        """Begin the span of an op, in the caller's trace or else in that of its half."""
        with _failures_logged():
            return self._op(message, state)
        return _NO_OP_SPAN

    def _op(self, message: HalfMessage, state: LocalTransactionState) -> OpSpan:
        is_in_a_trace = self._trace.get_current_span().get_span_context().is_valid
        context = self._context.get_current() if is_in_a_trace else self._context_of(message)
        span = self._tracer.start_span(
            f"send {self._settings.op_topic}",
            context,
            self._trace.SpanKind.PRODUCER,
            {**self._attributes("send", self._settings.op_topic), "halfway.state": str(state)},
        )

        def end(error: object) -> None:
            if error is not None:
                span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, str(error)))
            with _failures_logged():
                span.end()

        return OpSpan(self._headers_of(self._trace.set_span_in_context(span, context)), end)

    def _headers_of(self, context: Any) -> dict[str, str]:
        carrier: dict[str, str] = {}
        for propagator in self._propagators:
            propagator.inject(carrier, context)
        return carrier

    @contextmanager
    def _span(self, name: str, kind: Any, attributes: Mapping[str, str]) -> Iterator[None]:
        """Begin a span. Of an error it has the type alone: SQLAlchemy's text has the statement's parameters."""
        span = None
        with _failures_logged():
            span = self._tracer.start_span(name, None, kind, attributes)
        if span is None:
            yield
            return
        with self._trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
            try:
                yield
            except BaseException as error:
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, type(error).__name__))
                raise
            finally:
                with _failures_logged():
                    span.end()

    def _attributes(self, operation: str, destination: str) -> dict[str, str]:
        return {
            **self._group,
            "messaging.system": "kafka",
            "messaging.operation.name": operation,
            "messaging.operation.type": operation,
            "messaging.destination.name": destination,
        }

    def _context_of(self, message: HalfMessage) -> Any:
        """Return the context that a message carries."""
        context = None
        for propagator in self._propagators:
            context = propagator.extract(message.properties, context)
        return context


def telemetry_of(settings: KafkaSettings, group: str) -> Telemetry:
    """Return what reports to OpenTelemetry if that is installed, or else what does nothing."""
    try:
        return OpenTelemetry(settings, group)
    except ModuleNotFoundError:
        return Telemetry()


@contextmanager
def _failures_logged() -> Iterator[None]:
    """Log an error of the service's own processors. The local transaction may be committed, and its op not sent."""
    try:
        yield
    except Exception as error:
        # It may have come while an error of the block went through, which the traceback would show.
        hide_parameters(error)
        log.warning("event=telemetry_failed error=%s", type(error).__name__, exc_info=error)
