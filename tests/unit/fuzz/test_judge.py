"""The fuzzer's judge accepts the records of docs/contract.md, and names the reasons to refuse others (R14)."""

import pytest

from tests.fuzz.judge import HeaderList, Record, RecordKind, judge

HALF: HeaderList = [("REAL_TOPIC", b"orders"), ("PGROUP", b"g")]
OP: HeaderList = [("ACTION", b"COMMIT"), ("PGROUP", b"g")]
TICK: HeaderList = [("TICK", b"5"), ("PARTITIONS", b"2")]


def half(headers: HeaderList = HALF, key: bytes | None = b"a", value: bytes | None = b"") -> Record:
    return Record(True, 1, key, value, headers, 0)


def op(headers: HeaderList = OP, key: bytes | None = b"a", value: bytes | None = None) -> Record:
    return Record(False, 1, key, value, headers, 0)


CASES: list[tuple[str, Record, RecordKind, set[str]]] = [
    ("half", half(), RecordKind.HALF, set()),
    ("half-with-a-null-property", half([*HALF, ("own", None), ("own", b"x")]), RecordKind.HALF, set()),
    ("half-at-the-limits", half([*HALF, ("REAL_QID", b"-2147483648"), ("TAGS", b"")], b"k" * 255, b"x" * 10), RecordKind.HALF, set()),
    ("half-body", half(value=b"x" * 11), RecordKind.HALF, {"body_too_large"}),
    ("half-without-a-header", half([]), RecordKind.HALF, {"missing_header"}),
    ("half-key", half(key=b"\xff" * 256), RecordKind.HALF, {"key_too_long", "key_not_utf8"}),
    ("half-delay", half([*HALF, ("DELAY", b"1")]), RecordKind.HALF, {"delay_not_supported"}),
    ("half-twice", half([*HALF, ("PGROUP", b"g")]), RecordKind.HALF, {"duplicate_header"}),
    ("half-twice-and-null", half([*HALF, ("PGROUP", None)]), RecordKind.HALF, {"duplicate_header", "bad_header"}),
    ("half-property", half([*HALF, ("own", b"\xff")]), RecordKind.HALF, {"bad_header"}),
    ("half-long-group", half([HALF[0], ("PGROUP", b"g" * 256)]), RecordKind.HALF, {"bad_header"}),
    ("half-large-headers", half([*HALF, ("own", b"x" * 32_767)]), RecordKind.HALF, {"headers_too_large"}),
    ("half-immunity", half([*HALF, ("CHECK_IMMUNITY_TIME_IN_SECONDS", b"0")]), RecordKind.HALF, {"bad_header"}),
    ("half-line-end", half([*HALF, ("INCARNATION", b"1\n")]), RecordKind.HALF, {"bad_header"}),
    ("op", op(), RecordKind.OP, set()),
    ("op-of-any-value", op([*OP, ("own", b"\xff")], value=b"x" * 99), RecordKind.OP, set()),
    ("op-empty-key", op(key=b""), RecordKind.OP, {"missing_key"}),
    ("op-action", op([("ACTION", b"commit"), ("PGROUP", b"g")]), RecordKind.OP, {"unknown_action"}),
    ("op-null-action", op([("ACTION", None), ("PGROUP", b"g")]), RecordKind.OP, {"bad_header"}),
    ("op-digits", op([*OP, ("CHECK_TIMES", "٣".encode())]), RecordKind.OP, {"bad_header"}),
    ("tick", half(TICK, None, b'{"absent_groups": ["g"]}'), RecordKind.TICK, set()),
    ("tick-key", half(TICK), RecordKind.TICK, {"bad_tick"}),
    ("tick-twice", half([*TICK, ("TICK", b"5")], None), RecordKind.TICK, {"bad_tick"}),
    ("tick-partitions", half([("TICK", b"5"), ("PARTITIONS", b"1")], None), RecordKind.TICK, {"bad_tick"}),
    ("tick-clock", half([("TICK", b"300001"), ("PARTITIONS", b"2")], None), RecordKind.TICK, {"bad_tick"}),
    ("tick-asked", half(TICK, None, b'{"asked_ms": -5}'), RecordKind.TICK, {"bad_tick"}),
    ("tick-json", half(TICK, None, b'{"absent_groups": "g"}'), RecordKind.TICK, {"bad_tick"}),
    ("notice", half([("HALF_LOST", b"1:2")]), RecordKind.NOTICE, set()),
    ("notice-null", half([("HALF_LOST", None)]), RecordKind.NOTICE, {"bad_header"}),
]


@pytest.mark.parametrize(("record", "kind", "reasons"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_record_is_judged_by_the_contract(record: Record, kind: RecordKind, reasons: set[str]) -> None:
    judgement = judge(record, max_body_bytes=10)
    assert (judgement.kind, set(judgement.reasons)) == (kind, reasons)
