"""Benchmark of the relay: messages a second from a backlog, a start from a bookmark, and the latency to a consumer."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from confluent_kafka import Consumer
from confluent_kafka.admin import NewTopic

from benchmarks.live import quantiles
from benchmarks.load import Load
from benchmarks.rig import LONG_S, PARTITIONS, ROOT, Figures, Rig, count_rows, latencies_ms, options_of
from halfway.pipelines.kafka.admin import admin_client
from halfway.pipelines.kafka.topic_setup import create_relay_topic
from halfway.pipelines.local.processes import end_process
from halfway.pipelines.relay.relay import Begin, Relay
from halfway.schemas.settings import Settings
from tests.support.commands import as_options
from tests.support.waiting import until

_TOPIC = "orders0"
"""What the load names."""
_WARM_UP_S = 120
_STOP_S = 60.0


def relay(rig: Rig) -> Figures:
    """Relay a backlog, start again from the bookmark, and measure the latency at 500 transactions/s.

    The latency is the time from a half's record timestamp to a consumer of the real topic, with `read_committed`;
    `readable` is that from the same half to the Delta commit that makes its message readable.
    """
    return {"backlog": _backlog(rig), "latency": _latency(rig)}


def _backlog(rig: Rig) -> Figures:
    settings = _with_topics(rig, "relayed")
    Load(settings.kafka).send(rig.amount(200_000))
    rig.drain(settings)
    started = time.monotonic()
    first = Relay(settings, Begin(None))
    first.run(available_now=True)
    seconds, started = time.monotonic() - started, time.monotonic()
    Relay(settings).run(available_now=True)
    return {
        "messages": first.report.relayed,
        "right": first.report.relayed == count_rows(settings),
        "seconds": round(seconds, 1),
        "messages_per_s": round(first.report.relayed / seconds),
        "start_from_bookmark_s": round(time.monotonic() - started, 2),
    }


def _latency(rig: Rig) -> Figures:
    settings = _with_topics(rig, "relay")
    with rig.job(settings), _command(rig, settings), _Arrivals(settings) as arrivals:
        Load(settings.kafka, seed=2).send_paced(rig.seconds(_WARM_UP_S))
        warm_ms = time.time() * 1000
        load = Load(settings.kafka, seed=3)
        load.send_paced(rig.seconds(60))
        until(lambda: len(arrivals.since(warm_ms)) >= load.sent.committed, "every message", LONG_S)
    relayed, readable = quantiles(arrivals.since(warm_ms)), quantiles(latencies_ms(settings, warm_ms))
    return {"relayed": relayed, "readable": readable, "p50_above_ms": relayed["p50"] - readable["p50"]}


def _with_topics(rig: Rig, name: str) -> Settings:
    """Return settings with new topics and tables, and one real topic for this run alone."""
    settings = rig.settings(name)
    topic = f"{settings.kafka.half_topic}-real"
    client = admin_client(settings.kafka)
    client.create_topics([NewTopic(topic, num_partitions=PARTITIONS, replication_factor=1)])[topic].result()
    kafka = settings.kafka.model_copy(update={"relay_topic": f"{settings.kafka.half_topic}-relay"})
    relayed = settings.relay.model_copy(update={"topics": {_TOPIC: topic}, "name": topic})
    settings = settings.model_copy(update={"kafka": kafka, "relay": relayed})
    create_relay_topic(settings)
    return settings


class _Arrivals:
    """A consumer of the real topic in a thread, and the latency of each record: from its half to here, in ms."""

    def __init__(self, settings: Settings) -> None:
        self._seen: list[tuple[int, float]] = []
        self._ended = threading.Event()
        options = {"bootstrap.servers": settings.kafka.servers(), "group.id": "shop", "auto.offset.reset": "earliest"}
        self._consumer = Consumer({**options, "isolation.level": "read_committed", "fetch.wait.max.ms": 20})
        self._consumer.subscribe(list(settings.relay.topics.values()))
        self._thread = threading.Thread(target=self._run, daemon=True)

    def since(self, half_ms: float) -> list[float]:
        """Return the latencies of messages whose half has at least this timestamp."""
        return [at_ms - born_ms for born_ms, at_ms in list(self._seen) if born_ms >= half_ms]

    def _run(self) -> None:
        while not self._ended.is_set():
            for record in self._consumer.consume(500, timeout=0.05):
                if record.error() is None:
                    # The load leaves it out, so that it is the half's timestamp.
                    self._seen.append((int(dict(record.headers() or [])["BORN_TIMESTAMP"] or 0), time.time() * 1000))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._consumer.close()


@contextmanager
def _command(rig: Rig, settings: Settings) -> Iterator[None]:
    """Run `halfway relay` as a user starts it."""
    relayed = settings.relay
    own = {"kafka.relay_topic": settings.kafka.relay_topic, "relay.name": relayed.name}
    own["relay.topics"] = f'{{"{_TOPIC}": "{relayed.topics[_TOPIC]}"}}'
    options = [*options_of(settings), *as_options(own)]
    with (rig.folder / "relay.log").open("wb") as log:
        command = [sys.executable, "-m", "halfway", "relay", "--begin", "earliest", *options]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield
        if process.poll() is not None:
            raise RuntimeError(f"the relay ended: {(rig.folder / 'relay.log').read_text()[-1000:]}")
    finally:
        end_process(process.pid, process, _STOP_S)
