"""The state reader before the first batch, between batches, and beside a running job."""

import threading
from pathlib import Path

import pyarrow
import pytest
from pyspark.sql import SparkSession

from halfway.pipelines.resolve.job import ResolveJob
from halfway.pipelines.storage.locks import job_lock
from halfway.pipelines.storage.manifest import MANIFEST_FILE
from halfway.pipelines.storage.state_reader import read_state
from halfway.schemas.errors import HalfwayError
from halfway.schemas.settings import Settings
from halfway.schemas.state_format import ENTRY_SCHEMA
from halfway.transforms.views.pending import view_pending
from tests.support.job_world import START_MS, MakeWorld
from tests.support.waiting import until


def pending_ids(spark: SparkSession, settings: Settings) -> list[str]:
    ids: list[str] = view_pending(read_state(lambda: spark, settings.storage).rows).transactions["transaction_id"].to_pylist()
    return ids


def test_before_the_first_batch_the_state_is_empty(world: MakeWorld) -> None:
    w = world()
    with pytest.raises(
        HalfwayError,
        match=r"there is no state in .* yet: run `halfway resolve`, which makes it; if the job runs in another folder, go there, or set",
    ):
        read_state(lambda: w.spark, w.settings.storage)
    with job_lock(w.settings.storage):  # a job starts
        stored = read_state(lambda: w.spark, w.settings.storage)
    assert (stored.batch_id, stored.rows, stored.read_to) == (None, [], {})


def test_after_a_batch_the_state_holds_the_pending_transactions(world: MakeWorld) -> None:
    w = world()
    partition, offset = w.half("b", 100, INCARNATION=b"2")
    w.half("a", 50)
    w.half("c", 60)
    w.op("c", b"COMMIT", 61)
    w.tick(6_101)
    w.resolve()
    stored = read_state(lambda: w.spark, w.settings.storage)
    view = view_pending(stored.rows)
    assert stored.batch_id == 0
    assert len(stored.rows) == 4, "one row a bucket"
    assert {topic: sum(places.values()) for topic, places in stored.read_to.items()} == {
        w.settings.kafka.half_topic: 5,
        w.settings.kafka.op_topic: 3,
    }
    for _, payload in stored.rows:
        with pyarrow.ipc.open_stream(payload) as reader:
            assert reader.schema.equals(ENTRY_SCHEMA), "the checkpoint holds Arrow, which runs no code when it is read"
            reader.read_all()
    assert view.horizon_ms == START_MS + 6_101
    assert view.totals["committed"] == 1
    assert view.transactions.to_pylist()[1] == {
        "transaction_id": "b",
        "incarnation": 2,
        "producer_group": "g",
        "topic": "orders",
        "start_ms": START_MS + 100,
        "age_ms": 6_001,
        "check_times": 1,
        "next_due_ms": START_MS + 36_101,
        "half_partition": partition,
        "half_offset": offset,
    }


def test_the_state_can_be_read_while_the_job_runs(world: MakeWorld) -> None:
    """Each read returns one whole batch, although the job deletes old batches at once."""
    w = world(**{"trigger.available_now": False, "trigger.interval": 0, "resolution.tick_interval": "20ms"}, timestamps="LogAppendTime")
    w.spark.conf.set("spark.sql.streaming.minBatchesToRetain", "1")
    for n in range(20):
        w.half(f"t{n}")
    job = ResolveJob(w.settings)
    thread = threading.Thread(target=job.run, args=(lambda: w.spark,))
    thread.start()
    try:
        until(Path(w.settings.storage.checkpoint, MANIFEST_FILE).exists, "the checkpoint")
        until(lambda: len(pending_ids(w.spark, w.settings)) == 20, "the halves")
        seen = set()
        until(lambda: seen.add(read_state(lambda: w.spark, w.settings.storage).batch_id) or len(seen) > 5, "five batches more")
        assert len(pending_ids(w.spark, w.settings)) == 20
        assert job.failure is None  # Without a pause between two batches, the stop may come in the middle of one.
    finally:
        job.stop()
        thread.join(60)
        w.spark.conf.unset("spark.sql.streaming.minBatchesToRetain")


def test_buckets_are_spread_evenly_over_the_tasks(world: MakeWorld, spark: SparkSession, caplog: pytest.LogCaptureFixture) -> None:
    w = world(**{"state.buckets": 16, "state.shuffle_partitions": 3})
    tests_own = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "3")
    try:
        w.tick(1)
        w.resolve()
        stored = spark.read.format("statestore").load(w.settings.storage.checkpoint).groupBy("partition_id").count().collect()
        w.resolve()
        assert "setting_without_effect" not in caplog.text
        state = w.settings.state.model_copy(update={"shuffle_partitions": 5})
        w.resolve(w.settings.model_copy(update={"state": state}))
        assert "event=setting_without_effect name=state.shuffle_partitions checkpoint_has=3" in caplog.text
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", tests_own)
    assert sorted(count for _, count in stored) == [5, 5, 6]
