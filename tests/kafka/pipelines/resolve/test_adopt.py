"""A new checkpoint takes existing tables over (decision 6). It writes everything that they do not hold yet."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from halfway.pipelines.resolve import sinks
from halfway.pipelines.resolve.job import ResolveJob
from halfway.pipelines.storage import delta_tables, first_start
from halfway.pipelines.storage.delta_tables import properties_of
from halfway.schemas.errors import JobFailedError, OwnershipError
from halfway.schemas.headers import Source
from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table
from tests.support.job_world import MakeWorld, World, half_headers
from tests.support.kafka_topics import delete_records, make_topics_anew
from tests.support.partition_records import topic_records
from tests.support.waiting import until

YEARS_MS = 200_000_000_000
"""From the tests' time 0 to a time later than now."""


def lose_checkpoint(world: World, folder: Path) -> None:
    """Delete the checkpoint, and set a new one."""
    shutil.rmtree(world.settings.storage.checkpoint)
    storage = world.settings.storage.model_copy(update={"checkpoint": str(folder / "new-checkpoint")})
    world.settings = world.settings.model_copy(update={"storage": storage})


def with_a_message_of_each_fate(world: MakeWorld) -> World:
    """Return a world whose job has committed `done`, discarded `dropped`, and waits for the verdict of `open`."""
    w = world(**{"resolution.transactionCheckMax": 1})
    w.half("done", 0)
    w.op("done", b"COMMIT", 1)
    w.half("dropped", 0)
    w.half("open", 30_000)
    for at_ms in (6_001, 36_001):
        w.tick(at_ms)
        w.resolve()
    return w


@pytest.mark.slow
def test_adopt_takes_tables_over_and_writes_nothing_again(world: MakeWorld, tmp_path: Path) -> None:
    w = with_a_message_of_each_fate(world)
    before = {table: w.rows(table) for table in Table}
    assert [row.transaction_id for row in before[Table.DISCARDED]] == ["dropped"]
    lose_checkpoint(w, tmp_path)
    w.op("open", b"COMMIT", 36_002)
    w.op("dropped", b"COMMIT", 36_003)
    w.tick(36_100)
    w.resolve(adopt=True)
    assert [row.transaction_id for row in w.rows(Table.DISCARDED)] == ["dropped"]
    assert set(w.by_id(Table.MESSAGES)) == {"done", "open"}
    w.resolve()
    assert set(w.by_id(Table.MESSAGES)) == {"done", "open"}


@pytest.mark.slow
def test_tables_that_were_copied_as_data_are_adopted_and_nothing_is_written_again(world: MakeWorld, tmp_path: Path) -> None:
    """Such a copy has no owner, no epoch and no `txn` of Delta: to begin at epoch 0 would repeat bookmarks and rows."""
    w = with_a_message_of_each_fate(world)
    copies = tmp_path / "copies"
    for table in Table:
        w.spark.read.format("delta").load(f"{w.settings.storage.warehouse}/{table}").write.format("delta").save(str(copies / table))
    storage = w.settings.storage.model_copy(update={"warehouse": str(copies)})
    w.settings = w.settings.model_copy(update={"storage": storage})
    with pytest.raises(OwnershipError, match=r"belongs to another checkpoint .*not named: the table is a copy.*--adopt"):
        w.resolve()
    lose_checkpoint(w, tmp_path)
    with pytest.raises(OwnershipError, match="--adopt"):
        w.resolve()
    w.op("open", b"COMMIT", 36_002)
    w.tick(36_100)
    w.resolve(adopt=True)
    assert {(row.transaction_id, row.epoch) for row in w.rows(Table.MESSAGES)} == {("done", 0), ("open", 1)}
    assert properties_of(w.spark, storage, Table.MESSAGES)["delta.appendOnly"] == "true"
    assert [row.transaction_id for row in w.rows(Table.DISCARDED)] == ["dropped"]


@pytest.mark.slow
def test_a_half_that_was_taken_is_not_refused_for_a_lower_limit_after_adopt(world: MakeWorld, tmp_path: Path) -> None:
    """Also the newest half of its partition, after which the tables hold nothing."""
    w = world(partitions=1)
    w.half("x", 0, body=b"b" * 100)
    w.tick(100)
    w.resolve()
    resolution = w.settings.resolution.model_copy(update={"max_body_bytes": 50})
    w.settings = w.settings.model_copy(update={"resolution": resolution})
    lose_checkpoint(w, tmp_path)
    w.op("x", b"COMMIT", 200)
    w.tick(300)
    w.resolve(adopt=True)
    assert (set(w.by_id(Table.MESSAGES)), w.rows(Table.QUARANTINE)) == ({"x"}, [])
    w.half("y", 400, body=b"b" * 100)
    w.tick(500)
    w.resolve()
    assert [row.reason for row in w.rows(Table.QUARANTINE)] == ["body_too_large"]


@pytest.mark.long
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_message_that_was_resent_is_there_once_also_if_its_discard_is_not_known_any_more(
    world: MakeWorld, tmp_path: Path, *, elsewhere: bool
) -> None:
    """The table `discarded` is from an older backup than `messages`. Partitions may have been added meanwhile."""
    w = world(partitions=2, **{"resolution.transactionCheckMax": 1})
    place, _ = w.half("a", 0)
    w.tick(6_001)
    w.resolve()
    discarded, backup = Path(w.settings.storage.warehouse) / "discarded", tmp_path / "backup"
    shutil.copytree(discarded, backup)
    w.tick(36_001)
    w.resolve()
    assert [row.transaction_id for row in w.rows(Table.DISCARDED)] == ["a"]
    w.produce(Source.HALF, "a", b"body", half_headers(INCARNATION=b"1"), 40_000, 1 - place if elsewhere else place)
    w.op("a", b"COMMIT", 40_001, INCARNATION=b"1")
    w.tick(40_002)
    w.resolve()
    before = w.rows(Table.MESSAGES)
    lose_checkpoint(w, tmp_path)
    shutil.rmtree(discarded)
    shutil.copytree(backup, discarded)
    w.op("a", b"COMMIT", 40_003)
    w.tick(40_004)
    w.resolve(adopt=True)
    assert w.rows(Table.MESSAGES) == before
    assert [row.incarnation for row in before] == [1]


def limited(world: World, records: int) -> Settings:
    """Return settings for a run in several batches. The later batches must behave as the first one after the start."""
    kafka = world.settings.kafka.model_copy(update={"max_offsets_per_trigger": records})
    return world.settings.model_copy(update={"kafka": kafka})


@pytest.mark.long
def test_a_discarded_half_is_neither_checked_nor_discarded_again_long_after(world: MakeWorld, tmp_path: Path) -> None:
    w = world(partitions=1, **{"resolution.transactionCheckMax": 1})
    w.half("dropped", 0)
    for at_ms in (6_001, 36_001):
        w.tick(at_ms)
        w.resolve()
    before, asked = w.rows(Table.DISCARDED), w.checks()
    assert [row.transaction_id for row in before] == ["dropped"]
    lose_checkpoint(w, tmp_path)
    w.tick(YEARS_MS)
    reports = w.resolve(limited(w, 5), adopt=True)
    assert len(reports) > 1
    assert {name: sum(report.counts[name] for report in reports) for name in ("adopted", "discarded")} == {"adopted": 1, "discarded": 0}
    assert w.rows(Table.DISCARDED) == before
    assert w.checks() == asked


@pytest.mark.long
def test_every_batch_leaves_out_the_rows_that_the_tables_hold(world: MakeWorld, tmp_path: Path) -> None:
    w = world(partitions=1)
    w.half("a", 0)
    w.half("b", 1)
    w.op("a", b"COMMIT", 2)
    w.tick(YEARS_MS)
    w.op("b", b"COMMIT", YEARS_MS + 1)
    w.resolve()
    before = w.by_id(Table.MESSAGES)
    assert set(before) == {"a", "b"}
    lose_checkpoint(w, tmp_path)
    # The last batch has the commit of b, and a horizon that is later than now.
    reports = w.resolve(limited(w, 4), adopt=True)
    assert [report.counts["committed"] for report in reports] == [1, 1]
    assert w.by_id(Table.MESSAGES) == before


@pytest.mark.long
def test_a_half_at_the_same_offset_of_a_recreated_topic_is_another_half(world: MakeWorld, tmp_path: Path) -> None:
    w = world(partitions=1)
    old = w.half("old", 0)
    w.op("old", b"COMMIT", 1)
    w.tick(100)
    w.resolve()
    make_topics_anew(w.settings)
    lose_checkpoint(w, tmp_path)
    again = World(w.spark, w.settings)
    assert again.half("new", 200) == old
    again.op("new", b"COMMIT", 201)
    again.tick(300)
    again.resolve(adopt=True)
    assert set(again.by_id(Table.MESSAGES)) == {"old", "new"}


@pytest.mark.long
def test_topics_that_were_made_anew_are_refused_also_when_they_have_grown(world: MakeWorld, tmp_path: Path) -> None:
    """Spark compares offsets alone: it would skip what the new topics hold before those that it has read to."""
    w = world(partitions=1)
    for number in range(3):
        w.half(f"old{number}", 0)
        w.op(f"old{number}", b"COMMIT", 1)
    w.tick(100)
    w.resolve()
    make_topics_anew(w.settings)
    again = World(w.spark, w.settings)
    for number in range(9):
        again.half(f"new{number}", 200)
        again.op(f"new{number}", b"COMMIT", 201)
    again.tick(300)
    with pytest.raises(OwnershipError, match=r"it was deleted and recreated, .* --adopt"):
        again.resolve()
    lose_checkpoint(again, tmp_path)
    again.resolve(adopt=True)
    assert set(again.by_id(Table.MESSAGES)) == {*(f"old{n}" for n in range(3)), *(f"new{n}" for n in range(9))}


@pytest.mark.slow
def test_a_replay_of_a_discarded_message_comes_out_after_adopt(world: MakeWorld, tmp_path: Path) -> None:
    """The former incarnation must not come back as pending, or its successor would be refused (R12)."""
    w = world(partitions=1, **{"resolution.transactionCheckMax": 1})
    w.half("x", 0)
    for at_ms in (6_001, 36_001):
        w.tick(at_ms)
        w.resolve()
    assert set(w.by_id(Table.DISCARDED)) == {"x"}
    w.half("x", 40_000, INCARNATION=b"1")  # as `halfway replay` sends it
    asked = w.checks()
    lose_checkpoint(w, tmp_path)
    w.op("x", b"COMMIT", 40_001, INCARNATION=b"1")
    w.tick(40_002)
    [report] = w.resolve(adopt=True)
    assert report.counts["adopted"] == 1
    assert [(row["transaction_id"], row["incarnation"], row["epoch"]) for row in w.rows(Table.MESSAGES)] == [("x", 1, 1)]
    assert len(w.rows(Table.DISCARDED)) == 1
    assert w.rows(Table.QUARANTINE) == []
    assert w.checks() == asked


@pytest.mark.long
def test_a_second_start_still_knows_what_was_discarded(world: MakeWorld, tmp_path: Path) -> None:
    w = world(partitions=1, **{"resolution.transactionCheckMax": 1})
    w.half("x", 0)
    w.half("y", 1)
    for at_ms in (6_002, 36_002):
        w.tick(at_ms)
        w.resolve()
    lose_checkpoint(w, tmp_path)
    stop_after_one = ResolveJob(limited(w, 1), adopt=True, on_batch=lambda _: stop_after_one.stop())
    continuous = w.settings.trigger.model_copy(update={"available_now": False, "interval": 0})
    stop_after_one._settings = limited(w, 1).model_copy(update={"trigger": continuous})
    stop_after_one.run(lambda: w.spark)
    w.half("y", 40_000, INCARNATION=b"1")
    w.op("y", b"COMMIT", 40_001, INCARNATION=b"1")
    w.tick(40_002)
    w.resolve()
    assert set(w.by_id(Table.MESSAGES)) == {"y"}


@pytest.mark.long
def test_what_a_former_checkpoint_quarantined_is_not_quarantined_again(world: MakeWorld, tmp_path: Path) -> None:
    w = world(partitions=1, **{"resolution.transactionCheckMax": 1})
    w.half("a", 0)
    w.op("a", b"COMMIT", 1)
    w.op("a", b"ROLLBACK", 2)
    w.op("nobody", b"COMMIT", 3)
    w.half("bad", 4, PGROUP=None)
    w.half("x", 5)
    w.tick(6_006)
    w.resolve()
    w.tick(36_006)
    w.resolve()
    w.op("x", b"COMMIT", 36_007)
    w.tick(36_008)
    w.resolve()
    before = w.rows(Table.QUARANTINE)
    assert sorted(row["reason"] for row in before) == ["conflicting_verdict", "late_verdict", "missing_header", "orphan_op"]
    lose_checkpoint(w, tmp_path)
    w.op("new", b"COMMIT", 36_009)
    w.tick(YEARS_MS)
    reports = w.resolve(adopt=True)
    assert sum(report.counts["adopted"] for report in reports) == 5
    again = w.rows(Table.QUARANTINE)
    assert [row["transaction_id"] for row in again if row not in before] == ["new"]
    assert len(again) == len(before) + 1


_SHORT_TIMES = {"resolution.transactionTimeOut": 1, "resolution.max_clock_skew": 1_000}


@pytest.mark.long
def test_verdicts_of_halves_that_have_aged_out_are_counted_and_no_orphans(world: MakeWorld, tmp_path: Path) -> None:
    w = world(partitions=1, timestamps="LogAppendTime", **{**_SHORT_TIMES, "resolution.tick_interval": 100})
    w.half("rolled back")
    w.op("rolled back", b"ROLLBACK")
    kafka = w.settings.kafka
    written_ms = max(record.timestamp()[1] for record in topic_records(kafka.servers(), kafka.op_topic))
    apart_ms = sum(_SHORT_TIMES.values())
    until(lambda: time.time_ns() // 1_000_000 > written_ms + apart_ms, "the broker's clock, this machine's, has moved by more than that")
    w.half("kept")
    w.op("kept", b"COMMIT")
    w.resolve()
    assert set(w.by_id(Table.MESSAGES)) == {"kept"}
    kept = w.rows(Table.MESSAGES)[0]
    delete_records(w.settings.kafka, w.settings.kafka.half_topic, {kept["half_partition"]: kept["half_offset"]})
    lose_checkpoint(w, tmp_path)
    reports = w.resolve(adopt=True)
    w.resolve()
    assert sum(report.counts["aged_out"] for report in reports) == 1
    assert w.rows(Table.QUARANTINE) == []
    assert w.rows(Table.MESSAGES) == [kept]


@pytest.mark.long
@pytest.mark.parametrize("tables", ["kept", "lost"])
def test_an_adoption_that_was_killed_before_its_first_batch_reads_everything_whatever_the_settings_are_then(
    tables: str, world: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world()
    w.half("settled", 0)
    w.op("settled", b"COMMIT", 1)
    w.tick(2)
    w.resolve()
    w.half("pending", 3)
    w.half("committed", 4)
    w.op("committed", b"COMMIT", 5)
    lose_checkpoint(w, tmp_path)
    if tables == "lost":
        shutil.rmtree(w.settings.storage.warehouse)
    with monkeypatch.context() as patch:
        kill_at(patch, ResolveJob, "_run_query", 1)
        with pytest.raises(KilledError):
            w.resolve(adopt=True)
    usual = w.settings.model_copy(update={"kafka": w.settings.kafka.model_copy(update={"starting_offsets": "latest"})})
    w.op("pending", b"COMMIT", 6)
    w.tick(7)
    w.resolve(usual)
    assert set(w.by_id(Table.MESSAGES)) == {"settled", "pending", "committed"}


@pytest.mark.slow
def test_an_adoption_in_the_folder_of_a_start_that_was_killed_reads_everything(world: MakeWorld, tmp_path: Path) -> None:
    """Spark has noted there where to begin, with `latest` at the end of the topics as it was, and planned no batch."""
    w = world(partitions=1)
    w.half("pending", 0)
    w.tick(1)
    w.resolve()
    lose_checkpoint(w, tmp_path)
    wrong = w.settings.storage.model_copy(update={"warehouse": str(tmp_path / "elsewhere")})
    latest = w.settings.kafka.model_copy(update={"starting_offsets": "latest"})
    w.resolve(w.settings.model_copy(update={"storage": wrong, "kafka": latest}))
    for written_later in ("offsets", "commits", "state"):
        shutil.rmtree(Path(wrong.checkpoint) / written_later)
    assert (Path(wrong.checkpoint) / "sources" / "0" / "0").exists()
    w.op("pending", b"COMMIT", 2)
    w.tick(3)
    w.resolve(adopt=True)
    assert set(w.by_id(Table.MESSAGES)) == {"pending"}


@pytest.mark.long
def test_a_verdict_makes_one_message_also_if_its_half_is_in_two_partitions(world: MakeWorld, tmp_path: Path) -> None:
    """It was sent again after partitions were added. With a rate limit the copy may be read first; here it is alone."""
    w = world(partitions=2)
    _, offset = w.produce(Source.HALF, "a", b"body", half_headers(), 0, partition=0)
    w.op("a", b"COMMIT", 1)
    w.produce(Source.HALF, "a", b"body", half_headers(), 2, partition=1)
    w.tick(3)
    w.resolve()
    before = w.rows(Table.MESSAGES)
    delete_records(w.settings.kafka, w.settings.kafka.half_topic, {0: offset + 1})
    lose_checkpoint(w, tmp_path)
    w.resolve(adopt=True)
    assert w.rows(Table.MESSAGES) == before
    assert len(before) == 1


class KilledError(Exception):
    """Stands for a kill -9: nothing after it is done."""


STEPS = [
    (first_start, "write_json", 1),
    (delta_tables, "_take_over", 1),
    (delta_tables, "_fence", 1),
    (delta_tables, "_take_over", 2),
    (delta_tables, "_fence", 3),
    (first_start, "last_settled_ms", 1),
    (first_start, "write_manifest", 1),
    (sinks, "append_once", 1),
]


@pytest.mark.timeout(600)
@pytest.mark.long
def test_an_adopting_start_that_is_killed_anywhere_is_done_again(world: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a later start without --adopt, once the tables are this checkpoint's, writes nothing again."""
    w = world(partitions=1, **{"resolution.transactionCheckMax": 1})
    w.half("a", 0)
    w.half("b", 1)
    w.op("a", b"COMMIT", 2)
    w.op("nobody", b"COMMIT", 3)
    w.tick(6_004)
    w.resolve()
    w.tick(36_004)
    w.resolve()
    before = {table: w.rows(table) for table in Table}
    assert {table: len(rows) for table, rows in before.items()} == {Table.MESSAGES: 1, Table.DISCARDED: 1, Table.QUARANTINE: 1}
    for number, (module, name, calls) in enumerate(STEPS):
        lose_checkpoint(w, tmp_path / str(number))
        w.half(f"new{number}", 36_005)
        w.op(f"new{number}", b"COMMIT", 36_006)
        w.tick(36_007)
        with monkeypatch.context() as patch:
            killed = kill_at(patch, module, name, calls)
            with pytest.raises((KilledError, JobFailedError)):
                w.resolve(adopt=True)
            assert killed, name
        try:
            w.resolve()
        except OwnershipError:  # not all tables are its own yet
            w.resolve(adopt=True)
        assert w.by_id(Table.MESSAGES).keys() == {"a", *(f"new{n}" for n in range(number + 1))}
        assert max(w.rows(Table.MESSAGES), key=lambda row: row["epoch"])["transaction_id"] == f"new{number}"
        assert [w.rows(table) for table in (Table.DISCARDED, Table.QUARANTINE)] == [before[Table.DISCARDED], before[Table.QUARANTINE]]


def kill_at(patch: pytest.MonkeyPatch, module: Any, name: str, calls: int) -> list[bool]:
    """Let the `calls`th call of a function raise, and return a list that is then not empty."""
    original, left, killed = getattr(module, name), [calls], []

    def call(*args: Any, **more: Any) -> Any:
        left[0] -= 1
        if left[0] <= 0:
            killed.append(True)
            raise KilledError(name)
        return original(*args, **more)

    patch.setattr(module, name, call)
    return killed


@pytest.mark.long
def test_a_killed_start_takes_tables_back_that_another_checkpoint_took_from_it(
    world: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one has fenced its query: Delta would skip its appends, and the messages would count as lost."""
    w = world()
    first = w.settings
    with monkeypatch.context() as patch:
        kill_at(patch, first_start, "write_manifest", 1)
        with pytest.raises(KilledError):
            w.resolve()
    storage = first.storage.model_copy(update={"checkpoint": str(tmp_path / "other")})
    w.half("a", 0)
    w.op("a", b"COMMIT", 1)
    w.tick(2)
    w.resolve(first.model_copy(update={"storage": storage}), adopt=True)
    w.half("b", 3)
    w.op("b", b"COMMIT", 4)
    w.tick(5)
    w.resolve(first, adopt=True)
    assert set(w.by_id(Table.MESSAGES)) == {"a", "b"}
    assert w.rows(Table.QUARANTINE) == []


@pytest.mark.long
def test_a_start_on_no_tables_that_was_killed_does_not_hide_what_adopted_tables_hold(
    world: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest says that the tables held nothing."""
    w = world()
    w.half("a", 0)
    w.op("a", b"COMMIT", 1)
    w.tick(2)
    w.resolve()
    storage = w.settings.storage.model_copy(update={"checkpoint": str(tmp_path / "later")})
    later = w.settings.model_copy(update={"storage": storage})
    elsewhere = later.model_copy(update={"storage": storage.model_copy(update={"warehouse": str(tmp_path / "elsewhere")})})
    with monkeypatch.context() as patch:
        kill_at(patch, ResolveJob, "_run_query", 1)
        with pytest.raises(KilledError):
            w.resolve(elsewhere)
    w.resolve(later, adopt=True)
    assert set(w.by_id(Table.MESSAGES)) == {"a"}
