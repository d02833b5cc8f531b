"""A new checkpoint takes existing tables over (decision 6). It writes everything that they do not hold yet."""

import shutil
from pathlib import Path

import pytest

from halfway.pipelines.kafka.admin import admin_client
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table
from tests.support.job_world import MakeWorld, World

YEARS_MS = 200_000_000_000
"""From the tests' time 0 to a time later than now."""


def lose_checkpoint(world: World, folder: Path) -> None:
    """Delete the checkpoint, and set a new one."""
    shutil.rmtree(world.settings.storage.checkpoint)
    storage = world.settings.storage.model_copy(update={"checkpoint": str(folder / "new-checkpoint")})
    world.settings = world.settings.model_copy(update={"storage": storage})


def test_adopt_takes_tables_over_and_writes_nothing_again(world: MakeWorld, tmp_path: Path) -> None:
    w = world(**{"resolution.transactionCheckMax": 1})
    w.half("done", 0)
    w.op("done", b"COMMIT", 1)
    w.half("dropped", 0)
    w.half("open", 30_000)
    w.tick(6_001)
    w.resolve()
    w.tick(36_001)
    w.resolve()
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


def limited(world: World, records: int) -> Settings:
    """Return settings for a run in several batches. The later batches must behave as the first one after the start."""
    kafka = world.settings.kafka.model_copy(update={"max_offsets_per_trigger": records})
    return world.settings.model_copy(update={"kafka": kafka})


@pytest.mark.slow
def test_a_discarded_half_is_neither_checked_nor_discarded_again_long_after(world: MakeWorld, tmp_path: Path) -> None:
    w = world(partitions=1, **{"resolution.transactionCheckMax": 1})
    w.half("dropped", 0)
    for at_ms in (6_001, 36_001):
        w.tick(at_ms)
        w.resolve()
    before, asked = w.rows(Table.DISCARDED), w.checks()
    assert [row.transaction_id for row in before] == ["dropped"]
    lose_checkpoint(w, tmp_path)
    # The new checkpoint does not know of the discard. The half is pending, due for a check in one batch, and discarded
    # in the next.
    w.tick(YEARS_MS)
    reports = w.resolve(limited(w, 5), adopt=True)
    assert len(reports) > 1
    assert sum(report.counts["discarded"] for report in reports) == 1
    assert w.rows(Table.DISCARDED) == before
    assert w.checks() == asked


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


def test_a_half_at_the_same_offset_of_a_recreated_topic_is_another_half(world: MakeWorld, tmp_path: Path) -> None:
    w = world(partitions=1)
    old = w.half("old", 0)
    w.op("old", b"COMMIT", 1)
    w.tick(100)
    w.resolve()
    client, kafka = admin_client(w.settings.kafka), w.settings.kafka
    for deleted in client.delete_topics([kafka.half_topic, kafka.op_topic]).values():
        deleted.result(30)
    create_topics(w.settings, 1)
    lose_checkpoint(w, tmp_path)
    again = World(w.spark, w.settings)
    assert again.half("new", 200) == old
    again.op("new", b"COMMIT", 201)
    again.tick(300)
    again.resolve(adopt=True)
    assert set(again.by_id(Table.MESSAGES)) == {"old", "new"}
