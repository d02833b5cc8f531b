"""One transaction's story: what each kind of record and row is told as."""

from typing import Any

import pytest

from halfway.schemas.tables import Table
from halfway.transforms.views.story import Event, in_order, of_record, of_row


def record(topic: str, **header: str | None) -> dict[str, Any]:
    return {"at_ms": 7, "topic": topic, "partition": 1, "offset": 17, "body_bytes": 12, "header": header}


@pytest.mark.parametrize(
    ("topic", "header", "what", "detail"),
    [
        ("half", {"REAL_TOPIC": "orders", "PGROUP": "g", "own": "x"}, "half", "REAL_TOPIC=orders, PGROUP=g, 12 bytes"),
        ("half", {"HALF_LOST": "0:3"}, "half lost", "HALF_LOST=0:3, 12 bytes"),
        ("op", {"ACTION": "COMMIT", "PGROUP": "g", "INCARNATION": "1"}, "op COMMIT", "PGROUP=g, INCARNATION=1"),
        (
            "op",
            {"ACTION": "UNKNOWN", "PGROUP": "g", "FROM_CHECK": "true", "CHECK_TIMES": "2", "REMARK": "down"},
            "op UNKNOWN",
            "answers check 2, PGROUP=g, down",
        ),
        ("check", {"PGROUP": "g", "TRANSACTION_CHECK_TIMES": "2", "CHECK_ID": "a:1.17:2"}, "check 2", "CHECK_ID=a:1.17:2"),
    ],
)
def test_records(topic: str, header: dict[str, str | None], what: str, detail: str) -> None:
    assert of_record(record(topic, **header), "half", "op") == Event(7, what, detail, f"{topic} 1.17")


def test_a_record_without_headers_is_told_too() -> None:
    assert of_record({**record("op"), "header": None}, "half", "op") == Event(7, "op None", "", "op 1.17")


def test_rows() -> None:
    row = {"at_ms": 9, "topic": "orders", "check_times": 2, "incarnation": 1, "epoch": 2, "batch_id": 4}
    assert of_row(row, Table.MESSAGES) == Event(9, "delivered", "to orders, after 2 checks, incarnation 1", "messages, batch 2.4")
    assert of_row({**row, "reason": "check_max"}, Table.DISCARDED).detail == "check_max, to orders, after 2 checks, incarnation 1"
    source = {"source_topic": "op", "source_partition": 0, "source_offset": 3}
    refused = of_row({**row, **source, "reason": "late_verdict", "detail": "COMMIT"}, Table.QUARANTINE)
    assert refused == Event(9, "quarantined", "late_verdict: COMMIT (op 0.3)", "quarantine, batch 2.4")


def test_order_is_that_of_time_and_then_as_given() -> None:
    events = [Event(2, "b", "", ""), Event(1, "a", "", ""), Event(2, "c", "", "")]
    assert [event.what for event in in_order(events)] == ["a", "b", "c"]
