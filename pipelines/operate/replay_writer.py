"""Appends the halves of a replay to the half topic, each only if nobody else has sent it since the replay looked."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

from confluent_kafka import Message

from halfway.pipelines.kafka.range_reader import READ_UNCOMMITTED
from halfway.pipelines.kafka.topic_scan import TopicScan
from halfway.pipelines.kafka.writer import RecordWriter, verify_topic_writable
from halfway.pipelines.operate.earlier_replays import Candidates, Identity, higher_halves
from halfway.pipelines.operate.next_halves import NextHalf
from halfway.schemas.errors import TopicError
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
        self._candidates = dict(candidates)
        self._looked = looked
        self._writer = RecordWriter(kafka)
        self._own: set[tuple[int | None, int | None]] = set()

    def append(self, halves: Sequence[NextHalf]) -> tuple[Mapping[Identity, Message], AbstractSet[Identity]]:
        """Append halves, but those that somebody else has sent meanwhile.

        Returns:
            The halves in Kafka; and all messages of which somebody else has sent one.

        Raises:
            RecordTooLargeError: the topic refuses a half.
            TopicError: Kafka has deleted what has come meanwhile. Nothing was appended.
            KafkaUnavailableError: Kafka cannot be read, or does not accept a half.
        """
        stored: dict[Identity, Message] = {}
        meanwhile = self._sent_meanwhile()
        for half in halves:
            if half.identity not in meanwhile:
                key, report = encode_key(half.identity.transaction_id), partial(stored.__setitem__, half.identity)
                self._writer.put(self._kafka.half_topic, key, half.body, half.headers, at_ms=half.at_ms, on_delivered=report)
        self._writer.flush()
        self._own |= {(record.partition(), record.offset()) for record in stored.values()}
        return stored, meanwhile

    def _sent_meanwhile(self) -> AbstractSet[Identity]:
        """Return the messages that others have sent since this was last asked, also in transactions that are open."""
        topic = self._kafka.half_topic
        with TopicScan.open(self._kafka, topic, READ_UNCOMMITTED) as scan:
            for partition, (first, end) in scan.retained.items():
                if not first <= self._looked.get(partition, 0) <= end:
                    raise TopicError(
                        f"Kafka has deleted records of {topic} that came while this command ran, perhaps of the same messages: repeat it"
                    )
            found = list(higher_halves(scan.beyond(self._looked), self._candidates, self._kafka, {}))
            self._looked = scan.ends
        return {half.identity for half in found if (half.partition, half.offset) not in self._own}
