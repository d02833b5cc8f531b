"""A chaos world is told in an order that the history checker may conclude from."""

import pytest

from halfway.schemas.tables import Table
from tests.chaos.client import STRAY
from tests.chaos.plans import digest
from tests.chaos.told_history import Told, records_in_order, rows_in_order
from tests.simulation.checker import judge
from tests.simulation.history import CHECK, HALF, OP, Decision, Fate, History, Numbers

HALF_HEADERS = (("REAL_TOPIC", b"orders"), ("PGROUP", b"g"))
HOUR_MS = 3_600_000
NUMBERS = Numbers(6_000, 30_000, 15, 200_000, 60_000, 300_000, 1_000)


def tick(topic: str, offset: int, at_ms: int) -> Told:
    return Told(topic, 0, offset, at_ms, None, b"{}", (("TICK", str(at_ms).encode()), ("PARTITIONS", b"1")))


def half(offset: int = 0, at_ms: int = 1_000) -> Told:
    return Told(HALF, 0, offset, at_ms, b"t", b"body", HALF_HEADERS)


def op(action: bytes, offset: int = 0, at_ms: int = 2_000, **others: bytes) -> Told:
    return Told(OP, 0, offset, at_ms, b"t", None, (("ACTION", action), ("PGROUP", b"g"), *others.items()))


def check(at_ms: int, number: int = 1) -> Told:
    headers = (*HALF_HEADERS, ("TRANSACTION_CHECK_TIMES", b"%d" % number), ("CHECK_ID", b"t:0.0:%d" % number))
    return Told(CHECK, 0, number - 1, at_ms, b"t", b"body", headers)


def message(committed_at: int = 2_000, body: bytes = b"body") -> tuple[Table, dict[str, object]]:
    pointer = {"transaction_id": "t", "half_partition": 0, "half_offset": 0, "half_at": 1_000, "check_times": 0}
    pointer |= {"op_partition": 0, "op_offset": 0}
    content = {"producer_group": "g", "topic": "orders", "incarnation": 0, "body": digest(body).encode()}
    return Table.MESSAGES, {**pointer, **content, "committed_at": committed_at, "epoch": 0, "batch_id": 3}


def rules_broken(told: list[Told], rows: list[tuple[Table, dict[str, object]]]) -> list[str]:
    records = records_in_order(told, NUMBERS.max_clock_skew_ms)
    decisions = [Decision(0, "g", "t", 0, Fate.COMMIT)]
    history = History(records, rows_in_order(rows, len(records) + 1), decisions, numbers=[NUMBERS], is_at_rest=False)
    return [finding.rule for finding in judge(history)]


def test_what_went_well_breaks_no_rule() -> None:
    assert rules_broken([tick(HALF, 1, 3_000), tick(OP, 1, 3_000), half(), op(b"COMMIT")], [message()]) == []


def test_a_committed_message_without_a_row_is_lost() -> None:
    assert "lost" in rules_broken([half(), op(b"COMMIT")], [])


def test_a_commit_that_came_before_a_rollback_is_not_given_up_for_it() -> None:
    assert "R2 lost" in rules_broken([half(), op(b"COMMIT"), op(b"ROLLBACK", 1, 3_000)], [])


@pytest.mark.parametrize(("reason", "offset"), [("id_conflict", 0), ("stale_incarnation", 0), ("incarnation_refused", 0)])
def test_a_refusal_that_nothing_bears_out_is_seen(reason: str, offset: int) -> None:
    place = {"source_topic": HALF, "source_partition": 0, "source_offset": offset, "reason": reason, "transaction_id": "t"}
    assert "R14" in rules_broken([half(), op(b"COMMIT")], [(Table.QUARANTINE, {**place, "epoch": 0, "batch_id": 3})])


def test_a_discard_after_a_verdict_that_had_been_read_is_seen() -> None:
    ticks = [tick(topic, offset, at_ms) for topic in (HALF, OP) for offset, at_ms in ((10, 8_000), (11, 45_000))]
    place = {"transaction_id": "t", "half_partition": 0, "half_offset": 0, "half_at": 1_000, "discarded_at": 45_000}
    row = {**place, "producer_group": "g", "topic": "orders", "incarnation": 0, "check_times": 15, "reason": "check_max"}
    told = [half(), *ticks, check(8_000, 15), op(b"ROLLBACK", at_ms=9_000)]
    assert "R9" in rules_broken(told, [(Table.DISCARDED, {**row, "body": digest(b"body").encode(), "epoch": 0, "batch_id": 3})])


def test_another_body_is_seen() -> None:
    assert rules_broken([half(), op(b"COMMIT")], [message(body=b"other")]) == ["R1 other content"]


def test_two_rows_of_one_half_are_seen() -> None:
    assert "R1 twice" in rules_broken([half(), op(b"COMMIT")], [message(), message()])


def test_a_tick_of_the_millisecond_of_a_check_may_have_brought_it() -> None:
    ticks = [tick(HALF, 1, 7_001), tick(OP, 1, 7_001)]
    assert rules_broken([half(), *ticks, check(7_001), op(b"COMMIT", 2, 9_000)], [message(9_000)]) == []


def test_a_check_before_any_tick_that_allows_it_is_too_early() -> None:
    ticks = [tick(HALF, 1, 7_001), tick(OP, 1, 7_001)]
    assert rules_broken([half(), *ticks, check(7_000), op(b"COMMIT", 2, 9_000)], [message(9_000)]) == ["R4"]


@pytest.mark.parametrize("off_ms", [-HOUR_MS, HOUR_MS])
def test_a_broker_whose_clock_was_off_is_told_in_the_order_that_was(off_ms: int) -> None:
    """The job refuses its ticks, and its checks have another time than the tick that made them due."""
    now_ms = 10 * HOUR_MS
    ticks = [tick(topic, 1 + number, now_ms + at_ms) for topic in (HALF, OP) for number, at_ms in enumerate((7_001, 37_001))]
    refused = tick(OP, 3, now_ms + 38_000)._replace(at_ms=now_ms + 38_000 + off_ms)
    checks = [check(now_ms + 7_001), check(now_ms + 37_002 + off_ms, 2)]
    told = [half(at_ms=now_ms + 1_000), *ticks, refused, *checks, op(b"COMMIT", 4, now_ms + 39_000)]
    row = (Table.MESSAGES, {**message(now_ms + 39_000)[1], "half_at": now_ms + 1_000, "check_times": 2})
    quarantined = {"source_topic": OP, "source_partition": 0, "source_offset": 3, "transaction_id": None, "reason": "bad_tick"}
    assert rules_broken(told, [row, (Table.QUARANTINE, {**quarantined, "epoch": 0, "batch_id": 2})]) == []


def test_a_stray_verdict_that_came_first_counts() -> None:
    assert rules_broken([half(), op(b"ROLLBACK", 0, 1_500, REMARK=STRAY)], []) == []


def test_rows_are_told_in_the_order_of_their_bookmarks() -> None:
    later = (Table.MESSAGES, {**message()[1], "batch_id": 1, "epoch": 1})
    told = rows_in_order([later, message()], 10)
    assert [(row["epoch"], row.seq) for row in told] == [(0, 10), (1, 11)]
