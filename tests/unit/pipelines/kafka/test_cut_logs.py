"""What a start concludes from the records that a long log has kept."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any, cast

import pytest
from confluent_kafka import OFFSET_END, TIMESTAMP_CREATE_TIME, Consumer

from halfway.pipelines.kafka import cut_logs
from halfway.pipelines.kafka.range_reader import OffsetRange
from halfway.schemas.headers import TICK
from halfway.schemas.settings import KafkaSettings


class Record:
    """A half with the time of its producer, or a tick."""

    def __init__(self, *, is_tick: bool) -> None:
        self._headers = [(TICK, b"1")] if is_tick else []

    def timestamp(self) -> tuple[int, int]:
        return TIMESTAMP_CREATE_TIME, 1

    def headers(self) -> list[tuple[str, bytes]]:
        return self._headers


@pytest.mark.parametrize(("ticks_from", "may_be"), [(100_000, True), (49_000, False), (0, False)])
def test_a_tick_before_the_last_one_that_was_read_proves_that_retention_has_not_deleted_that_one(
    monkeypatch: pytest.MonkeyPatch, ticks_from: int, may_be: bool
) -> None:
    """The log begins in a backlog without ticks, longer than what is searched."""

    def read(_consumer: object, _topic: str, ranges: Mapping[int, OffsetRange]) -> Iterator[Any]:
        return (Record(is_tick=offset >= ticks_from) for each in ranges.values() for offset in range(*each))

    monkeypatch.setattr(cut_logs, "read_ranges", read)
    assert cut_logs._may_be_deleted(cast(Consumer, None), "half", 0, OffsetRange(10, 50_000)) is may_be


def test_a_record_that_retention_deletes_while_a_start_looks_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start may wait for another log for a minute."""
    asked = iter([{0: OFFSET_END}, {0: 9}])
    monkeypatch.setattr(cut_logs, "ranges_consumer", lambda *_: nullcontext())
    monkeypatch.setattr(cut_logs, "retained", lambda *_: {0: OffsetRange(0, 9)})
    monkeypatch.setattr(cut_logs, "offsets_since", lambda *_: next(asked))
    monkeypatch.setattr(cut_logs, "read_ranges", lambda *_: iter(()))
    cut_logs.verify_not_cut(KafkaSettings(), cast(Any, None), {"half": {0: 9}}, {"half": {0: 1_000}})
    assert next(asked, None) is None
