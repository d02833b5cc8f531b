"""Benchmark of the parts alone. No job on this machine is quicker than all of them one after the other."""

import statistics
import time
from collections.abc import Callable

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from benchmarks.load import Load
from benchmarks.rig import PARTITIONS, Figures, Rig
from halfway.pipelines.resolve.sources import source_options
from halfway.pipelines.storage.delta_tables import append_once, read_table
from halfway.schemas.settings import Settings
from halfway.schemas.tables import TABLE_SCHEMAS, Table

_RUNS = 5


def limits(rig: Rig) -> Figures:
    """Measure the seconds of each part for one full batch.

    The parts are Spark's Kafka source without a sink, a plain consumer, a Parquet write of the same rows, and an empty
    Delta append.
    """
    settings = rig.settings("limits")
    load = Load(settings.kafka)
    load.send(rig.amount(205_000))
    rig.drain(settings)
    rows = read_table(rig.spark, settings.storage, Table.MESSAGES).persist()
    rows.count()
    empty = rig.spark.createDataFrame([], TABLE_SCHEMAS[Table.DISCARDED])
    versions = iter(range(_RUNS + 1))
    seconds = {
        "source_s": _median(lambda: _read_all(rig, settings)),
        "consumer_s": _median(lambda: _consume(settings)),
        "parquet_s": _median(lambda: rows.write.mode("overwrite").parquet(f"{settings.storage.warehouse}/limits")),
        "append_s": _median(lambda: append_once(empty, settings.storage, Table.DISCARDED, "limits", next(versions))),
    }
    rows.unpersist()
    total = sum(seconds.values())
    rounded = {name: round(one, 3) for name, one in seconds.items()}
    return {**rounded, "sum_s": round(total, 3), "tx_per_s": round(load.sent.transactions / total)}


def _median(action: Callable[[], object]) -> float:
    took = []
    for _ in range(_RUNS + 1):
        began = time.monotonic()
        action()
        took.append(time.monotonic() - began)
    return statistics.median(took[1:])


def _read_all(rig: Rig, settings: Settings) -> None:
    rig.spark.read.format("kafka").options(**source_options(settings.kafka)).load().write.format("noop").mode("overwrite").save()


def _consume(settings: Settings) -> None:
    options = {"bootstrap.servers": settings.kafka.servers(), "group.id": "limits", "enable.partition.eof": True}
    with Consumer({**options, "auto.offset.reset": "earliest"}) as consumer:
        consumer.assign([TopicPartition(settings.kafka.half_topic, partition, 0) for partition in range(PARTITIONS)])
        ends = 0
        while ends < PARTITIONS:
            for error in filter(None, (record.error() for record in consumer.consume(4096, timeout=1))):
                if error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                ends += 1
