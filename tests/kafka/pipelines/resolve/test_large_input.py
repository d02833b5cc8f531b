"""Extreme input: large bodies, thousands of headers or of ops of one id, many silent halves, wrong clocks."""

import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pyarrow
import pytest
from deltalake import DeltaTable, QueryBuilder

from halfway.schemas.headers import Source
from halfway.schemas.outcomes import Count, Reason
from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table
from tests.fuzz.extreme_load import expected_of_hot_id, hot_id, settle_unanswered, unanswered
from tests.support.job_world import START_MS, MakeWorld, World, half_headers, op_headers
from tests.support.memory import PeakMemory

LARGEST = 4 * 1024 * 1024
HOUR_MS = 3_600_000
MANY = 2_500


def bodies_of(warehouse: Path, table: Table) -> Iterator[tuple[str, bytes]]:
    """Yield ids and bodies, one row at a time, because all of them do not fit into memory."""
    reader = QueryBuilder().register("rows", DeltaTable(str(warehouse / table))).execute("SELECT transaction_id, body FROM rows")
    for batch in pyarrow.RecordBatchReader.from_stream(reader):
        for row in range(batch.num_rows):
            yield batch["transaction_id"][row].as_py(), batch["body"][row].as_py()


@pytest.mark.long
@pytest.mark.parametrize("bodies", [24, 250])
def test_one_batch_takes_many_of_the_largest_bodies(world: MakeWorld, bodies: int) -> None:
    w = world()

    def body_of(number: int) -> bytes:
        return Random(number).randbytes(LARGEST)

    for number in range(bodies):
        w.produce_later(Source.HALF, f"big{number}", body_of(number), half_headers())
        w.produce_later(Source.OP, f"big{number}", b"", op_headers(), 1)
    w.half("too-big", 0, b"x" * (LARGEST + 1))
    w.tick(1_000)
    with PeakMemory() as memory:
        [report] = w.resolve()
    assert report.counts[Count.COMMITTED] == bodies
    found = {key: body == body_of(int(key.removeprefix("big"))) for key, body in bodies_of(warehouse_of(w), Table.MESSAGES)}
    assert found == {f"big{number}": True for number in range(bodies)}
    [refused] = w.rows(Table.QUARANTINE)
    assert (refused.reason, bytes(refused.value)) == (Reason.BODY_TOO_LARGE, b"x" * (LARGEST + 1))
    if memory.peak_mib is not None:
        assert memory.peak_mib["workers"] < 1_500, "workers read bodies in portions"


def warehouse_of(w: World) -> Path:
    return Path(w.settings.storage.warehouse)


def test_halves_and_ops_may_have_thousands_of_headers(world: MakeWorld) -> None:
    w = world()
    own = {f"own-{number}": str(number) for number in range(MANY)}
    more = [(name, value.encode()) for name, value in own.items()]
    w.produce(Source.HALF, "a", b"body", [*half_headers(), *more], 0)
    w.produce(Source.HALF, "asked", b"body", [*half_headers(), *more], 0)
    refused = [*more, *op_headers(b"MAYBE")]
    w.produce(Source.OP, "a", b"", refused, 1)
    w.produce(Source.OP, "a", b"", [*more, *op_headers()], 2)
    w.tick(6_001)
    w.resolve()
    [row] = w.rows(Table.MESSAGES)
    assert row.properties == own
    [broken] = w.rows(Table.QUARANTINE)
    assert broken.reason == Reason.UNKNOWN_ACTION
    assert [(header.key, bytes(header.value)) for header in broken.headers] == refused
    [(key, _, headers)] = w.checks()
    assert key == "asked"
    assert {name: headers[name] for name, _ in more} == dict(more)


def going_on(w: World) -> Settings:
    """Return the world's settings for a job that runs until it is stopped."""
    trigger = w.settings.trigger.model_copy(update={"available_now": False, "interval": 0})
    return w.settings.model_copy(update={"trigger": trigger})


@pytest.mark.long
def test_r2_r10_one_id_may_have_thousands_of_ops(world: MakeWorld) -> None:
    w, ops = world(), 20_000
    result = hot_id(going_on(w), lambda: w.spark, ops, 2)
    counts, rows = expected_of_hot_id(ops)
    assert dict(result.counts) == counts
    assert dict(result.rows) == rows


@pytest.mark.long
@pytest.mark.timeout(600)
def test_many_halves_without_a_verdict_are_all_checked_and_discarded(world: MakeWorld) -> None:
    w, halves = world(**{"kafka.max_offsets_per_trigger": 25_000, "resolution.transactionCheckMax": 1}), 100_000
    settings = going_on(w)
    with PeakMemory() as memory:
        pending, state_bytes = unanswered(settings, lambda: w.spark, halves, 2)
        assert (pending.counts[Count.HALVES], pending.rows.total()) == (halves, 0)
        assert state_bytes < 100
        settled = settle_unanswered(settings, lambda: w.spark, 1, 2)
    assert (settled.counts[Count.CHECKED], settled.counts[Count.DISCARDED]) == (halves, halves)
    assert dict(settled.rows) == {Table.DISCARDED: halves}
    if memory.peak_mib is not None:
        assert memory.peak_mib["workers"] < 1_500


@pytest.mark.long
def test_on_a_log_append_time_topic_the_producers_clocks_do_not_matter(world: MakeWorld) -> None:
    w = world(timestamps="LogAppendTime", **{"resolution.transactionTimeOut": "10m"})
    now_ms = time.time_ns() // 1_000_000 - START_MS
    clocks_ms = {"ahead": now_ms + HOUR_MS, "behind": now_ms - HOUR_MS, "long-ago": 0}
    for name, at_ms in clocks_ms.items():
        w.op(f"{name}-early", b"COMMIT", at_ms)
        w.half(name, at_ms)
        w.half(f"{name}-silent", at_ms)
    w.tick(now_ms)
    [first] = w.resolve()
    for name, at_ms in clocks_ms.items():
        w.op(name, b"COMMIT", at_ms)
        w.half(f"{name}-early", at_ms)
    w.tick(now_ms)
    w.resolve()
    assert first.horizon_ms is not None
    assert abs(first.horizon_ms - START_MS - now_ms) < HOUR_MS / 2
    assert set(w.by_id(Table.MESSAGES)) == {*clocks_ms, *(f"{name}-early" for name in clocks_ms)}
    assert w.rows(Table.DISCARDED) == w.rows(Table.QUARANTINE) == w.checks() == []


@pytest.mark.long
def test_on_a_create_time_topic_a_wrong_clock_makes_no_discard_and_the_verdict_counts(world: MakeWorld) -> None:
    w = world(**{"resolution.transactionCheckMax": 3})
    clocks_ms = {"right": 0, "ahead": HOUR_MS, "behind": -HOUR_MS}
    for name, at_ms in clocks_ms.items():
        w.half(f"{name}-answered", at_ms)
        w.op(f"{name}-answered", b"COMMIT", at_ms + 500)
        w.half(name, at_ms)
    w.tick(1_000)
    w.resolve()
    # A half whose clock is an hour behind looks an hour old, so the job checks it. A verdict in Kafka still wins (R9).
    assert [key for key, *_ in w.checks()] == ["behind"]
    assert set(w.by_id(Table.MESSAGES)) == {f"{name}-answered" for name in clocks_ms}
    w.tick(6_001)
    w.resolve()
    assert [key for key, *_ in w.checks()] == ["behind", "right"]
    for name, at_ms in clocks_ms.items():
        w.op(name, b"COMMIT", at_ms + 7_000)
    w.tick(40_000)
    w.resolve()
    assert len(w.checks()) == 2
    assert {name: row.check_times for name, row in w.by_id(Table.MESSAGES).items() if name in clocks_ms} == {
        "right": 1,
        "ahead": 0,
        "behind": 1,
    }
    assert w.rows(Table.DISCARDED) == w.rows(Table.QUARANTINE) == []


def test_a_clock_that_is_ahead_only_delays_the_first_check(world: MakeWorld) -> None:
    w = world()
    w.half("ahead", HOUR_MS)
    w.tick(HOUR_MS + 6_000)
    w.resolve()
    assert w.checks() == []
    w.tick(HOUR_MS + 6_001)
    w.resolve()
    assert [key for key, *_ in w.checks()] == ["ahead"]
