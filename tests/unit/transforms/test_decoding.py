"""Kafka's records become events and ticks: one case for each reason and limit (R14), and any bytes at all.

`tests/kafka/pipelines/resolve/test_bad_input.py` sends broken records through a real Kafka.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfway.schemas import headers as h
from halfway.schemas.events import EVENT_SCHEMA, RECORD_SCHEMA, EventKind
from halfway.schemas.headers import Source
from halfway.schemas.outcomes import Reason
from halfway.schemas.records import HalfHeaders, OpHeaders, RecordError, decode_key
from halfway.schemas.signing import Keyring, Signable, binding_of, sha256_of, signature_of
from halfway.schemas.tick_value import ALL_ASKED, TickValue
from halfway.transforms.decoding import Decoded, DecoderConfig, decode
from halfway.transforms.horizon import NO_TIME, Tick
from tests.fuzz import judge, shapes

AT_MS = 1_767_323_045_678
SKEW_MS = 1_000
CONFIG = DecoderConfig(max_body_bytes=100, max_clock_skew_ms=SKEW_MS)
TOPICS = {Source.HALF: "halves", Source.OP: "ops"}
JOB_KEY = b"j" * 32
KEYRING = Keyring({"g": [b"k" * 32]}, required=False, cluster="c", job_keys=[JOB_KEY], topics={"g": ["orders"]})
SIGNED = DecoderConfig(100, SKEW_MS, KEYRING, TOPICS)
ALL_SIGNED = DecoderConfig(100, SKEW_MS, Keyring({"g": [b"k" * 32]}, required=True, cluster="c", job_keys=[JOB_KEY]), TOPICS)
STRICT = DecoderConfig(100, SKEW_MS, Keyring({}, required=True), TOPICS)

Headers = Sequence[tuple[str, bytes | None]]
HALF: Headers = [("REAL_TOPIC", b"orders"), ("PGROUP", b"g")]
OP: Headers = [("ACTION", b"COMMIT"), ("PGROUP", b"g")]
LOST: Headers = [("HALF_LOST", b"3:17")]
TICK: Headers = [("TICK", b"%d" % AT_MS), ("PARTITIONS", b"4")]


class Sent(NamedTuple):
    """A record, as a test writes it. It lies in partition 3."""

    source: Source
    headers: Headers | None
    key: bytes | None = b"id"
    value: bytes | None = b""
    at_ms: int = AT_MS
    timestamp_type: int = 0


def half(*headers: tuple[str, bytes | None], **others: Any) -> Sent:
    return Sent(Source.HALF, headers, **others)


def op(*headers: tuple[str, bytes | None], **others: Any) -> Sent:
    return Sent(Source.OP, headers, **others)


def tick(*headers: tuple[str, bytes | None], **others: Any) -> Sent:
    return Sent(Source.OP, headers, **{"key": None, **others})


def batch_of(*sent: Sent) -> pa.RecordBatch:
    """Return RECORD_SCHEMA, as the job reads it: the value of a record is there only if the record can be a tick."""
    rows = [
        {
            "source": int(each.source),
            "partition": 3,
            "offset": 10 + number,
            "at_ms": each.at_ms,
            "timestamp_type": each.timestamp_type,
            "key": each.key,
            "headers": None if each.headers is None else [{"key": name, "value": value} for name, value in each.headers],
            "value_bytes": len(each.value or b""),
            "tick_value": each.value if each.key is None and len(each.value or b"") <= h.MAX_TICK_BYTES else None,
            "value_sha256": sha256_of(each.value),
        }
        for number, each in enumerate(sent)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=RECORD_SCHEMA)


def decoded(*sent: Sent, config: DecoderConfig = CONFIG) -> Decoded:
    result = decode(batch_of(*sent), config)
    assert result.events.schema == EVENT_SCHEMA
    result.events.validate(full=True)
    return result


def event_of(sent: Sent, config: DecoderConfig = CONFIG) -> dict[str, Any]:
    [event] = decoded(sent, config=config).events.to_pylist()
    return dict(event)


def problem_of(sent: Sent, config: DecoderConfig = CONFIG) -> tuple[str, str] | None:
    """Return reason and detail of a broken record; None if the record is good."""
    events = decoded(sent, config=config).events.to_pylist()
    if not events or events[0]["event"] != EventKind.BROKEN:
        return None
    return events[0]["reason"], events[0]["detail"]


def row(**columns: Any) -> dict[str, Any]:
    numbers = {
        "incarnation": 0,
        "immunity_ms": 0,
        "discarded_ms": 0,
        "binding": 0,
        "valid_ms": 0,
        "partition": 3,
        "offset": 10,
        "at_ms": AT_MS,
        "source": 0,
    }
    return dict.fromkeys(EVENT_SCHEMA.names) | numbers | columns


# Good records.


@pytest.mark.parametrize(("taken_at", "kind"), [({3: 11}, EventKind.HALF), ({3: 10}, EventKind.BROKEN), ({2: 11}, EventKind.BROKEN)])
def test_a_half_that_a_former_checkpoint_has_read_is_not_refused_for_its_size(taken_at: dict[int, int], kind: EventKind) -> None:
    config = DecoderConfig(100, SKEW_MS, taken_at=taken_at)
    assert event_of(half(*HALF, value=b"x" * 101), config)["event"] == kind


def test_half() -> None:
    more = [("INCARNATION", b"2"), ("CHECK_IMMUNITY_TIME_IN_SECONDS", b"7"), ("own", b"x"), ("null", None), ("own", b"y"), ("", b"")]
    good = {"transaction_id": "id", "producer_group": "g", "topic": "orders", "incarnation": 2, "immunity_ms": 7_000}
    assert event_of(half(*HALF, *more)) == row(event=EventKind.HALF, **good)


@pytest.mark.parametrize(
    ("said", "action"), [(b"COMMIT", "COMMIT"), (b"ROLLBACK", "ROLLBACK"), (b"UNKNOWN", "UNKNOWN"), (b"UNKNOW", "UNKNOWN")]
)
def test_op(said: bytes, action: str) -> None:
    event = event_of(op(("ACTION", said), ("PGROUP", b"g"), ("INCARNATION", b"007"), ("ignored", b"\xff"), ("ignored", None)))
    good = {"transaction_id": "id", "producer_group": "g", "action": action, "incarnation": 7}
    assert event == row(event=EventKind.OP, source=1, **good)


def test_lost_notice() -> None:
    ignored = [("INCARNATION", b"9223372036854775807"), ("PGROUP", b"\xff")]
    assert event_of(half(*LOST, *ignored)) == row(event=EventKind.LOST, transaction_id="id", half_pointer="3:17")
    assert event_of(half(*LOST, *HALF))["event"] == EventKind.HALF


def test_ticks() -> None:
    of_op = tick(*TICK, value=b'{"absent_groups": ["g", "", "h"], "other": 1}', at_ms=AT_MS - 1)
    of_half = Sent(Source.HALF, TICK, None, None)
    events, ticks, _ = decoded(of_op, of_half)
    assert events.num_rows == 0
    assert ticks == [Tick(Source.OP, 3, 4, AT_MS - 1, ("g", "h")), Tick(Source.HALF, 3, 4, AT_MS)]
    assert decoded(tick(*TICK, value=TickValue(("h", "g"), "", 7).to_bytes())).ticks[0][-2:] == (("g", "h"), 7)
    for job, asked_ms in (("own", 7), ("another", 0)):
        value = TickValue((), "own", 7).to_bytes()
        assert decoded(tick(*TICK, value=value), config=replace(CONFIG, job=job)).ticks[0].asked_ms == asked_ms
    assert decoded(tick(*TICK, value=b'{"job": "own"}')).ticks[0].asked_ms == ALL_ASKED


def test_read_time_is_the_newest_of_the_brokers_times_of_good_records() -> None:
    by_broker = [
        half(*HALF, at_ms=5, timestamp_type=1),
        half(*LOST, at_ms=6, timestamp_type=1),
        half(*HALF, at_ms=7),
        half(at_ms=8, timestamp_type=1),
        op(*OP, at_ms=3, timestamp_type=1),
        tick(("TICK", b"4"), ("PARTITIONS", b"4"), at_ms=4, timestamp_type=1),
        tick(("TICK", b"9"), ("PARTITIONS", b"4"), at_ms=9),
    ]
    assert decoded(*by_broker).read_ms == {(Source.HALF, 3): 6, (Source.OP, 3): 4}
    assert decoded(by_broker[2]).read_ms == {}
    assert decoded(by_broker[2], by_broker[3]).read_ms == {(Source.HALF, 3): NO_TIME}


def test_read_time_is_the_last_one_where_a_clock_was_set_back() -> None:
    at_ms = (5, 900, 6)
    assert decoded(*(half(*HALF, at_ms=each, timestamp_type=1) for each in at_ms)).read_ms == {(Source.HALF, 3): 6}


# Broken records.

FILL = h.MAX_HEADERS_BYTES - sum(len(name) + len(value or b"") for name, value in HALF) - len("p")
PROBLEMS: list[tuple[Sent, str, str]] = [
    (half(*HALF, key=None), "missing_key", "the record key is the transaction id"),
    (half(*HALF, key=b""), "missing_key", "the record key is the transaction id"),
    (op(*OP, key=b"k" * 256), "key_too_long", "256 bytes, at most 255"),
    (half(*LOST, key=b"\xff"), "key_not_utf8", "the record key is not UTF-8"),
    (half(*HALF, ("p", b"x" * (FILL + 1))), "headers_too_large", "32768 bytes, at most 32767"),
    (op(*OP, ("ö", b"x" * 33_000)), "headers_too_large", "33021 bytes, at most 32767"),
    (half(*HALF, *[("", None)] * 32_766), "headers_too_large", "32768 headers, at most 32767"),
    (half(*LOST, ("p", b"x" * 33_000)), "headers_too_large", "33014 bytes, at most 32767"),
    (Sent(Source.HALF, None), "missing_header", "REAL_TOPIC"),
    (half(HALF[0]), "missing_header", "PGROUP"),
    (op(OP[1]), "missing_header", "ACTION"),
    (op(OP[0]), "missing_header", "PGROUP"),
    (half(("REAL_TOPIC", b""), HALF[1]), "bad_header", "REAL_TOPIC is empty or null"),
    (half(("REAL_TOPIC", None), HALF[1]), "bad_header", "REAL_TOPIC is empty or null"),
    (half(("REAL_TOPIC", b"t" * 256), HALF[1]), "bad_header", "REAL_TOPIC has over 255 bytes"),
    (op(OP[0], ("PGROUP", "ö".encode() * 128)), "bad_header", "PGROUP has over 255 bytes"),
    (half(HALF[0], ("PGROUP", b"\xff")), "bad_header", "PGROUP is not UTF-8"),
    (half(HALF[0], ("PGROUP", b"shop\0eu")), "bad_header", "PGROUP has a NUL"),
    (op(OP[0], ("PGROUP", b"shop\0eu")), "bad_header", "PGROUP has a NUL"),
    (half(*HALF, ("TAGS", None)), "bad_header", "TAGS is null"),
    (half(*HALF, ("KEYS", b"\xc3")), "bad_header", "KEYS is not UTF-8"),
    (half(*HALF, ("own", b"\xff")), "bad_header", "a header is not UTF-8"),
    (half(*HALF, ("own\ufffd", b"")), "bad_header", "a header is not UTF-8"),
    (half(*HALF, ("REAL_QID\0x", b"five")), "bad_header", "the name of a header has a NUL"),
    (half(*HALF, ("own", b"\xff"), ("own", b"x")), "bad_header", "a header is not UTF-8"),
    (op(("ACTION", None), OP[1]), "bad_header", "ACTION is null"),
    (op(("ACTION", b"\xff"), OP[1]), "bad_header", "ACTION is not UTF-8"),
    (op(*OP, ("FROM_CHECK", None)), "bad_header", "FROM_CHECK is null"),
    (op(*OP, ("REMARK", b"\xed\xa0\x80")), "bad_header", "REMARK is not UTF-8"),
    *(
        (good._replace(at_ms=at_ms), "bad_header", f"the record's timestamp is {at_ms} ms, which is not in the years 1 to 9999")
        for good in (half(*HALF), op(*OP))
        for at_ms in (h.MIN_TIMESTAMP_MS - 1, h.MAX_TIMESTAMP_MS + 1, AT_MS * 1000)
    ),
    (half(*HALF, HALF[1], HALF[0]), "duplicate_header", "REAL_TOPIC PGROUP"),
    (op(*OP, ("REMARK", b""), ("REMARK", None)), "duplicate_header", "REMARK"),
    (half(*LOST, *LOST), "duplicate_header", "HALF_LOST"),
    (op(("ACTION", b"commit"), OP[1]), "unknown_action", "ACTION is commit"),
    (op(("ACTION", b""), OP[1]), "unknown_action", "ACTION is "),
    (op(("ACTION", b"x" * 200), OP[1]), "unknown_action", "ACTION is " + "x" * 100),
    *((half(*HALF, (name, b"1")), "delay_not_supported", name) for name in h.DELAY_HEADERS),
    (half(*HALF, value=b"x" * 101), "body_too_large", "101 bytes, at most 100"),
    *((half(("HALF_LOST", pointer)), "bad_header", "HALF_LOST") for pointer in (None, b"3:17\n", b"3:", b"1234567890:1")),
    (tick(*TICK, key=b"k"), "bad_tick", "a tick has no key"),
    (tick(*TICK, key=b""), "bad_tick", "a tick has no key"),
    (tick(*TICK, ("p", b"x" * 33_000)), "bad_tick", "the headers are over 32767 bytes"),
    (tick(("TICK", None), TICK[1]), "bad_tick", "TICK is not a number"),
    (tick(("TICK", b"253402300800000"), TICK[1]), "bad_tick", "TICK is not a number"),
    (tick(TICK[0]), "bad_tick", "PARTITIONS is not a positive number"),
    (tick(TICK[0], ("PARTITIONS", b"0")), "bad_tick", "PARTITIONS is not a positive number"),
    (tick(*TICK, TICK[1]), "bad_tick", "a header occurs twice"),
    (tick(TICK[0], ("PARTITIONS", b"3")), "bad_tick", "PARTITIONS is not above the tick's own partition"),
    (tick(*TICK, value=b" " * (h.MAX_TICK_BYTES + 1)), "bad_tick", "the value is over 32 KiB"),
    (tick(*TICK, at_ms=AT_MS + SKEW_MS + 1), "bad_tick", f"TICK is {SKEW_MS + 1} ms from the record's timestamp, at most {SKEW_MS}"),
    (tick(*TICK, at_ms=AT_MS - SKEW_MS - 1), "bad_tick", f"TICK is {SKEW_MS + 1} ms from the record's timestamp, at most {SKEW_MS}"),
    (Sent(Source.HALF, [*HALF, *TICK]), "bad_tick", "a tick has no key"),
]


@pytest.mark.parametrize(("sent", "reason", "detail"), PROBLEMS, ids=[f"{n}-{case[1]}-{case[2][:40]}" for n, case in enumerate(PROBLEMS)])
def test_r14_a_broken_record_has_a_reason_and_nothing_else(sent: Sent, reason: str, detail: str) -> None:
    text = None if sent.key is None or b"\xff" in sent.key or len(sent.key) > h.MAX_KEY_BYTES else sent.key.decode()
    broken = row(event=EventKind.BROKEN, source=int(sent.source), at_ms=sent.at_ms, transaction_id=text, reason=reason, detail=detail)
    assert event_of(sent) == broken
    assert decoded(sent).ticks == []


def test_r14_every_reason_is_shown_above() -> None:
    of_records = [reason for reason in Reason if list(Reason).index(reason) >= list(Reason).index(Reason.MISSING_KEY)]
    assert {str(reason) for reason in of_records} == {case[1] for case in PROBLEMS} | {"bad_signature"}


NUMBERS = [
    (half(*HALF), "REAL_QID", -(2**31), 2**31 - 1),
    (half(*HALF), "CHECK_IMMUNITY_TIME_IN_SECONDS", 1, 2**31 - 1),
    (half(*HALF), "BORN_TIMESTAMP", 0, 253_402_300_799_999),
    (half(*HALF), "INCARNATION", 0, 999_999),
    (half(*HALF), "SIGNED_AT", 0, 253_402_300_799_999),
    (op(*OP), "INCARNATION", 0, 999_999),
    (op(*OP), "CHECK_TIMES", 0, 2**31 - 1),
]


@pytest.mark.parametrize(("sent", "name", "low", "high"), NUMBERS)
def test_numbers_and_their_limits(sent: Sent, name: str, low: int, high: int) -> None:
    def with_value(value: bytes | None) -> Sent:
        return sent._replace(headers=[*(sent.headers or ()), (name, value)])

    for good in (low, high):
        assert problem_of(with_value(b"%d" % good)) is None
    assert problem_of(with_value(b"%019d" % high)) is None, "19 digits"
    refused = ("bad_header", f"{name} is not a number from {low} to {high}")
    for value in (
        b"%d" % (low - 1),
        b"%d" % (high + 1),
        b"%020d" % high,
        b"9223372036854775808",
        b"9" * 19,
        b"-" + b"9" * 19,
        *shapes.NOT_TEXT,
    ):
        assert problem_of(with_value(value)) == refused, value
    for odd in (None, b"", b" 5", b"5\n", b"+5", b"1_0", b"1e3", b"0x1", b"-", b"--1", b"5\x00", "٣".encode()):
        assert problem_of(with_value(odd)) == refused, odd


def test_records_at_their_limits_are_good() -> None:
    good = [
        half(*HALF, ("p", b"x" * FILL), key=b"k" * 255, value=b"x" * 100),
        half(("REAL_TOPIC", b"t" * 255), ("PGROUP", b"g" * 255), ("TAGS", b""), ("KEYS", b"")),
        half(*HALF, ("own", b"\0"), key=b"\0", value=None),
        half(*HALF, at_ms=h.MIN_TIMESTAMP_MS),
        op(*OP, at_ms=h.MAX_TIMESTAMP_MS),
        op(*OP, ("INCARNATION\0", b"x")),
        op(*OP, ("REMARK", b""), ("FROM_CHECK", b""), ("SIGNATURE", b"\xff"), ("SIGNATURE", None), value=b"x" * 101),
        tick(*TICK, value=b'{"absent_groups": []}'.ljust(h.MAX_TICK_BYTES), at_ms=AT_MS + SKEW_MS),
        tick(*TICK, value=b"{}", at_ms=AT_MS - SKEW_MS),
    ]
    for sent in good:
        assert problem_of(sent) is None, sent


TICK_VALUES = [
    *shapes.BAD_TICK_VALUES,
    b'{"absent_groups": null}',
    b'{"absent_groups": ["g", 1]}',
    b'{"absent_groups": [["g"]]}',
    b'{"absent_groups": ["\\ud800"]}',
    b'{"asked_ms": null}',
    b'{"asked_ms": "5"}',
    b'{"asked_ms": true}',
    b'{"asked_ms": -1}',
    b'{"job": 1}',
    b'{"job": null}',
    b'{"asked_ms": 9223372036854775808}',
    b'{"absent_groups": []} {}',
    b"[" * 30_000,
    b'{"a": ' * 5_000,
    b"9" * 30_000,
    b"NaN",
    b'\xef\xbb\xbf{"absent_groups": []}',
]


@pytest.mark.parametrize("value", TICK_VALUES, ids=[f"{value[:30]!r}" for value in TICK_VALUES])
def test_a_tick_whose_value_is_not_as_documented_is_broken(value: bytes) -> None:
    assert problem_of(tick(*TICK, value=value)) == (
        "bad_tick",
        'the value is not {"absent_groups": [...], "job": "...", "asked_ms": number}',
    )


COMBINATIONS: list[tuple[Sent, str]] = [
    (half(*HALF, ("p", b"x" * 33_000), key=None), "missing_key"),
    (half(*HALF, key=b"\xff" * 256), "key_too_long"),
    (half(("p", b"x" * 33_000)), "headers_too_large"),
    (half(("REAL_TOPIC", b"")), "missing_header"),
    (half(*HALF, ("TAGS", None), HALF[0]), "bad_header"),
    (half(*HALF, ("PGROUP", b"\xff")), "bad_header"),
    (op(*OP, ("PGROUP", b"\xff")), "duplicate_header"),
    (op(("ACTION", b"x"), *OP), "duplicate_header"),
    (half(*HALF, HALF[0], ("DELAY", b"1")), "duplicate_header"),
    (half(*HALF, ("DELAY", b"1"), value=b"x" * 101), "delay_not_supported"),
    (half(("HALF_LOST", b"x"), *LOST), "bad_header"),
]


@pytest.mark.parametrize(("sent", "reason"), COMBINATIONS)
def test_of_several_problems_the_first_one_is_named(sent: Sent, reason: str) -> None:
    problem = problem_of(sent)
    assert problem is not None
    assert problem[0] == reason


# Signatures.


def signed(sent: Sent, key: bytes = b"k" * 32, cluster: str = "c", topic: str | None = None, partition: int | None = None) -> Sent:
    """Return a record with the signature of this record at its end."""
    signable = Signable(topic or TOPICS[sent.source], sent.key, sha256_of(sent.value), sent.headers or (), partition)
    return sent._replace(headers=[*(sent.headers or ()), ("SIGNATURE", signature_of(key, cluster, signable).encode())])


AT = ("SIGNED_AT", b"%d" % AT_MS)
GOOD = {
    "half": signed(half(*HALF, AT, ("own", b"x"), ("null", None), value=b"body")),
    "op": signed(op(*OP, ("HALF_SIGNATURE", b"00"))),
    "tick": signed(tick(*TICK), JOB_KEY, partition=3),
    "tick of halves": signed(Sent(Source.HALF, TICK, None, TickValue(("h",), "", 7).to_bytes()), JOB_KEY, partition=3),
    "notice": signed(half(*LOST), JOB_KEY),
}
NO_FIT = "the signature does not fit this record, its topic and its cluster"


@pytest.mark.parametrize("name", GOOD)
def test_r14_a_signed_record_is_good_and_the_same_without_its_signature_is_not(name: str) -> None:
    good = GOOD[name]
    assert problem_of(good, SIGNED) is None
    assert problem_of(good._replace(headers=(good.headers or ())[:-1]), SIGNED) == ("bad_signature", "the record is not signed")
    for wrong in (b"", b"0" * 64, ((good.headers or ())[-1][1] or b"").upper()):
        forged = good._replace(headers=[*(good.headers or ())[:-1], ("SIGNATURE", wrong)])
        assert problem_of(forged, SIGNED) == ("bad_signature", NO_FIT)
        assert problem_of(forged) is None, "without keys no signature is looked at"


@pytest.mark.parametrize("name", GOOD)
def test_r14_while_not_everybody_signs_only_wrong_signatures_are_refused(name: str) -> None:
    good, keys = GOOD[name], {"g": [b"k" * 32]}
    config = replace(SIGNED, keyring=Keyring(keys, required=False, cluster="c", job_keys=[JOB_KEY], accept_unsigned=True))
    unsigned = good._replace(headers=[header for header in good.headers or () if header[0] not in ("SIGNATURE", "SIGNED_AT")])
    assert [problem_of(each, config) for each in (good, unsigned)] == [None, None]
    wrong = good._replace(headers=[*(good.headers or ())[:-1], ("SIGNATURE", b"0" * 64)])
    assert problem_of(wrong, config) == ("bad_signature", NO_FIT)


@pytest.mark.parametrize("name", GOOD)
def test_r14_a_signature_is_for_one_record_only(name: str) -> None:
    """Each change of what a record says, and each other place for it, is refused."""
    good = GOOD[name]
    headers = list(good.headers or ())
    others = [
        good._replace(headers=[*headers, ("more", b"")]),
        good._replace(headers=[("more", None), *headers]),
        *(
            good._replace(headers=[*headers[:at], (headers[at][0], b"1" + (headers[at][1] or b"")), *headers[at + 1 :]])
            for at in range(len(headers) - 1)
        ),
    ]
    if good.key is not None:
        others += [good._replace(key=b"other"), good._replace(value=b"another body")]
    else:
        others += [good._replace(value=value) for value in (b'{"absent_groups": ["victim"]}', TickValue(("h",), "", 8).to_bytes())]
        others += [signed(good._replace(headers=headers[:-1]), JOB_KEY, partition=2)]
    unsigned = good._replace(headers=headers[:-1])
    place = None if good.key is not None else 3
    others += [
        signed(unsigned, cluster="staging", partition=place),
        signed(unsigned, topic="others", partition=place),
        signed(unsigned, b"x" * 32),
    ]
    for other in others:
        problem = problem_of(other, ALL_SIGNED)
        assert problem is not None, other
        assert decoded(other, config=ALL_SIGNED).ticks == []
    if headers[0][0] != "TICK":
        moved = good._replace(source=Source.OP if good.source is Source.HALF else Source.HALF)
        assert problem_of(moved, SIGNED) is not None


def test_r14_a_group_cannot_sign_for_another_or_for_the_job() -> None:
    of_h = half(("REAL_TOPIC", b"orders"), ("PGROUP", b"h"))
    assert problem_of(of_h, SIGNED) is None, "it has no key, and none is required"
    assert problem_of(signed(of_h), STRICT) == ("bad_signature", "there is no key for group h")
    for unsigned in (half(*LOST), tick(*TICK)):
        assert problem_of(signed(unsigned, partition=None if unsigned.key else 3), SIGNED) == ("bad_signature", NO_FIT)


def test_r14_a_group_sends_to_its_topics_only() -> None:
    other = signed(half(("REAL_TOPIC", b"payments"), HALF[1], AT))
    assert problem_of(other, SIGNED) == ("bad_signature", "group g may not send to payments")
    assert problem_of(other) is None


def test_r14_a_signed_half_is_stored_soon_after_it_was_signed() -> None:
    window_ms = h.SIGNED_WINDOW_MS
    for skew_ms in (window_ms, -window_ms):
        assert problem_of(signed(half(*HALF, AT, at_ms=AT_MS + skew_ms)), SIGNED) is None
    late = f"SIGNED_AT is {window_ms + 1} ms from the record's timestamp, at most {window_ms}"
    for skew_ms in (window_ms + 1, -window_ms - 1):
        assert problem_of(signed(half(*HALF, AT, at_ms=AT_MS + skew_ms)), SIGNED) == ("bad_signature", late)
    assert problem_of(signed(half(*HALF)), SIGNED) == ("bad_signature", "SIGNED_AT is missing")


def test_what_a_signature_binds() -> None:
    event = event_of(GOOD["half"], SIGNED)
    signature = dict(GOOD["half"].headers or ())["SIGNATURE"] or b""
    assert (event["binding"], event["valid_ms"]) == (binding_of(signature.decode()), AT_MS + h.SIGNED_WINDOW_MS)
    assert event_of(op(*OP, ("HALF_SIGNATURE", signature)))["binding"] == event["binding"] != 0
    assert event_of(GOOD["half"])["valid_ms"] == 0, "it was not verified"


def test_other_problems_are_named_before_a_signature() -> None:
    assert problem_of(GOOD["op"]._replace(headers=[*(GOOD["op"].headers or ()), ("SIGNATURE", b"x")]), SIGNED) == (
        "duplicate_header",
        "SIGNATURE",
    )
    assert problem_of(op(*OP, ("CHECK_TIMES", b"x")), SIGNED) == ("bad_header", "CHECK_TIMES is not a number from 0 to 2147483647")
    mixed = (GOOD["op"], op(*OP), op(), GOOD["half"], half(*HALF), GOOD["op"])
    assert [event["event"] for event in decoded(*mixed, config=SIGNED).events.to_pylist()] == [2, 5, 5, 1, 5, 2]


def test_a_bad_signature_does_not_move_the_read_time() -> None:
    read_ms = decoded(op(*OP, timestamp_type=1), half(*HALF, timestamp_type=1), config=SIGNED).read_ms
    assert read_ms == {(Source.OP, 3): NO_TIME, (Source.HALF, 3): NO_TIME}


# Amounts.


def test_the_first_of_two_headers_counts_also_in_a_large_batch() -> None:
    """NumPy assigns several values to one place in no certain order."""
    null_second = op(*OP, ("REMARK", b"x"), ("REMARK", None))
    null_first = op(*OP, ("REMARK", None), ("REMARK", b"x"))
    events = decoded(*[null_second, null_first] * 2_000).events
    assert events["reason"].to_pylist() == ["duplicate_header", "bad_header"] * 2_000


def test_any_number_of_names() -> None:
    many = [(f"n{number}", b"") for number in range(3_000)]
    assert problem_of(half(*HALF, *many)) is None
    assert problem_of(half(*HALF, *[(f"n{number}", b"") for number in range(100_000)])) == (
        "headers_too_large",
        "588913 bytes, at most 32767",
    )


def test_no_records() -> None:
    events, ticks, read_ms = decoded()
    assert (events.num_rows, ticks, read_ms) == (0, [], {})


def test_details_are_short() -> None:
    group, topic = "g" * 255, "t" * 255
    config = DecoderConfig(100, SKEW_MS, Keyring({group: [b"k" * 32]}, required=False, cluster="c", topics={group: ["orders"]}), TOPICS)
    problem = problem_of(half(("REAL_TOPIC", topic.encode()), ("PGROUP", group.encode())), config)
    assert problem == ("bad_signature", f"group {group} may not send to {topic}"[:500])
    problem = problem_of(op(OP[0], ("PGROUP", b"g" * 255), ("REMARK", b"x" * 1_000)), STRICT)
    assert problem is not None
    assert len(problem[1]) <= 500


# Any bytes.

NAMES = st.sampled_from([*shapes.ODD_NAMES, *shapes.OWN_NAMES, "TICK", "SIGNATURE"]) | st.text(max_size=3)
VALUES = st.sampled_from([*shapes.VALUES, *shapes.TICK_VALUES, b"x" * 256, b"y" * 33_000]) | st.binary(max_size=6)
LISTS = st.none() | st.builds(
    lambda start, more, end: [*start, *more, *end],
    st.sampled_from([[], HALF, OP, TICK, LOST]),
    st.lists(st.tuples(NAMES, VALUES), max_size=5),
    st.sampled_from([[], [], HALF, OP, TICK]),
)
ANY = st.builds(
    Sent,
    source=st.sampled_from(Source),
    headers=LISTS,
    key=st.sampled_from([None, b"id", *shapes.KEYS]) | st.binary(max_size=3),
    value=st.sampled_from([*shapes.TICK_VALUES, *shapes.BAD_TICK_VALUES, b"x" * 101]) | st.binary(max_size=20),
    at_ms=st.sampled_from([AT_MS, 0, 5_000, -1, h.MIN_TIMESTAMP_MS - 1, AT_MS * 1000]),
    timestamp_type=st.integers(0, 1),
)


@given(st.lists(ANY, max_size=8), st.integers(0, 3), st.sampled_from([None, KEYRING]))
def test_any_records_are_each_an_event_or_a_tick(sent: list[Sent], first: int, keyring: Keyring | None) -> None:
    records = batch_of(*sent).slice(first)
    events, ticks, _ = decode(records, DecoderConfig(100, SKEW_MS, keyring, TOPICS))
    events.validate(full=True)
    alone = [decode(records.slice(number, 1), DecoderConfig(100, SKEW_MS, keyring, TOPICS)) for number in range(records.num_rows)]
    assert [each.events.num_rows + len(each.ticks) for each in alone] == [1] * records.num_rows
    assert events.to_pylist() == [event for each in alone for event in each.events.to_pylist()], "records do not affect each other"
    assert ticks == [tick for each in alone for tick in each.ticks]


@given(ANY)
def test_a_record_is_good_or_broken_as_the_contract_says(sent: Sent) -> None:
    record = judge.Record(sent.source is Source.HALF, 3, sent.key, sent.value, list(sent.headers or ()), sent.at_ms)
    judgement = judge.judge(record, max_body_bytes=100, max_clock_skew_ms=SKEW_MS)
    problem = problem_of(sent)
    assert (problem is None) == (not judgement.reasons)
    assert problem is None or problem[0] in judgement.reasons


@given(st.sampled_from(Source), LISTS, st.sampled_from([b"id", *shapes.KEYS]))
def test_the_clients_models_and_the_job_name_the_same_reason(source: Source, headers: Headers | None, key: bytes | None) -> None:
    names = {name for name, _ in headers or ()}
    if "TICK" in names or (source is Source.HALF and "HALF_LOST" in names and "REAL_TOPIC" not in names):
        return
    if source is Source.OP and any(name == "SIGNATURE" and (value is None or not judge.is_text(value)) for name, value in headers or ()):
        return  # the job ignores it where the group has no key
    reason = None
    try:
        decode_key(key)
        (HalfHeaders if source is Source.HALF else OpHeaders).from_headers(headers)
    except RecordError as error:
        reason = str(error.reason)
    # The models always read an op's signature; the job does where it has keys.
    config = DecoderConfig(100, SKEW_MS, Keyring({}, required=False), TOPICS)
    problem = problem_of(Sent(source, headers, key), config)
    assert (problem[0] if problem else None) == reason
