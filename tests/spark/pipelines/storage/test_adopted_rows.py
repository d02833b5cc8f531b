"""What a new checkpoint takes from the tables about records that it reads again, with real Spark and Delta."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from halfway.conf.loader import load_settings
from halfway.pipelines.storage.adopted_rows import former_records
from halfway.pipelines.storage.delta_tables import append_once, claim_tables
from halfway.schemas.headers import Source
from halfway.schemas.settings import StorageSettings
from halfway.schemas.tables import TABLE_SCHEMAS, Table

AT = datetime(2026, 1, 2, tzinfo=UTC)
AT_MS = int(AT.timestamp() * 1000)
HALF, OP = Source.HALF, Source.OP


def append(spark: SparkSession, storage: StorageSettings, table: Table, *rows: dict[str, Any]) -> None:
    schema = TABLE_SCHEMAS[table]
    whole = [tuple(row.get(name) for name in schema.fieldNames()) for row in rows]
    append_once(spark.createDataFrame(whole, schema), storage, table, "job", 0)


def refused(topic: str, partition: int, offset: int, reason: str = "bad_header", epoch: int = 0) -> dict[str, Any]:
    place = {"source_topic": topic, "source_partition": partition, "source_offset": offset, "source_timestamp": AT}
    return {**place, "reason": reason, "epoch": epoch}


def discarded(partition: int, offset: int, epoch: int = 0) -> dict[str, Any]:
    return {"half_partition": partition, "half_offset": offset, "half_at": AT, "discarded_at": AT, "epoch": epoch}


def test_what_former_epochs_did_to_records_that_can_still_be_read(spark: SparkSession, tmp_path: Path) -> None:
    own = {"storage.warehouse": str(tmp_path), "kafka.half_topic": "half", "kafka.op_topic": "op"}
    settings = load_settings(environ={}, overrides=own)
    storage = settings.storage
    claim_tables(spark, storage, "job")
    rows = [refused("half", 0, offset) for offset in (8, 9, 10)] + [refused("half", 1, 9), refused("half", 2, 99), refused("op", 0, 9)]
    others = [refused("half", 0, 11, "half_lost"), refused("half", 0, 12, epoch=1), refused("other", 0, 13)]
    append(spark, storage, Table.QUARANTINE, *rows, *others)
    append(spark, storage, Table.DISCARDED, *(discarded(1, offset) for offset in (8, 9, 10)), discarded(1, 11, epoch=1))
    found = former_records(spark, storage, settings.kafka, 1, {"half": {0: 9, 1: 10}, "op": {0: 0}})
    assert sorted(tuple(row.values()) for row in found.to_pylist()) == [
        (HALF, 0, 9, AT_MS, 0),
        (HALF, 0, 10, AT_MS, 0),
        (HALF, 1, 10, AT_MS, AT_MS),
        (OP, 0, 9, AT_MS, 0),
    ]
