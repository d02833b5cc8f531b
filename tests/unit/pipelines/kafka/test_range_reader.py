"""The range reader tells deleted records from records that the broker does not report yet.

A real broker does not show such moments on demand, so a stand-in reports them.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import OFFSET_END, KafkaError, KafkaException, TopicPartition

from halfway.pipelines.kafka import range_reader
from halfway.schemas.errors import KafkaUnavailableError

UNKNOWN = KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
GONE = KafkaException(KafkaError(KafkaError._DESTROY_BROKER))
"""A broker was killed, and the others no longer name it."""
MOVED = KafkaException(KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION))
SILENT = KafkaException(KafkaError(KafkaError._TIMED_OUT))
"""A broker is frozen, and the client does not know yet that another one leads."""
UNCONNECTED = KafkaException(KafkaError(KafkaError._ALL_BROKERS_DOWN))
"""No connection was made in time, as on a machine that is busy (librdkafka #3528)."""
UNNAMED = KafkaException(KafkaError(KafkaError._RESOLVE))
"""Its container was stopped, and its name in the DNS with it."""
LEADERLESS = KafkaException(KafkaError(KafkaError._UNKNOWN_PARTITION))
"""None of the partitions that are asked about has a leader: librdkafka calls them unknown."""
REFUSED = KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))


class Record:
    """A record of a partition, or an error in its place."""

    def __init__(self, offset: int, error: int | None = None) -> None:
        self._offset, self._error = offset, error

    def offset(self) -> int:
        return self._offset

    def error(self) -> KafkaError | None:
        return None if self._error is None else KafkaError(self._error)


class Broker:
    """A consumer of a broker that holds the records from `low` to `end`.

    Each question for its end takes the next of `ends`, and the last one stays. An error answers either question.
    """

    def __init__(self, ends: list[Any], low: int = 0, end: int = 10) -> None:
        self._ends, self._low, self._end = ends, low, end
        self._position = self._reported = 0
        self.refuse_once: int | None = None

    def offsets_for_times(self, places: list[TopicPartition], timeout: float) -> list[Any]:
        assert timeout > 0
        [place] = places
        is_asked_for_end = place.offset == OFFSET_END
        said = self._ends[0]
        if len(self._ends) > 1 and (is_asked_for_end or isinstance(said, KafkaException)):
            self._ends.pop(0)
        if isinstance(said, KafkaException):
            raise said
        self._reported = said
        return [SimpleNamespace(partition=place.partition, offset=said if is_asked_for_end else self._low, error=None)]

    def list_topics(self, _: str, timeout: float) -> None:
        assert timeout > 0

    def assign(self, places: list[TopicPartition]) -> None:
        self._position = places[0].offset

    def unassign(self) -> None:
        self._position = 0

    def consume(self, count: int, timeout: float) -> list[Record]:
        assert timeout > 0
        if self.refuse_once is not None:
            code, self.refuse_once = self.refuse_once, None
            return [Record(self._position, code)]
        found = range(max(self._position, self._low), min(self._position + count, self._end, self._reported))
        self._position = found[-1] + 1 if found else self._position
        return [Record(offset) for offset in found] or [Record(self._reported, KafkaError._PARTITION_EOF)]


def read(broker: Any, *offsets: int, limit_s: float = 5.0) -> list[int | None]:
    with range_reader.PartitionReader(broker, "half", 0, limit_s) as reader:
        found = list(reader.records(offsets))
    return [None if record is None else record.offset() for record in found]


@pytest.mark.parametrize("ends", [[10], [3, 3, 10], [0, 10], [UNKNOWN, UNKNOWN, 10], [3, UNKNOWN, 10]], ids=str)
def test_a_record_read_before_is_waited_for_while_the_reported_end_is_too_small(ends: list[Any]) -> None:
    assert read(Broker(ends), 2, 5, 9) == [2, 5, 9]


@pytest.mark.parametrize("ends", [[GONE, 10], [3, GONE, MOVED, 10], [SILENT, 10], [UNCONNECTED, 10], [UNNAMED, 10]], ids=str)
def test_a_leader_that_died_or_moved_is_waited_for(ends: list[Any]) -> None:
    assert read(Broker(ends), 2, 5, 9) == [2, 5, 9]
    broker = Broker([10])
    broker.refuse_once = KafkaError._DESTROY_BROKER
    assert read(broker, 5) == [5]


@pytest.mark.parametrize(("answer", "limit_s"), [(GONE, 0.3), (REFUSED, 60.0)], ids=["no leader in time", "no right"])
def test_what_waiting_does_not_help_is_an_error(answer: KafkaException, limit_s: float) -> None:
    with pytest.raises(KafkaUnavailableError, match="cannot read half"):
        read(Broker([answer]), 5, limit_s=limit_s)


@pytest.mark.parametrize(("told_at_s", "limit_s"), [(50.0, 60.0), (0.0, 0.5)])
def test_the_beginning_and_the_end_have_one_limit(monkeypatch: pytest.MonkeyPatch, told_at_s: float, limit_s: float) -> None:
    """A leader that tells the beginning at some time, and then not the end."""
    now_s = 0.0

    def pass_by(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    class LateLeader(Broker):
        def offsets_for_times(self, places: list[TopicPartition], timeout: float) -> list[Any]:
            if now_s < told_at_s or places[0].offset == OFFSET_END:
                raise GONE
            return super().offsets_for_times(places, timeout)

    monkeypatch.setattr(range_reader, "monotonic", lambda: now_s)
    monkeypatch.setattr(range_reader, "sleep", pass_by)
    with pytest.raises(KafkaUnavailableError, match="cannot read half"):
        read(LateLeader([10]), 5, limit_s=limit_s)
    assert limit_s <= now_s < limit_s + 0.3


def test_the_retained_offsets_are_asked_again_after_a_leader_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_reader, "partition_counts", lambda *_: {"half": 1})
    consumer: Any = Broker([GONE, 10], low=3)
    client: Any = None
    assert range_reader.retained(consumer, client, "half") == {0: (3, 10)}


def test_an_offset_before_the_first_one_is_deleted() -> None:
    assert read(Broker([10], low=5), 2, 4, 5) == [None, None, 5]


def test_every_offset_of_an_emptied_partition_is_deleted() -> None:
    assert read(Broker([10], low=10), 2, 9) == [None, None]


def test_the_ends_are_asked_again_after_an_offset_out_of_range() -> None:
    broker = Broker([10, 3, 10])
    broker.refuse_once = KafkaError.OFFSET_OUT_OF_RANGE
    assert read(broker, 5) == [5]
    gone = Broker([10], low=6)
    gone.refuse_once = KafkaError._AUTO_OFFSET_RESET
    assert read(gone, 5, 7) == [None, 7]


@pytest.mark.parametrize(
    ("said", "cause"),
    [(3, "5 was read from there before"), (UNKNOWN, "cannot read half: Broker: Unknown topic")],
    ids=["an end that stays behind", "no topic"],
)
def test_an_end_that_stays_too_small_is_an_error_and_no_deletion(said: Any, cause: str) -> None:
    with pytest.raises(KafkaUnavailableError, match=cause):
        read(Broker([said]), 5, limit_s=0.3)


def ranged(broker: Any, first: int, end: int) -> list[int | None]:
    with range_reader.PartitionReader(broker, "half", 0) as reader:
        return [record.offset() for record in reader.range(first, end)]


def test_a_range_is_read_up_to_its_end() -> None:
    assert ranged(Broker([10]), 3, 7) == [3, 4, 5, 6]


def test_a_range_begins_no_earlier_than_the_partition() -> None:
    assert ranged(Broker([10], low=5), 3, 7) == [5, 6]


def test_a_range_goes_on_behind_records_that_retention_deletes_meanwhile() -> None:
    broker = Broker([10], low=5)
    broker.refuse_once = KafkaError._AUTO_OFFSET_RESET
    assert ranged(broker, 5, 8) == [5, 6, 7]


@pytest.mark.parametrize("ends", [[4, 4, 10], [4, UNKNOWN, 10]], ids=str)
def test_a_range_is_not_taken_for_read_while_the_broker_reports_too_low_an_end(ends: list[Any]) -> None:
    assert ranged(Broker(ends), 0, 10) == list(range(10))


def test_a_range_whose_last_offsets_hold_no_records_ends() -> None:
    """The marker of a Kafka transaction takes an offset."""
    assert ranged(Broker([10], end=8), 5, 10) == [5, 6, 7]


class LookUps:
    """A consumer whose look-ups of offsets by time are answered one after the other."""

    def __init__(self, *answers: KafkaError | Exception | None) -> None:
        self.answers = list(answers)

    def offsets_for_times(self, *_: object, **__: object) -> list[Any]:
        """Answer for two partitions. librdkafka reports some errors in the partition's place alone, with OFFSET_END."""
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        second = SimpleNamespace(partition=1, offset=OFFSET_END, error=answer)
        return [SimpleNamespace(partition=0, offset=5, error=None), second]

    def list_topics(self, *_: object, **__: object) -> None:
        """Do nothing."""


@pytest.mark.parametrize("answer", [MOVED, MOVED.args[0], LEADERLESS])
def test_a_look_up_waits_for_a_partition_whose_leader_has_moved(answer: KafkaError | Exception) -> None:
    consumer: Any = LookUps(answer, None)
    assert range_reader.offsets_since(consumer, "half", {0: 1_000, 1: 1_000}) == {0: 5, 1: OFFSET_END}


@pytest.mark.parametrize(("answer", "where"), [(MOVED, ""), (MOVED.args[0], "partition 1: ")])
def test_a_partition_whose_look_up_fails_is_not_left_out(answer: KafkaError | Exception, where: str) -> None:
    consumer: Any = LookUps(answer)
    with pytest.raises(KafkaUnavailableError, match=rf"cannot read half: {where}Broker: .*leader"):
        range_reader.offsets_since(consumer, "half", {0: 1_000, 1: 1_000}, limit_s=0.3)


def test_a_look_up_that_is_refused_is_not_repeated() -> None:
    consumer: Any = LookUps(REFUSED, None)
    with pytest.raises(KafkaUnavailableError, match=r"cannot read half: .*authorization"):
        range_reader.offsets_since(consumer, "half", {0: 1_000})
