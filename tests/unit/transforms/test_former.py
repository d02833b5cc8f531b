"""Records that former checkpoints have dealt with are recognised by their place and time, and marked."""

from typing import Any

import pyarrow as pa
import pytest

from halfway.schemas.events import EVENT_SCHEMA, FORMER_SCHEMA, EventKind
from halfway.schemas.headers import Source
from halfway.schemas.outcomes import Count
from halfway.transforms.former import FormerRecords

HALF, OP = int(Source.HALF), int(Source.OP)


def former(*rows: tuple[int, int, int, int, int], since_ms: int = 0) -> FormerRecords:
    """Return records from (source, partition, offset, at_ms, discarded_ms)."""
    columns = zip(*rows, strict=True) if rows else [()] * len(FORMER_SCHEMA)
    return FormerRecords.of(
        pa.table([list(column) for column in columns], schema=FORMER_SCHEMA), since_ms, {Source.HALF: {0: 5}, Source.OP: {0: 3}}
    )


def event(kind: EventKind, source: int, partition: int, offset: int, at_ms: int, **more: Any) -> dict[str, Any]:
    place = {"source": source, "partition": partition, "offset": offset, "at_ms": at_ms}
    return dict.fromkeys(EVENT_SCHEMA.names) | {"incarnation": 0, "immunity_ms": 0, "discarded_ms": 0, "event": int(kind)} | place | more


def marked(known: FormerRecords, *events: dict[str, Any]) -> list[tuple[EventKind, int, str | None]]:
    rows = known.mark(pa.RecordBatch.from_pylist(list(events), EVENT_SCHEMA))
    assert rows.schema == EVENT_SCHEMA
    return [(EventKind(row["event"]), row["discarded_ms"], row["reason"]) for row in rows.to_pylist()]


COUNTED, AGED_OUT = (EventKind.COUNTED, 0, str(Count.ADOPTED)), (EventKind.COUNTED, 0, str(Count.AGED_OUT))
UNTOUCHED = (EventKind.HALF, 0, None)


@pytest.mark.parametrize(
    ("offset", "at_ms", "expected"),
    [(7, 70, (EventKind.HALF, 500, None)), (6, 70, UNTOUCHED), (8, 70, UNTOUCHED), (7, 71, UNTOUCHED), (99, 70, UNTOUCHED)],
)
def test_a_discarded_half_is_known_by_offset_and_time(offset: int, at_ms: int, expected: tuple[EventKind, int, str | None]) -> None:
    known = former((HALF, 1, 7, 70, 500), (HALF, 1, 3, 30, 400), (HALF, 0, 7, 70, 300))
    assert marked(known, event(EventKind.HALF, HALF, 1, offset, at_ms)) == [expected]


def test_a_quarantined_record_of_any_kind_is_only_counted() -> None:
    known = former((HALF, 0, 1, 10, 0), (OP, 0, 1, 10, 0), (OP, 0, 2, 20, 0))
    events = [
        event(EventKind.HALF, HALF, 0, 1, 10),
        event(EventKind.OP, OP, 0, 1, 10),
        event(EventKind.BROKEN, OP, 0, 2, 20, reason="bad_header"),
        event(EventKind.HALF, HALF, 0, 2, 20),
    ]
    assert marked(known, *events) == [COUNTED, COUNTED, COUNTED, UNTOUCHED]


def test_a_discarded_half_that_breaks_the_present_limits_is_only_counted() -> None:
    broken = event(EventKind.BROKEN, HALF, 0, 1, 10, reason="body_too_large")
    assert marked(former((HALF, 0, 1, 10, 100)), broken) == [COUNTED]


def test_a_notice_of_a_lost_half_is_the_former_checkpoints_and_only_counted() -> None:
    """Its row is in the tables. If the half can be read again, as when its broker has come back, it is not lost."""
    events = [event(EventKind.LOST, HALF, 0, 4, 10), event(EventKind.LOST, HALF, 0, 5, 10), event(EventKind.LOST, HALF, 1, 4, 10)]
    assert marked(former(), *events) == [COUNTED, (EventKind.LOST, 0, None), (EventKind.LOST, 0, None)]


def test_of_two_records_of_one_offset_the_topic_has_the_later_one() -> None:
    known = former((HALF, 0, 1, 10, 100), (HALF, 0, 1, 90, 0))
    assert marked(known, event(EventKind.HALF, HALF, 0, 1, 90)) == [COUNTED]


def test_verdicts_from_before_the_first_half_are_only_counted() -> None:
    events = [event(EventKind.OP, OP, 0, 1, 99), event(EventKind.OP, OP, 0, 2, 100), event(EventKind.HALF, HALF, 0, 1, 99)]
    assert marked(former(since_ms=100), *events) == [AGED_OUT, (EventKind.OP, 0, None), UNTOUCHED]


@pytest.mark.parametrize(("partition", "offset", "is_old"), [(0, 2, True), (0, 3, False), (1, 0, False)])
def test_a_verdict_that_came_after_the_adoption_counts_whatever_its_clock_says(partition: int, offset: int, is_old: bool) -> None:
    """A broker that starts with a wrong clock, or a producer on a CreateTime topic, gives it a time of long ago."""
    told = marked(former(since_ms=100), event(EventKind.OP, OP, partition, offset, 5))
    assert told == [AGED_OUT if is_old else (EventKind.OP, 0, None)]


def test_no_events() -> None:
    assert marked(former((HALF, 0, 1, 10, 100), since_ms=5)) == []
