"""Tables in a catalog that outlives the job: Hive's metastore, as `storage.catalog_schema`."""

import subprocess
from pathlib import Path

import pytest
from confluent_kafka import Producer
from deltalake import DeltaTable

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.pipelines.local.broker import LocalBroker
from tests.support.job_world import half_headers, op_headers
from tests.support.kafka_topics import unique_topics
from tests.support.submit import spark_submit

CREATE = """
from pyspark.sql import SparkSession
SparkSession.builder.getOrCreate().sql("CREATE DATABASE payments")
"""


@pytest.mark.timeout(900)
def test_runs_compaction_and_another_checkpoint_on_tables_of_a_metastore(broker: LocalBroker, tmp_path: Path) -> None:
    options: dict[str, object] = {
        **unique_topics(broker),
        "storage.catalog_schema": "spark_catalog.payments",
        "storage.checkpoint": str(tmp_path / "checkpoint"),
        "state.buckets": 4,
        "state.shuffle_partitions": 1,
        "resolution.transactionTimeOut": "1h",
    }
    settings = load_settings(environ={}, overrides=options)
    create_topics(settings, 2)
    conf = {"spark.sql.catalogImplementation": "hive", "spark.sql.warehouse.dir": str(tmp_path / "warehouse")}
    producer = Producer({"bootstrap.servers": settings.kafka.servers(), "partitioner": "murmur2_random"})
    log = tmp_path / "log"
    script = tmp_path / "create.py"
    script.write_text(CREATE)

    def done(process: "subprocess.Popen[bytes]") -> int:
        return process.wait(240)

    def commit(first: int) -> None:
        for n in range(first, first + 20):
            producer.produce(settings.kafka.half_topic, b"body", f"t{n}", headers=half_headers())
            producer.produce(settings.kafka.op_topic, b"", f"t{n}", headers=op_headers(b"COMMIT"))
        assert producer.flush(30) == 0

    def run(*arguments: str, **changed: object) -> int:
        return done(spark_submit(log, *arguments, conf=conf, options={**options, **changed}))

    assert done(spark_submit(log, conf=conf, options={}, script=script)) == 0, log.read_text()[-3000:]
    commit(0)
    assert run("resolve", "--available-now") == 0, log.read_text()[-3000:]
    commit(20)
    other = {"storage.checkpoint": str(tmp_path / "other")}
    assert run("resolve", "--available-now", **other) == 1
    assert "belongs to another checkpoint" in log.read_text().splitlines()[-1]
    assert run("resolve", "--available-now", "--adopt", **other) == 0, log.read_text()[-3000:]
    assert run("optimize", **other) == 0, log.read_text()[-3000:]
    messages = DeltaTable(str(tmp_path / "warehouse" / "payments.db" / "messages"))
    assert len(messages.file_uris()) == 1, "the files of both checkpoints are one"
    rows = messages.to_pyarrow_table(columns=["transaction_id"])
    assert sorted(rows["transaction_id"].to_pylist()) == sorted(f"t{n}" for n in range(40))
