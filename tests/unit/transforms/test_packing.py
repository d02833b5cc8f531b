"""Events and outcomes come out of packs as they went in, each bucket hears of time, and each id has one bucket."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from halfway.schemas.events import PACKED_EVENTS_SCHEMA, RECORD_SCHEMA
from halfway.schemas.headers import Source
from halfway.schemas.outcomes import Kind
from halfway.transforms import packing
from halfway.transforms.by_batch import ByBatch
from halfway.transforms.decoding import DecoderConfig
from halfway.transforms.horizon import Clock, Tick
from halfway.transforms.operator import bucket_function, to_batch
from halfway.transforms.packing import CHUNK_OFFSETS, UNDIVIDED, Takeover, buckets_of, pack_events, pack_outcomes, unpack
from halfway.transforms.protocol import Batch, Outcome
from tests.support.scenario import RULES

KEYS = (7, 0, 23, 4)
CONFIG = DecoderConfig(max_body_bytes=100, max_clock_skew_ms=300_000)
HALF = [("REAL_TOPIC", b"orders"), ("PGROUP", b"g")]
OP = [("ACTION", b"COMMIT"), ("PGROUP", b"g")]


def record(source: Source, offset: int, key: bytes | None, headers: Sequence[tuple[str, bytes]], **changes: Any) -> dict[str, Any]:
    fields = {"partition": 0, "at_ms": 1_000 + offset, "timestamp_type": 1, "value_bytes": 4, "tick_value": None} | changes
    return {"source": int(source), "offset": offset, "key": key, "headers": [{"key": k, "value": v} for k, v in headers], **fields}


def tick(source: Source, offset: int, at_ms: int, value: bytes = b"", partitions: int = 1, partition: int = 0) -> dict[str, Any]:
    headers = [("TICK", str(at_ms).encode()), ("PARTITIONS", str(partitions).encode())]
    return record(source, offset, None, headers, at_ms=at_ms, tick_value=value, value_bytes=len(value), partition=partition)


def packs(records: Sequence[dict[str, Any]], *, at_once: int = 10) -> pd.DataFrame:
    """Return what a task makes of records that reach it in batches of `at_once`."""
    batches = [pa.RecordBatch.from_pylist(list(records[n : n + at_once]), RECORD_SCHEMA) for n in range(0, len(records), at_once)]
    return pa.Table.from_batches(pack_events(ByBatch([(0, CONFIG)]), KEYS, b"secret")(batches), PACKED_EVENTS_SCHEMA).to_pandas()


def batches_of(rows: pd.DataFrame) -> dict[int, Batch]:
    """Return what each bucket gets, as Spark groups the rows."""
    return {int(str(key)): to_batch([rows[rows["bucket"] == key]]) for key in rows["bucket"].unique()}


@pytest.mark.parametrize("rows_in_memory", [1, 7, 500_000])
def test_every_record_reaches_one_bucket_with_all_of_its_id(rows_in_memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "ROWS_IN_MEMORY", rows_in_memory)
    halves = [record(Source.HALF, n, b"id%d" % n, HALF) for n in range(50)]
    ops = [record(Source.OP, n, b"id%d" % n, OP) for n in range(50)]
    broken = [record(Source.HALF, 50 + n, None if n % 2 else b"same", []) for n in range(40)]
    of_bucket = batches_of(packs([*halves, *ops, *broken]))
    assert set(of_bucket) == set(KEYS)
    for batch in of_bucket.values():
        assert {half.transaction_id for half in batch.halves} == {op.transaction_id for op in batch.ops}
        assert batch.broken, "broken records of one id, or of none, are spread"
    assert sorted(half.offset for batch in of_bucket.values() for half in batch.halves) == list(range(50))
    assert sorted(op.offset for batch in of_bucket.values() for op in batch.ops) == list(range(50))
    assert sorted(each.offset for batch in of_bucket.values() for each in batch.broken) == list(range(50, 90))


def test_ids_that_fall_into_one_bucket_of_a_checkpoint_are_spread_in_another() -> None:
    """Nobody who does not know a checkpoint's secret can fill one of its buckets."""
    ids = [b"id%d" % number for number in range(64_000)]
    first = buckets_of(ids, 64, b"secret") == 0
    chosen = [name for name, is_first in zip(ids, first.tolist(), strict=True) if is_first]
    assert 900 < len(chosen) < 1100
    spread = Counter(buckets_of(chosen, 64, b"another").tolist())
    assert len(spread) == 64
    assert max(spread.values()) < 40


def test_every_bucket_hears_the_latest_tick_of_a_partition_and_what_was_read() -> None:
    ticks = [tick(Source.OP, n, 5_000 + n, b'{"absent_groups": ["g%d"]}' % n) for n in range(30)]
    read = record(Source.HALF, 3, b"id", HALF, at_ms=9_000)
    set_back = [record(Source.HALF, 40, b"id", HALF, at_ms=8_000), tick(Source.OP, 40, 4_000), tick(Source.OP, 41, 4_500, partitions=9)]
    of_bucket = batches_of(packs([*ticks, read, *set_back], at_once=7))
    assert set(of_bucket) == set(KEYS)
    for batch in of_bucket.values():
        assert batch.ticks == [Tick(Source.OP, 0, 9, 4_500)]
        assert batch.read_ms == {(Source.OP, 0): 4_500, (Source.HALF, 0): 8_000}


def test_r14_a_key_of_megabytes_does_not_travel() -> None:
    """The driver collects the outcomes of small batches, and Spark ends a job that collects more than 1 GiB."""
    sent = packs([record(Source.HALF, 1, b"k" * 5_000_000, HALF), record(Source.OP, 2, b"\xff" * 5_000_000, OP)])
    assert sent["events"].map(len).sum() < 10_000
    assert [each.reason for batch in batches_of(sent).values() for each in batch.broken] == ["key_too_long"] * 2


def test_the_latest_tick_of_a_partition_is_the_same_however_its_records_are_divided() -> None:
    """A forged tick with many partitions must not hide the true ones that follow it."""
    ticks = [tick(Source.OP, 1, 5_000, partitions=99), tick(Source.OP, 2, 6_000, partitions=4), tick(Source.OP, 3, 6_000, partitions=3)]
    for at_once in (1, 2, 3):
        for batch in batches_of(packs(ticks, at_once=at_once)).values():
            assert batch.ticks == [Tick(Source.OP, 0, 3, 6_000)]


def test_the_absent_groups_of_a_thousand_partitions_travel_once_a_bucket() -> None:
    """A tick may name a thousand groups, and every partition has the same ones."""
    value = json.dumps({"absent_groups": [f"group-{number:024}" for number in range(900)]}).encode()
    ticks = [tick(source, 1, 5_000 + n, value, partitions=512, partition=n) for source in Source for n in range(512)]
    sent = packs(ticks, at_once=256)
    assert sent["times"].map(len).max() < len(value) + 64 * len(ticks)
    for batch in batches_of(sent).values():
        clock = Clock().after(batch.ticks, batch.read_ms)
        assert (len(batch.ticks), clock.horizon_ms(), len(clock.absent_groups())) == (1_024, 5_000, 900)


def test_the_times_of_several_tasks_are_all_heard() -> None:
    rows = pd.concat([packs([tick(Source.HALF, 1, 8_000, partitions=2)]), packs([tick(Source.HALF, 1, 7_000, partitions=2, partition=1)])])
    for batch in batches_of(rows).values():
        assert [(each.partition, each.at_ms) for each in batch.ticks] == [(0, 8_000), (1, 7_000)]


def test_a_record_without_the_brokers_time_wakes_one_bucket_only() -> None:
    assert len(packs([record(Source.HALF, 1, b"id", HALF, timestamp_type=0)])) == 1
    assert len(packs([])) == 0


def outcome(kind: Kind, offset: int, partition: int = 0) -> Outcome:
    source = Source.OP if kind is Kind.QUARANTINE else Source.HALF
    return Outcome(kind, f"id{offset}", source, partition, offset, 5, 6, "g", "orders", 1, 2, "", "größe")


@pytest.mark.parametrize("max_undivided", [0, 1_000])
def test_outcomes_come_out_as_they_went_in(max_undivided: int) -> None:
    sent = [outcome(kind, offset, offset % 3) for offset in range(0, 5 * CHUNK_OFFSETS, 1_000) for kind in Kind if kind is not Kind.REPORT]
    rows = pack_outcomes(sent, 2, max_undivided, Takeover())
    found = []
    for kind, slot, may_be_held, count, pack in rows:
        table = unpack(pack)
        assert (table.num_rows, may_be_held, set(table["kind"].to_pylist())) == (count, False, {kind})
        assert slot in ((UNDIVIDED,) if max_undivided else (0, 1))
        found.extend(Outcome(*row.values()) for row in table.to_pylist())
    assert Counter(found) == Counter(sent)
    assert len(rows) == (4 if max_undivided else 8)


def test_records_that_lie_together_are_read_by_one_task() -> None:
    rows = pack_outcomes([outcome(Kind.COMMIT, offset) for offset in range(4 * CHUNK_OFFSETS)], 4, 0, Takeover())
    assert [count for _, _, _, count, _ in rows] == [CHUNK_OFFSETS] * 4


def test_a_bucket_with_more_than_a_few_outcomes_goes_to_no_driver() -> None:
    """With many slots its packs are small, and the driver would collect a pack of 2 KB for each outcome."""
    spread = [outcome(Kind.COMMIT, offset, offset) for offset in range(5)]
    assert [slot for _, slot, *_ in pack_outcomes(spread, 256, 4, Takeover())] == [0, 1, 2, 3, 4]
    assert [slot for _, slot, *_ in pack_outcomes(spread[:4], 256, 4, Takeover())] == [UNDIVIDED]


def test_a_signed_half_soon_after_the_takeover_may_be_held_too() -> None:
    """It may be a copy of one that was there, and be read first."""
    sent = [
        outcome(kind, 20)._replace(at_ms=at_ms, producer_group=group)
        for kind in (Kind.CHECK, Kind.QUARANTINE)
        for at_ms in (5_000, 5_001)
        for group in ("g", "unsigned", None)
    ]
    rows = pack_outcomes(sent, 2, 100, Takeover({Source.HALF: {0: 10}}, 5_000, ["g"]))
    held = [each for _, _, may_be_held, _, pack in rows if may_be_held for each in unpack(pack).to_pylist()]
    assert [(each["kind"], each["at_ms"], each["producer_group"]) for each in held] == [(Kind.CHECK, 5_000, "g")]
    assert not any(may_be_held for _, _, may_be_held, *_ in pack_outcomes([outcome(Kind.CHECK, 20)._replace(at_ms=-5)], 2, 100, Takeover()))


def test_only_what_was_there_at_the_takeover_may_be_held() -> None:
    sent = [
        outcome(kind, offset, partition) for kind in (Kind.COMMIT, Kind.CHECK, Kind.DISCARD) for offset in (9, 10) for partition in (0, 1)
    ]
    sent = [each._replace(op_partition=0, op_offset=0) for each in sent]
    verdicts = [outcome(Kind.COMMIT, 20)._replace(op_partition=1, op_offset=op_offset) for op_offset in (6, 7)]
    check = outcome(Kind.CHECK, 20)
    adopted = {Source.HALF: {0: 10}, Source.OP: {1: 7}}
    rows = pack_outcomes([*sent, *verdicts, check, outcome(Kind.QUARANTINE, 1)], 2, 100, Takeover(adopted))
    held = [place for _, _, may_be_held, _, pack in rows if may_be_held for place in unpack(pack)["offset"].to_pylist()]
    assert held == [9, 20, 9, 9]
    assert sum(count for *_, count, _ in rows) == len(sent) + 4


class State:
    """Spark's `GroupState`, as far as the operator uses it."""

    def __init__(self) -> None:
        self.get: tuple[int, bytes] | None = None

    @property
    def exists(self) -> bool:
        return self.get is not None

    def update(self, value: tuple[int, bytes]) -> None:
        self.get = value


def test_the_operator_takes_packs_and_yields_packs_and_a_report() -> None:
    function, state = bucket_function(ByBatch([(0, RULES)]), 2, 100, Takeover()), State()
    sent = packs([record(Source.HALF, 1, b"id", HALF), record(Source.OP, 1, b"id", OP)])
    [rows] = function((7,), [sent[sent["events"] != b""]], state)  # type: ignore[arg-type]
    assert rows["kind"].tolist() == [Kind.COMMIT, Kind.REPORT]
    assert unpack(rows["outcomes"][0])["transaction_id"].to_pylist() == ["id"]
    assert state.exists
