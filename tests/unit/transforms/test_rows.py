"""Outcomes and their records become rows of the contract's schemas. A half that is gone becomes no row."""

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from halfway.schemas import headers as h
from halfway.schemas.bookmark import Bookmark
from halfway.schemas.events import OUTCOME_SCHEMA, StoredRecord
from halfway.schemas.outcomes import Kind
from halfway.schemas.tables import DISCARDED_SCHEMA, MESSAGES_SCHEMA, QUARANTINE_SCHEMA
from halfway.transforms import rows as row_makers

HALF = StoredRecord(
    b"a",
    b"\x00\xff",
    [
        ("REAL_TOPIC", b"orders"),
        ("PGROUP", b"g"),
        ("REAL_QID", b"-7"),
        ("TAGS", b"TagA"),
        ("KEYS", b"k1 k2"),
        ("CHECK_IMMUNITY_TIME_IN_SECONDS", b"5"),
        ("BORN_TIMESTAMP", b"1000"),
        ("INCARNATION", b"2"),
        ("trace", b"first"),
        ("trace", b"last"),
        ("empty", None),
    ],
)
AT = Bookmark(2, 9)
BARE = StoredRecord(b"b", None, [("REAL_TOPIC", b"orders"), ("PGROUP", b"g")])


def outcomes(*transaction_ids: str, kind: Kind = Kind.COMMIT) -> pa.RecordBatch:
    rows = [
        {
            "kind": int(kind),
            "transaction_id": transaction_id,
            "source": 0,
            "partition": 3,
            "offset": number,
            "at_ms": 2000,
            "decided_ms": 3000,
            "producer_group": "g",
            "topic": "orders",
            "incarnation": 2,
            "check_times": 1,
            "reason": "check_max",
            "detail": "",
            "op_partition": 1,
            "op_offset": 70 + number,
        }
        for number, transaction_id in enumerate(transaction_ids)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=OUTCOME_SCHEMA)


def at(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def test_a_commit_becomes_a_message() -> None:
    rows = row_makers.messages_of(AT)(outcomes("a", "b"), [HALF, BARE])
    assert rows.schema == to_arrow_schema(MESSAGES_SCHEMA, timezone="UTC")
    first, second = rows.to_pylist()
    assert first == {
        "transaction_id": "a",
        "topic": "orders",
        "queue_id": -7,
        "tags": "TagA",
        "keys": "k1 k2",
        "body": b"\x00\xff",
        "properties": [("trace", "last"), ("empty", None)],
        "producer_group": "g",
        "born_at": at(1000),
        "half_at": at(2000),
        "committed_at": at(3000),
        "check_times": 1,
        "incarnation": 2,
        "half_partition": 3,
        "half_offset": 0,
        "op_partition": 1,
        "op_offset": 70,
        "epoch": 2,
        "batch_id": 9,
    }
    bare: dict[str, Any] = {"queue_id": 0, "tags": None, "keys": None, "body": b"", "properties": [], "born_at": at(2000)}
    assert {name: second[name] for name in bare} == bare


def test_a_discard_keeps_its_reason() -> None:
    rows = row_makers.discarded_of(AT)(outcomes("a", kind=Kind.DISCARD), [HALF])
    assert rows.schema == to_arrow_schema(DISCARDED_SCHEMA, timezone="UTC")
    assert (rows["reason"][0].as_py(), rows["discarded_at"][0].as_py()) == ("check_max", at(3000))


def test_a_check_is_the_half_with_its_number() -> None:
    forged = HALF._replace(headers=[*(HALF.headers or []), (h.CHECK_ID, b"forged"), (h.TRANSACTION_CHECK_TIMES, b"99")])
    expected = [*(HALF.headers or []), (h.TRANSACTION_CHECK_TIMES, b"1"), (h.CHECK_ID, b"a:3.0:1")]
    requests = row_makers.check_requests(outcomes("a", kind=Kind.CHECK), [forged], lambda group: f"checks of {group}")
    assert list(requests) == [("checks of g", HALF.key, HALF.value, expected)]


def test_a_refused_record_is_kept_whole() -> None:
    unreadable = StoredRecord(b"c", b"v", None)
    rows = row_makers.quarantine_of(AT, "half", "op")(outcomes("a", "b", "c", kind=Kind.QUARANTINE), [HALF, None, unreadable])
    assert rows.schema == to_arrow_schema(QUARANTINE_SCHEMA, timezone="UTC")
    whole, gone, no_headers = rows.to_pylist()
    assert (whole["source_topic"], whole["source_partition"], whole["source_offset"], whole["source_timestamp"]) == ("half", 3, 0, at(2000))
    assert [(header["key"], header["value"]) for header in whole["headers"]] == HALF.headers
    assert (gone["key"], gone["value"], gone["headers"], gone["source_offset"]) == (None, None, None, 1)
    assert (no_headers["key"], no_headers["headers"]) == (b"c", None)


def test_a_half_that_is_gone_makes_no_row_and_is_returned_as_lost() -> None:
    committed = outcomes("a", "b", "c")
    records = [HALF, None, BARE]
    for rows in (row_makers.messages_of(AT)(committed, records), row_makers.discarded_of(AT)(committed, records)):
        assert rows["transaction_id"].to_pylist() == ["a", "c"]
        assert rows["body"].to_pylist() == [b"\x00\xff", b""]
    assert [each[1:3] for each in row_makers.check_requests(committed, records, str)] == [(b"a", b"\x00\xff"), (b"b", b"")]
    lost = row_makers.lost(committed, records)
    assert lost.schema == OUTCOME_SCHEMA
    assert lost["transaction_id"].to_pylist() == ["b"]


def test_no_outcomes_make_no_rows() -> None:
    empty = outcomes()
    for make in (row_makers.messages_of(AT), row_makers.discarded_of(AT), row_makers.quarantine_of(AT, "half", "op")):
        assert make(empty, []).num_rows == 0
    assert list(row_makers.check_requests(empty, [], str)) == []
