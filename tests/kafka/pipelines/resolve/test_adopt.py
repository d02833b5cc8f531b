"""A new checkpoint takes existing tables over (design §1.6): what they hold is written no second time, everything else is."""

import shutil
from pathlib import Path

import pytest

from halfway.pipelines.kafka.admin import admin_client
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table
from tests.support.job_world import MakeWorld, World

YEARS_MS = 200_000_000_000
"""Later than now, from the tests' time 0 on."""


def lose_checkpoint(world: World, folder: Path) -> None:
    """Remove the checkpoint, and name a new one."""
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
    """Settings for a run in several batches: what holds for the first one after a start must hold for the next."""
    kafka = world.settings.kafka.model_copy(update={"max_offsets_per_trigger": records})
    return world.settings.model_copy(update={"kafka": kafka})


@pytest.mark.slow
def test_what_was_discarded_is_neither_asked_about_nor_discarded_again_long_after(world: MakeWorld, tmp_path: Path) -> None:
    w = world(partitions=1, **{"resolution.transactionCheckMax": 1})
    w.half("dropped", 0)
    for at_ms in (6_001, 36_001):
        w.tick(at_ms)
        w.resolve()
    before, asked = w.rows(Table.DISCARDED), w.checks()
    assert [row.transaction_id for row in before] == ["dropped"]
    lose_checkpoint(w, tmp_path)
    # The new checkpoint knows nothing of the discard: for it the half is pending, asked about in one batch, and due in the next.
    w.tick(YEARS_MS)
    reports = w.resolve(limited(w, 5), adopt=True)
    assert len(reports) > 1
    assert sum(report.counts["discarded"] for report in reports) == 1
    assert w.rows(Table.DISCARDED) == before
    assert w.checks() == asked


def test_what_the_tables_hold_is_left_out_of_every_batch_that_reads_it_again(world: MakeWorld, tmp_path: Path) -> None:
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
    # The last batch brings b's commit, and with it a horizon that is later than now.
    reports = w.resolve(limited(w, 4), adopt=True)
    assert [report.counts["committed"] for report in reports] == [1, 1]
    assert w.by_id(Table.MESSAGES) == before


def test_a_half_of_a_topic_made_anew_is_not_taken_for_the_one_that_lay_there(world: MakeWorld, tmp_path: Path) -> None:
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
