"""Appends the halves of a replay to the half topic, each only if nobody else has sent it since the replay looked."""

import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, Message

from halfway.pipelines.kafka.range_reader import READ_UNCOMMITTED
from halfway.pipelines.kafka.topic_scan import TopicScan
from halfway.pipelines.kafka.writer import RecordWriter, verify_topic_writable
from halfway.pipelines.operate.earlier_replays import Candidates, Identity, higher_halves, ids_of
from halfway.pipelines.operate.next_halves import NextHalf
from halfway.schemas.errors import TopicError
from halfway.schemas.headers import SIGNATURE
from halfway.schemas.records import encode_key
from halfway.schemas.settings import KafkaSettings


class ReplayWriter:
    """Appends halves.

    A replay decides by what the half topic held when it began, and may have been frozen since then, for a week. So it
    looks at what has come meanwhile at the last moment.

    Args:
        kafka: where Kafka is, and its half topic.
        candidates: the messages to replay.
        looked: where each partition of the half topic ended when it was searched for them.
    """

    def __init__(self, kafka: KafkaSettings, candidates: Candidates, looked: Mapping[int, int]) -> None:
        """Make the producer.

        Raises:
            TopicError: the half topic does not exist.
            AccessError: this user may not write to it.
            KafkaUnavailableError: Kafka cannot be reached.
        """
        verify_topic_writable(kafka, kafka.half_topic)
        self._kafka = kafka
        self._candidates = dict(candidates)  # a copy: the halves' maker empties the caller's
        self._looked = looked
        self._writer = RecordWriter(kafka)
        self._ids = ids_of(candidates)
        self._last: AbstractSet[tuple[int | None, int | None]] = frozenset()
        """Where the halves of the last call are."""

    def append(self, halves: Sequence[NextHalf]) -> tuple[Mapping[Identity, int], AbstractSet[Identity]]:
        """Append halves, but those that somebody else has sent meanwhile.

        Returns:
            The halves in Kafka, each with how many ms the time of its signature is ahead of Kafka's, 0 without one; and
            all messages of which somebody else has sent one.

        Raises:
            RecordTooLargeError: the topic refuses a half.
            TopicError: the topic does not hold all that has come meanwhile. None of these halves was appended.
            AccessError: this user may not read or write it any more.
            KafkaUnavailableError: Kafka cannot be read, or does not accept a half.
        """
        stored: dict[Identity, int] = {}
        places: set[tuple[int | None, int | None]] = set()

        def note(identity: Identity, signed_ms: int | None, record: Message) -> None:
            kind, broker_ms = record.timestamp()
            # With CreateTime the job refuses a half by when it reads it.
            kafkas_ms = broker_ms if kind == TIMESTAMP_LOG_APPEND_TIME else max(broker_ms, _now_ms())
            stored[identity] = 0 if signed_ms is None else signed_ms - kafkas_ms
            places.add((record.partition(), record.offset()))

        # Signed before the look: if this process is frozen after that, the job refuses the halves.
        signed = [half.at(_now_ms()) for half in halves]
        meanwhile = self._sent_meanwhile()
        for half, (at_ms, headers) in zip(halves, signed, strict=True):
            if half.identity not in meanwhile:
                signed_ms = at_ms if any(name == SIGNATURE for name, _ in headers) else None
                key, report = encode_key(half.identity.transaction_id), partial(note, half.identity, signed_ms)
                self._writer.put(self._kafka.half_topic, key, half.body, headers, at_ms=at_ms, on_delivered=report)
        self._writer.flush()
        self._last = places
        return stored, meanwhile

    def _sent_meanwhile(self) -> AbstractSet[Identity]:
        """Return the messages that others have sent since this was last asked, also in transactions that are open."""
        topic = self._kafka.half_topic
        with TopicScan.open(self._kafka, topic, READ_UNCOMMITTED) as scan:
            for partition, (first, end) in scan.retained.items():
                if not first <= self._looked.get(partition, 0) <= end:
                    raise TopicError(
                        f"{topic} does not hold all that came while this command ran, perhaps of the same messages: Kafka has deleted it, "
                        "or a broker that was down does not have it yet: repeat this command"
                    )
            found = list(higher_halves(scan.beyond(self._looked), self._candidates, self._ids, self._kafka, {}))
            self._looked = scan.ends
        return {half.identity for half in found if (half.partition, half.offset) not in self._last}


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
