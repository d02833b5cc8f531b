"""Benchmarks of services and job on the same cores: the rate that both keep up, and the latency below it."""

import resource
import time
from pathlib import Path

from confluent_kafka import Consumer, TopicPartition

from benchmarks.cpu import core_seconds
from benchmarks.live import quantiles
from benchmarks.rig import LONG_S, PARTITIONS, Figures, Rig, command_of_job, commits, count_rows, latencies_ms
from benchmarks.service import Client, produce
from halfway.pipelines.storage.missing_tables import OFFSETS
from halfway.pipelines.storage.state_reader import COMMITS, LocalFiles, ends_in
from halfway.schemas.settings import Settings
from tests.support.waiting import until


def steady(rig: Rig) -> Figures:
    """Measure with the client in Python: two services of 32 threads, 85 % commit, 10 % roll back, 5 % unanswered."""
    return _steady(rig, Client.PYTHON)


def steady_java(rig: Rig) -> Figures:
    """Measure with the example client in Java, as RocketMQ's benchmark does: one service of 32 threads, all commit."""
    return _steady(rig, Client.JAVA)


def _steady(rig: Rig, client: Client) -> Figures:
    """Measure the rate of services in a closed loop on the job's cores, for three minutes.

    Then measure the latency at 25, 50, 75 and 100 % of that rate.
    """
    settings, classes = rig.settings("steady"), rig.folder / "java"
    with command_of_job(settings, rig.folder / "steady.log") as job:

        def used_s() -> dict[str, float]:
            ended = resource.getrusage(resource.RUSAGE_CHILDREN)  # the services; job and broker are running
            return {"broker": core_seconds(rig.broker_pid), "client": ended.ru_utime + ended.ru_stime, "job": core_seconds(job.pid)}

        produce(client, settings.kafka, classes, rig.seconds(60))
        _wait_for_all(settings)
        rows, began_ms, began_s = count_rows(settings), time.time() * 1000, used_s()
        sent = produce(client, settings.kafka, classes, rig.seconds(180))
        _wait_for_all(settings)
        last_ms, ended_s = commits(settings)[-1][0], used_s()
        figures: Figures = {
            "sent_per_s": round(sent["transactions"] / sent["seconds"]),
            "tx_per_s": round(sent["transactions"] / (last_ms - began_ms) * 1000),
            "messages": count_rows(settings) - rows,
            "core_ms_per_tx": {name: round((ended_s[name] - began_s[name]) / sent["transactions"] * 1000, 4) for name in began_s},
            "latency_ms": {},
        }
        if client is Client.JAVA:
            figures["right"] = figures["messages"] == sent["transactions"]
        for share in (25, 50, 75, 100):
            began_ms = time.time() * 1000
            produce(client, settings.kafka, classes, rig.seconds(90), figures["tx_per_s"] * share / 100)
            _wait_for_all(settings)
            figures["latency_ms"][f"{share}%"] = quantiles(latencies_ms(settings, began_ms))
    return figures


def _wait_for_all(settings: Settings) -> None:
    """Wait until the job has read every record. Then the table holds every committed message."""
    files, sent = LocalFiles(Path(settings.storage.checkpoint)), _ends(settings)

    def is_read() -> bool:
        committed = files.batches(COMMITS)
        read = ends_in(files.text(f"{OFFSETS}/{committed[-1]}") or "") if committed else {}
        return all(read.get(topic, {}).get(partition, 0) >= end for (topic, partition), end in sent.items())

    until(is_read, "the last record", LONG_S)


def _ends(settings: Settings) -> dict[tuple[str, int], int]:
    with Consumer({"bootstrap.servers": settings.kafka.servers(), "group.id": "bench"}) as consumer:
        places = [(topic, partition) for topic in (settings.kafka.half_topic, settings.kafka.op_topic) for partition in range(PARTITIONS)]
        return {place: consumer.get_watermark_offsets(TopicPartition(*place), timeout=10)[1] for place in places}
