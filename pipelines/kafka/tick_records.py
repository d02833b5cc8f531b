"""Writes ticks: the records in every partition that tell the job what time it is (decision 1)."""

import time
from collections.abc import Mapping

from confluent_kafka import Message

from halfway.pipelines.kafka.writer import RecordWriter
from halfway.schemas.headers import PARTITIONS, SIGNATURE, TICK, HeaderList
from halfway.schemas.signing import Keyring, Signable, sha256_of


def write_ticks(writer: RecordWriter, partitions: Mapping[str, int], value: bytes | None = None, *, keyring: Keyring | None = None) -> int:
    """Write a tick to each partition, and wait until Kafka has them.

    Args:
        writer: writes the records.
        partitions: the number of partitions of each topic.
        value: what they say (`TickValue`); None where no job says anything.
        keyring: signs the ticks, with all that they say, if it has a key of the job.

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

    for topic, count in partitions.items():
        for partition in range(count):
            now_ms = time.time_ns() // 1_000_000
            headers: HeaderList = [(TICK, str(now_ms).encode()), (PARTITIONS, str(count).encode())]
            if keyring:
                signature = keyring.sign_as_job(Signable(topic, None, sha256_of(value), headers, partition))
                headers += [(SIGNATURE, signature.encode())] if signature else []
            writer.put(topic, None, value, headers, partition=partition, on_delivered=stamped)
    writer.flush()
    return ahead_ms
