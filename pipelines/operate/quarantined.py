"""Reads `quarantine`, so that an operator sees which records were refused, and why."""

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from halfway.pipelines.storage.delta_tables import read_table, verify_exists
from halfway.schemas.settings import StorageSettings
from halfway.schemas.tables import Table


@dataclass(frozen=True)
class Quarantined:
    """A record that was refused: its place in Kafka, its time (ms), the id if it has one, and why."""

    source_topic: str
    source_partition: int
    source_offset: int
    source_timestamp_ms: int
    transaction_id: str | None
    reason: str
    detail: str | None
    epoch: int
    batch_id: int


def newest_quarantined(
    spark: SparkSession, storage: StorageSettings, limit: int | None, reason: str | None = None, transaction_id: str | None = None
) -> Sequence[Quarantined]:
    """Return rows of `quarantine`, those of the latest batch first, and within a batch the latest record.

    Args:
        spark: the session that reads the table.
        storage: where it is.
        limit: at most this many; None for all.
        reason: only those of this reason.
        transaction_id: only those of this id.

    Raises:
        TableError: no job has made the table yet.
        OwnershipError: the table is gone, or elsewhere.
    """
    verify_exists(spark, storage, Table.QUARANTINE)
    rows = read_table(spark, storage, Table.QUARANTINE)
    for name, wanted in (("reason", reason), ("transaction_id", transaction_id)):
        rows = rows if wanted is None else rows.where(F.col(name) == wanted)
    place = ("source_topic", "source_partition", "source_offset")
    rows = rows.orderBy(*(F.desc(name) for name in ("epoch", "batch_id", "source_timestamp", *place)))
    time_ms = F.unix_millis("source_timestamp")
    shown = rows.select(*place, time_ms, "transaction_id", "reason", "detail", "epoch", "batch_id")
    return [Quarantined(*row) for row in (shown if limit is None else shown.limit(limit)).collect()]
