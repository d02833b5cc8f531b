"""The models of the contract's records: what they accept, what they refuse and for which reason (R14), round trips."""

import uuid
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from halfway.schemas import headers as h
from halfway.schemas.headers import LocalTransactionState
from halfway.schemas.outcomes import Reason
from halfway.schemas.records import RESERVED_NAMES, CheckHeaders, HalfHeaders, OpHeaders, RecordError, decode_key, encode_key

HALF = {"REAL_TOPIC": b"orders", "PGROUP": b"shop"}
OP = {"ACTION": b"COMMIT", "PGROUP": b"shop"}
CHECK = {**HALF, "TRANSACTION_CHECK_TIMES": b"3", "CHECK_ID": b"t1:0.7:3"}

Pairs = list[tuple[str, bytes | None]]


def pairs(*parts: Mapping[str, bytes | None]) -> Pairs:
    return [pair for part in parts for pair in part.items()]


def without(headers: Mapping[str, bytes], name: str) -> dict[str, bytes]:
    return {key: value for key, value in headers.items() if key != name}


NUMBERS_NOT_READ = (b"", b" 1", b"1 ", b"+1", b"1.0", b"1_0", b"0x1", "١".encode(), b"one", b"9" * 20)
NUMBER_CASES = [
    (name, value)
    for name in (h.REAL_QID, h.CHECK_IMMUNITY_TIME_IN_SECONDS, h.BORN_TIMESTAMP, h.INCARNATION)
    for value in (None, *NUMBERS_NOT_READ)
]
RANGE_CASES = [
    (h.REAL_QID, b"2147483648"),
    (h.REAL_QID, b"-2147483649"),
    (h.CHECK_IMMUNITY_TIME_IN_SECONDS, b"0"),
    (h.CHECK_IMMUNITY_TIME_IN_SECONDS, b"-1"),
    (h.CHECK_IMMUNITY_TIME_IN_SECONDS, b"2147483648"),
    (h.BORN_TIMESTAMP, b"-1"),
    (h.BORN_TIMESTAMP, b"253402300800000"),
    (h.INCARNATION, b"-1"),
    (h.INCARNATION, b"1000000"),
]
BROKEN_HALVES: list[tuple[Pairs, Reason, str]] = [
    (pairs(without(HALF, "REAL_TOPIC")), Reason.MISSING_HEADER, "REAL_TOPIC"),
    (pairs(without(HALF, "PGROUP")), Reason.MISSING_HEADER, "PGROUP"),
    ([], Reason.MISSING_HEADER, "REAL_TOPIC"),
    (pairs(HALF, {"REAL_TOPIC": b""}), Reason.BAD_HEADER, "REAL_TOPIC"),
    (pairs(HALF, {"PGROUP": b""}), Reason.BAD_HEADER, "PGROUP"),
    (pairs(HALF, {"PGROUP": None}), Reason.BAD_HEADER, "PGROUP"),
    (pairs(HALF, {"REAL_TOPIC": b"\xff"}), Reason.BAD_HEADER, "REAL_TOPIC"),
    (pairs(HALF, {"TAGS": None}), Reason.BAD_HEADER, "TAGS"),
    (pairs(HALF, {"KEYS": b"\xc3"}), Reason.BAD_HEADER, "KEYS"),
    (pairs(HALF, {"colour": b"\xff"}), Reason.BAD_HEADER, "colour"),
    *((pairs(HALF, {name: "ö".encode() * 128}), Reason.BAD_HEADER, name) for name in ("REAL_TOPIC", "PGROUP")),
    (pairs(HALF, {"colour\ufffd": b"red"}), Reason.BAD_HEADER, "colour"),
    (pairs(HALF, {"REAL_QID\0x": b"red"}), Reason.BAD_HEADER, "REAL_QID"),
    (pairs(HALF, {"big": b"x" * h.MAX_HEADERS_BYTES}), Reason.HEADERS_TOO_LARGE, f"at most {h.MAX_HEADERS_BYTES}"),
    *((pairs(HALF, {name: value}), Reason.BAD_HEADER, name) for name, value in (*NUMBER_CASES, *RANGE_CASES)),
    *((pairs(HALF, {"TAGS": b"a", name: b"1"}, {name: b"1"}), Reason.DUPLICATE_HEADER, name) for name in (h.REAL_QID, h.BORN_TIMESTAMP)),
    (pairs(HALF, HALF), Reason.DUPLICATE_HEADER, "REAL_TOPIC"),
    *((pairs(HALF, {name: b"1"}), Reason.DELAY_NOT_SUPPORTED, name) for name in h.DELAY_HEADERS),
]


@pytest.mark.parametrize(("headers", "reason", "name"), BROKEN_HALVES)
def test_half_that_breaks_the_contract(headers: Pairs, reason: Reason, name: str) -> None:
    # A case overrides a header of HALF by a second one of the same name, so only the last one is passed on.
    last = headers if reason is Reason.DUPLICATE_HEADER else list(dict(headers).items())
    with pytest.raises(RecordError) as caught:
        HalfHeaders.from_headers(last)
    assert caught.value.reason is reason
    assert name in caught.value.detail


def test_half_with_required_headers_only() -> None:
    assert HalfHeaders.from_headers(pairs(HALF)) == HalfHeaders(
        real_topic="orders",
        producer_group="shop",
        queue_id=0,
        tags=None,
        keys=None,
        immunity_s=None,
        born_at_ms=None,
        incarnation=0,
        properties={},
    )


def test_half_with_all_headers_at_their_limits() -> None:
    headers = pairs(
        {
            "REAL_TOPIC": b"o" * 255,
            "PGROUP": "ö".encode() * 127 + b"o",
            "REAL_QID": b"-2147483648",
            "TAGS": b"",
            "KEYS": "größe".encode(),
            "CHECK_IMMUNITY_TIME_IN_SECONDS": b"2147483647",
            "BORN_TIMESTAMP": b"253402300799999",
            "INCARNATION": b"999999",
        },
    )
    half = HalfHeaders.from_headers(headers)
    assert (half.queue_id, half.tags, half.keys, half.immunity_s, half.born_at_ms, half.incarnation) == (
        -(2**31),
        "",
        "größe",
        2**31 - 1,
        253_402_300_799_999,
        999_999,
    )
    assert sorted(half.to_headers()) == sorted(headers)


def test_other_headers_are_properties_and_the_last_of_a_name_counts() -> None:
    half = HalfHeaders.from_headers([*pairs(HALF), ("colour", b"red"), ("ACTION", b"mine"), ("", b""), ("colour", b"blue")])
    assert half.properties == {"colour": "blue", "ACTION": "mine", "": ""}


def test_half_headers_are_written_in_full() -> None:
    half = HalfHeaders(real_topic="orders", producer_group="shop", immunity_s=5, properties={"colour": "red"})
    assert half.to_headers() == [
        ("REAL_TOPIC", b"orders"),
        ("PGROUP", b"shop"),
        ("REAL_QID", b"0"),
        ("CHECK_IMMUNITY_TIME_IN_SECONDS", b"5"),
        ("INCARNATION", b"0"),
        ("colour", b"red"),
    ]


def test_a_property_may_be_null() -> None:
    half = HalfHeaders.from_headers([*pairs(HALF), ("colour", None)])
    assert half.properties == {"colour": None}
    assert HalfHeaders.from_headers(half.to_headers()) == half


def test_headers_at_and_over_the_limit_of_their_bytes() -> None:
    room = h.MAX_HEADERS_BYTES - sum(len(name) + len(value) for name, value in HALF.items()) - len("p")
    for bytes_over in (0, 1):
        headers = [*pairs(HALF), ("p", b"x" * (room + bytes_over))]
        assert (read(HalfHeaders, headers) is None) == bool(bytes_over)
    OpHeaders(action=LocalTransactionState.COMMIT, producer_group="g", remark="x" * 32_000).to_headers()
    with pytest.raises(RecordError, match="headers_too_large"):
        OpHeaders(action=LocalTransactionState.COMMIT, producer_group="g", remark="x" * 32_767).to_headers()
    with pytest.raises(RecordError, match="headers_too_large"):
        HalfHeaders(real_topic="orders", producer_group="shop", properties={"p": "x" * room}).to_headers()


@pytest.mark.parametrize("name", [*h.HALF_HEADERS, *h.DELAY_HEADERS, h.TICK, "not\ufffdshown", "REAL_QID\0x"])
def test_property_with_a_name_of_the_contract_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        HalfHeaders(real_topic="orders", producer_group="shop", properties={name: "1"})


def test_all_names_of_the_contract_are_reserved() -> None:
    contract = {*h.HALF_HEADERS, *h.OP_HEADERS, *h.CHECK_HEADERS, *h.DELAY_HEADERS, h.TICK, h.PARTITIONS, h.HALF_LOST}
    assert contract <= RESERVED_NAMES


@pytest.mark.parametrize(
    ("headers", "reason", "name"),
    [
        (without(OP, "ACTION"), Reason.MISSING_HEADER, "ACTION"),
        (without(OP, "PGROUP"), Reason.MISSING_HEADER, "PGROUP"),
        ({**OP, "ACTION": b"commit"}, Reason.UNKNOWN_ACTION, "ACTION"),
        ({**OP, "ACTION": b""}, Reason.UNKNOWN_ACTION, "ACTION"),
        ({**OP, "ACTION": None}, Reason.BAD_HEADER, "ACTION"),
        ({**OP, "ACTION": b"\xff"}, Reason.BAD_HEADER, "ACTION"),
        ({**OP, "PGROUP": b""}, Reason.BAD_HEADER, "PGROUP"),
        ({**OP, "PGROUP": b"g" * 256}, Reason.BAD_HEADER, "PGROUP"),
        ({**OP, "INCARNATION": b"-1"}, Reason.BAD_HEADER, "INCARNATION"),
        ({**OP, "INCARNATION": b"1000000"}, Reason.BAD_HEADER, "INCARNATION"),
        ({**OP, "INCARNATION": b"x"}, Reason.BAD_HEADER, "INCARNATION"),
        ({**OP, "CHECK_TIMES": b"2147483648"}, Reason.BAD_HEADER, "CHECK_TIMES"),
        ({**OP, "ignored": b"x" * h.MAX_HEADERS_BYTES}, Reason.HEADERS_TOO_LARGE, "at most"),
        ({**OP, "REMARK": None}, Reason.BAD_HEADER, "REMARK"),
        ({**OP, "FROM_CHECK": None}, Reason.BAD_HEADER, "FROM_CHECK"),
    ],
)
def test_op_that_breaks_the_contract(headers: Mapping[str, bytes | None], reason: Reason, name: str) -> None:
    with pytest.raises(RecordError) as caught:
        OpHeaders.from_headers(pairs(headers))
    assert caught.value.reason is reason
    assert name in caught.value.detail


@pytest.mark.parametrize("name", h.OP_HEADERS)
def test_op_with_a_header_twice(name: str) -> None:
    once = {**OP, "INCARNATION": b"0", "FROM_CHECK": b"true", "CHECK_TIMES": b"1", "REMARK": b"", "HALF_SIGNATURE": b""}
    with pytest.raises(RecordError) as caught:
        OpHeaders.from_headers([*pairs(once), (name, once[name])])
    assert (caught.value.reason, caught.value.detail) == (Reason.DUPLICATE_HEADER, name)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        (b"COMMIT", LocalTransactionState.COMMIT),
        (b"ROLLBACK", LocalTransactionState.ROLLBACK),
        (b"UNKNOWN", LocalTransactionState.UNKNOWN),
        (b"UNKNOW", LocalTransactionState.UNKNOWN),
    ],
)
def test_op_actions(text: bytes, state: LocalTransactionState) -> None:
    assert OpHeaders.from_headers([*pairs(without(OP, "ACTION"), {"stray": b"\xff"}), ("ACTION", text)]).action is state


def test_op_headers_are_written_in_full() -> None:
    op = OpHeaders(action=LocalTransactionState.UNKNOWN, producer_group="shop", incarnation=2, from_check=True, check_times=4, remark="why")
    assert op.to_headers() == [
        ("ACTION", b"UNKNOWN"),
        ("PGROUP", b"shop"),
        ("INCARNATION", b"2"),
        ("FROM_CHECK", b"true"),
        ("CHECK_TIMES", b"4"),
        ("REMARK", b"why"),
    ]


@pytest.mark.parametrize(
    ("headers", "reason", "name"),
    [
        (without(CHECK, "TRANSACTION_CHECK_TIMES"), Reason.MISSING_HEADER, "TRANSACTION_CHECK_TIMES"),
        (without(CHECK, "CHECK_ID"), Reason.MISSING_HEADER, "CHECK_ID"),
        (without(CHECK, "PGROUP"), Reason.MISSING_HEADER, "PGROUP"),
        ({**CHECK, "TRANSACTION_CHECK_TIMES": b"0"}, Reason.BAD_HEADER, "TRANSACTION_CHECK_TIMES"),
        ({**CHECK, "TRANSACTION_CHECK_TIMES": None}, Reason.BAD_HEADER, "TRANSACTION_CHECK_TIMES"),
        ({**CHECK, "CHECK_ID": b""}, Reason.BAD_HEADER, "CHECK_ID"),
    ],
)
def test_check_that_breaks_the_contract(headers: Mapping[str, bytes | None], reason: Reason, name: str) -> None:
    with pytest.raises(RecordError) as caught:
        CheckHeaders.from_headers(pairs(headers))
    assert caught.value.reason is reason
    assert name in caught.value.detail


def test_check_headers_win_over_properties_of_the_same_name() -> None:
    check = CheckHeaders.from_headers([("CHECK_ID", b"a property"), *pairs(CHECK)])
    assert (check.check_id, check.check_times, check.half.properties) == ("t1:0.7:3", 3, {})


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (None, Reason.MISSING_KEY),
        (b"", Reason.MISSING_KEY),
        (b"a" * 256, Reason.KEY_TOO_LONG),
        ("ä".encode() * 128, Reason.KEY_TOO_LONG),
        (b"\xff", Reason.KEY_NOT_UTF8),
    ],
)
def test_key_that_breaks_the_contract(key: bytes | None, reason: Reason) -> None:
    with pytest.raises(RecordError) as caught:
        decode_key(key)
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("transaction_id", "reason"),
    [("", Reason.MISSING_KEY), ("ä" * 128, Reason.KEY_TOO_LONG), ("\ud800", Reason.KEY_NOT_UTF8)],
)
def test_transaction_id_that_cannot_be_a_key(transaction_id: str, reason: Reason) -> None:
    with pytest.raises(RecordError) as caught:
        encode_key(transaction_id)
    assert caught.value.reason is reason


def test_a_transaction_id_is_text() -> None:
    number: Any = uuid.uuid4()
    with pytest.raises(TypeError, match="a transaction id is a str, not a UUID"):
        encode_key(number)


@pytest.mark.parametrize("transaction_id", ["a", "a" * 255, "ä" * 127 + "a", "\0"])
def test_key_round_trip(transaction_id: str) -> None:
    assert decode_key(encode_key(transaction_id)) == transaction_id


def test_errors_do_not_repeat_values() -> None:
    for headers in ({**HALF, "REAL_QID": b"s3cret"}, {**HALF, "TICK": b"s3cret"}):
        with pytest.raises(RecordError) as caught:
            HalfHeaders.from_headers(pairs(headers))
        assert "s3cret" not in str(caught.value)
    with pytest.raises(ValidationError) as invalid:
        HalfHeaders(real_topic="orders", producer_group="shop", tags=["s3cret"])  # type: ignore[arg-type]
    assert "s3cret" not in str(invalid.value)


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
REQUIRED = TEXT.filter(bool)
NAME = REQUIRED.filter(lambda text: len(text.encode()) <= h.MAX_NAME_BYTES)
INCARNATION = st.integers(0, h.MAX_INCARNATION)
INT = st.integers(0, h.MAX_INT)
POSITIVE = st.integers(1, h.MAX_INT)
NOT_IN_A_HALF = {*h.HALF_HEADERS, *h.DELAY_HEADERS, *h.CHECK_HEADERS, h.TICK}
OWN_NAME = TEXT.filter(lambda name: name not in NOT_IN_A_HALF and not {"\ufffd", "\0"} & set(name))
HALVES = st.fixed_dictionaries(
    {
        "real_topic": NAME,
        "producer_group": NAME.filter(lambda name: "\0" not in name),
        "queue_id": st.integers(-h.MAX_INT - 1, h.MAX_INT),
        "tags": st.none() | TEXT,
        "keys": st.none() | TEXT,
        "immunity_s": st.none() | POSITIVE,
        "born_at_ms": st.none() | st.integers(0, h.MAX_TIMESTAMP_MS),
        "incarnation": INCARNATION,
        "properties": st.dictionaries(OWN_NAME, st.none() | TEXT),
    }
).map(HalfHeaders.model_validate)
OPS = st.fixed_dictionaries(
    {
        "action": st.sampled_from(LocalTransactionState),
        "producer_group": NAME.filter(lambda name: "\0" not in name),
        "incarnation": INCARNATION,
        "from_check": st.none() | st.booleans(),
        "check_times": st.none() | INT,
        "remark": st.none() | TEXT,
    }
).map(OpHeaders.model_validate)


@given(HALVES)
def test_half_round_trip(half: HalfHeaders) -> None:
    assert HalfHeaders.from_headers(half.to_headers()) == half


@given(OPS)
def test_op_round_trip(op: OpHeaders) -> None:
    assert OpHeaders.from_headers(op.to_headers()) == op


@given(HALVES, POSITIVE, REQUIRED)
def test_check_round_trip(half: HalfHeaders, check_times: int, check_id: str) -> None:
    check = CheckHeaders(half=half, check_times=check_times, check_id=check_id)
    assert CheckHeaders.from_headers(check.to_headers()) == check


NAMES = st.sampled_from(sorted(RESERVED_NAMES)) | st.text(max_size=3)
VALUES = st.none() | st.binary(max_size=6) | st.integers().map(lambda number: str(number).encode())


AnyModel = type[HalfHeaders] | type[OpHeaders] | type[CheckHeaders]


def read(model: AnyModel, headers: Pairs) -> HalfHeaders | OpHeaders | CheckHeaders | None:
    try:
        return model.from_headers(headers)
    except RecordError:
        return None


@pytest.mark.parametrize("model", [HalfHeaders, OpHeaders, CheckHeaders])
@given(st.lists(st.tuples(NAMES, VALUES)), st.sampled_from([{}, HALF, OP, CHECK]))
def test_any_headers_are_read_or_refused_with_a_reason(model: AnyModel, headers: Pairs, valid: dict[str, bytes]) -> None:
    found = read(model, [*headers, *pairs(valid)])
    if found is not None:
        assert model.from_headers(found.to_headers()) == found


@pytest.mark.parametrize("model", [HalfHeaders, OpHeaders])
def test_a_group_with_a_nul_is_refused(model: type[HalfHeaders | OpHeaders]) -> None:
    """librdkafka would join `txn-check-shop` for it, and take the checks of the group `shop`."""
    headers = [(h.REAL_TOPIC, b"orders")] if model is HalfHeaders else [(h.ACTION, b"COMMIT")]
    with pytest.raises(RecordError, match="bad_header: PGROUP: it has a NUL"):
        model.from_headers([*headers, (h.PGROUP, b"shop\0eu")])
