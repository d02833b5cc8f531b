"""Writes and reads ticks: the records in every partition that tell the job what time it is (decision 1)."""

import re
import time
from collections.abc import Collection, Iterable, Mapping

from confluent_kafka import OFFSET_END, Message

from halfway.pipelines.kafka.admin import Admin
from halfway.pipelines.kafka.range_reader import OffsetRange, offsets_since, ranges_consumer, read_ranges, retained
from halfway.pipelines.kafka.writer import RecordWriter
from halfway.schemas.headers import PARTITIONS, SIGNATURE, TICK, HeaderList
from halfway.schemas.records import headers_of
from halfway.schemas.settings import KafkaSettings
from halfway.schemas.signing import Keyring, Signable, sha256_of
from halfway.schemas.tick_value import TickValue

_TAIL = 500
_TAIL_MS = 10_000
"""How many of the last records, and those of how long, are searched for ticks. In an idle partition each is a tick."""
_READ_AT_MOST = 20_000
"""By a clock that is wrong, hours of records may be recent."""
_READ_LIMIT_S = 5.0
_ALIVE_S = 60.0
"""A job that hangs still ticks once a minute."""


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


def last_ticks(client: Admin, kafka: KafkaSettings) -> list[Message]:
    """Return the ticks near the end of partition 0 of the half topic.

    Raises:
        TopicError: the topic is missing.
        AccessError: this user may not describe it.
        KafkaUnavailableError: it cannot be read.
    """
    with ranges_consumer(kafka) as consumer:
        first, end = retained(consumer, client, kafka.half_topic)[0]
        recent_ms = time.time_ns() // 1_000_000 - _TAIL_MS
        since = offsets_since(consumer, kafka.half_topic, {0: recent_ms}, _READ_LIMIT_S)[0]
        # By a clock that is wrong, no record may be as recent.
        begin = min(end - _TAIL, end if since == OFFSET_END else since)
        tail = OffsetRange(max(first, begin, end - _READ_AT_MOST), end)
        return [record for record in read_ranges(consumer, kafka.half_topic, {0: tail}, _READ_LIMIT_S) if tick_ms(record) is not None]


def is_tick(record: Message) -> bool:
    """Return True if a record is a tick, whatever it tells. Verifies no signature."""
    return any(name == TICK for name, _ in headers_of(record) or ())


def tick_ms(record: Message) -> int | None:
    """Return the time that a tick tells; None if the record is no tick, or tells no number. Verifies no signature."""
    headers = dict(headers_of(record) or ())
    said = headers.get(TICK) or b""
    return int(said) if PARTITIONS in headers and re.fullmatch(rb"[0-9]{1,16}", said) else None


def other_jobs(ticks: Iterable[Message], ours: Collection[str | None]) -> list[str]:
    """Return what to say of each other job that has ticked within the last minute.

    Args:
        ticks: what `last_ticks` has returned.
        ours: the queries of this checkpoint and of the tables.
    """
    said = [(TickValue.parse(tick.value()) or TickValue(), tick.timestamp()[1]) for tick in ticks]
    ticked_ms = {value.job: at_ms for value, at_ms in said if value.job and value.job not in ours}
    ago_s = {job: max(0.0, time.time() - at_ms / 1000) for job, at_ms in ticked_ms.items()}
    return [
        f"a job of another checkpoint, with other tables (query {job[:40]}), ticked on these topics {ago:.0f} s ago: a job of this one "
        "beside it asks about every transaction too, and delivers each message a second time. Is this the right folder?"
        for job, ago in ago_s.items()
        if ago < _ALIVE_S
    ]
