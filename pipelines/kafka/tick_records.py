"""Writes ticks: the records in every partition that tell the job what time it is (decision 1)."""

import json
import time
from collections.abc import Collection, Mapping

from confluent_kafka import Message

from halfway.pipelines.kafka.writer import RecordWriter
from halfway.schemas.headers import PARTITIONS, TICK, HeaderList


def write_ticks(writer: RecordWriter, partitions: Mapping[str, int], absent_groups: Collection[str] = ()) -> int:
    """Write a tick to each partition, and wait until Kafka has them.

    Args:
        writer: writes the records.
        partitions: the number of partitions of each topic.
        absent_groups: the producer groups that are away or behind (R15).

    Returns:
        How many ms the clock that stamps Kafka's records is ahead of this machine's, delivery included.

    Raises:
        KafkaUnavailableError: Kafka has not taken a tick.
        KafkaException: librdkafka refuses a tick, or has failed for good.
    """
    now_ms = ahead_ms = 0

    def stamped(tick: Message) -> None:
        nonlocal ahead_ms
        ahead_ms = tick.timestamp()[1] - now_ms

    value = json.dumps({"absent_groups": sorted(absent_groups)}).encode()
    for topic, count in partitions.items():
        for partition in range(count):
            now_ms = time.time_ns() // 1_000_000
            headers: HeaderList = [(TICK, str(now_ms).encode()), (PARTITIONS, str(count).encode())]
            writer.put(topic, None, value, headers, partition=partition, on_delivered=stamped)
    writer.flush()
    return ahead_ms
