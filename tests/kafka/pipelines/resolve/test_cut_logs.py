"""A broker whose disk was put back, and which has grown again since: the job would skip what is new there."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer
from pyspark.sql import SparkSession

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka import cut_logs
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.pipelines.local.broker import LocalBroker
from halfway.pipelines.resolve.job import ResolveJob
from halfway.pipelines.resolve.sinks import BatchWriter
from halfway.pipelines.storage.delta_tables import read_table
from halfway.pipelines.storage.state_reader import read_state
from halfway.schemas.errors import KafkaUnavailableError, RecordsLostError
from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table
from halfway.transforms.views.pending import view_pending
from tests.support.job_world import MakeWorld, half_headers, op_headers
from tests.support.kafka_topics import delete_records, unique_topics
from tests.support.partition_records import end_of as partition_end


def send(settings: Settings, ids: Sequence[str], action: bytes = b"") -> None:
    producer = Producer({"bootstrap.servers": settings.kafka.servers()})
    for transaction_id in ids:
        producer.produce(settings.kafka.half_topic, b"", transaction_id, partition=0, headers=half_headers())
        if action:
            producer.produce(settings.kafka.op_topic, b"", transaction_id, partition=0, headers=op_headers(action))
    assert producer.flush(60) == 0


def pending(settings: Settings, spark: SparkSession, *, adopt: bool = False) -> set[str]:
    """Run the job, and return what is pending after it."""
    ResolveJob(settings, adopt=adopt).run(lambda: spark)
    return set(view_pending(read_state(lambda: spark, settings.storage).rows).transactions["transaction_id"].to_pylist())


def end_of(settings: Settings) -> int:
    with Consumer({"bootstrap.servers": settings.kafka.servers(), "group.id": "test"}) as consumer:
        return partition_end(consumer, settings.kafka.half_topic, 0)


class CutLog:
    """A job that has read one half, and a broker whose disk can be put back to that time."""

    def __init__(self, broker: LocalBroker, spark: SparkSession, folder: Path, **overrides: object) -> None:
        self._broker, self._spark, self._folder = broker, spark, folder
        places = {"storage.warehouse": str(folder / "tables"), "storage.checkpoint": str(folder / "checkpoint")}
        times = {"trigger.available_now": True, "resolution.transactionTimeOut": "1h"}
        self._own = {**unique_topics(broker), **places, **times, **overrides}
        self.settings = load_settings(environ={}, overrides=self._own)
        create_topics(self.settings, 1)
        send(self.settings, ["kept"])
        assert pending(self.settings, spark) == {"kept"}
        broker.stop()
        shutil.copytree(broker.directory, folder / "copy")
        broker.start()

    def put_back(self) -> None:
        self._broker.stop()
        shutil.rmtree(self._broker.directory)
        shutil.copytree(self._folder / "copy", self._broker.directory)
        self._broker.start()

    def adopted(self) -> Settings:
        return load_settings(environ={}, overrides={**self._own, "storage.checkpoint": str(self._folder / "adopted")})


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("tick_interval", "count"), [("1s", 2), (0, 2), pytest.param("1s", 10_050, marks=pytest.mark.slow)])
def test_a_log_that_was_cut_and_has_grown_again_is_refused(
    own_broker: LocalBroker, spark: SparkSession, tmp_path: Path, tick_interval: str | int, count: int
) -> None:
    log = CutLog(own_broker, spark, tmp_path, **{"resolution.tick_interval": tick_interval})
    lost, new = ([f"{what}-{number}" for number in range(many)] for what, many in (("lost", count), ("new", count + 20)))
    send(log.settings, lost)
    assert pending(log.settings, spark) == {"kept", *lost}, "a broker that has only been started again lacks nothing"
    log.put_back()
    send(log.settings, new)
    with pytest.raises(RecordsLostError, match=r"partition 0 of half-\w+ has lost records that this job had read, and new ones are in"):
        pending(log.settings, spark)
    assert pending(log.adopted(), spark, adopt=True) == {"kept", *new}


def test_a_start_whose_last_tick_retention_has_deleted_goes_on(world: MakeWorld) -> None:
    """With CreateTime a half after it may have an earlier time, by a clock that is a little behind."""
    w = world(partitions=1)
    w.tick(10_000)
    _, offset = w.half("behind", 9_000)
    w.resolve()
    delete_records(w.settings.kafka, w.settings.kafka.half_topic, {0: offset})
    w.half("later", 11_000)
    w.op("later", b"COMMIT", 11_000)
    w.resolve()
    assert w.by_id(Table.MESSAGES).keys() == {"later"}


@pytest.mark.timeout(300)
def test_a_log_that_is_still_shorter_than_what_was_read_is_refused_before_a_tick_lengthens_it(
    own_broker: LocalBroker, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its first tick the log would be as long as before, and the new half would never be read."""
    log = CutLog(own_broker, spark, tmp_path)
    send(log.settings, ["lost-0", "lost-1"])
    pending(log.settings, spark)
    log.put_back()
    missing = read_state(lambda: spark, log.settings.storage).read_to[log.settings.kafka.half_topic][0]
    missing -= end_of(log.settings)
    new = [f"new-{number}" for number in range(missing - 1)]
    send(log.settings, new)
    monkeypatch.setattr(cut_logs, "READ_LIMIT_S", 2.0)
    for _ in range(2):
        with pytest.raises(KafkaUnavailableError, match=r"ends at offset \d+ of partition 0, and \d+ was read .* `halfway resolve --ad"):
            pending(log.settings, spark)
    assert pending(log.adopted(), spark, adopt=True) == {"kept", *new}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("action", [b"COMMIT", b"UNKNOWN"])
def test_a_batch_that_is_repeated_with_other_records_is_refused(
    own_broker: LocalBroker, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: bytes
) -> None:
    """It was appended and not committed. Delta would leave out its new commits; and without any, what the table has
    would be pending again, and come twice."""
    log = CutLog(own_broker, spark, tmp_path)
    send(log.settings, ["kept", "lost"], b"COMMIT")
    with monkeypatch.context() as failing:
        failing.setattr(BatchWriter, "_send_checks", _end)
        with pytest.raises(KafkaUnavailableError):
            pending(log.settings, spark)
    log.put_back()
    new = [f"new-{number}" for number in range(20)]
    send(log.settings, new, action)
    with pytest.raises(RecordsLostError, match=r"was made of other records than Kafka has now"):
        pending(log.settings, spark)
    is_committed = action == b"COMMIT"
    assert pending(log.adopted(), spark, adopt=True) == {"kept", *([] if is_committed else new)}
    rows = read_table(spark, log.settings.storage, Table.MESSAGES).select("transaction_id").collect()
    assert sorted(row[0] for row in rows) == sorted(["kept", "lost", *(new if is_committed else [])])


def _end(*_: object) -> None:
    raise KafkaUnavailableError("the broker has lost its power")
