"""Reads from tables what former checkpoints have done, for a new one that reads the same records again (decision 6)."""

from collections.abc import Mapping
from functools import reduce

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from halfway.pipelines.storage.delta_tables import read_table
from halfway.schemas.events import FORMER_SCHEMA
from halfway.schemas.headers import Source
from halfway.schemas.outcomes import Reason
from halfway.schemas.settings import KafkaSettings, StorageSettings
from halfway.schemas.tables import Table


def last_settled_ms(spark: SparkSession, storage: StorageSettings) -> int:
    """Return the time of the last commit or discard in the tables; 0 if they hold none."""
    ends = ((Table.MESSAGES, "committed_at"), (Table.DISCARDED, "discarded_at"))
    times = reduce(DataFrame.union, (read_table(spark, storage, table).select(F.unix_millis(column).alias("ms")) for table, column in ends))
    return times.agg(F.max("ms")).collect()[0][0] or 0


def last_epoch(spark: SparkSession, storage: StorageSettings, table: Table) -> int | None:
    """Return the greatest epoch of a table's rows; None without rows. Those of an earlier version are of epoch 0."""
    rows = read_table(spark, storage, table)
    epoch = F.coalesce("epoch", F.lit(0)) if "epoch" in rows.columns else F.lit(0)
    [[last]] = rows.agg(F.max(epoch)).collect()
    return None if last is None else int(last)


def former_records(
    spark: SparkSession, storage: StorageSettings, kafka: KafkaSettings, epoch: int, first: Mapping[str, Mapping[int, int]]
) -> pa.Table:
    """Return the records that the tables hold from before an epoch (FORMER_SCHEMA), without committed halves.

    A lost half (R17) is left out, because no former checkpoint could read it. Records that will not be read again are
    left out too: those of years would not fit into the driver's memory.

    Args:
        spark: the session.
        storage: where the tables are.
        kafka: names the topics.
        epoch: the new checkpoint's.
        first: by topic and partition, the first offset that may be read again.
    """

    def rows(table: Table) -> DataFrame:
        return read_table(spark, storage, table).where(F.coalesce(F.col("epoch"), F.lit(-1)) < epoch)

    discarded = rows(Table.DISCARDED).select(
        F.lit(kafka.half_topic), "half_partition", "half_offset", F.unix_millis("half_at"), F.unix_millis("discarded_at")
    )
    refused = rows(Table.QUARANTINE).where(F.col("reason") != str(Reason.HALF_LOST))
    refused = refused.select("source_topic", "source_partition", "source_offset", F.unix_millis("source_timestamp"), F.lit(0))
    sources = ((Source.HALF, kafka.half_topic), (Source.OP, kafka.op_topic))
    read_again = [(int(source), topic, *each) for source, topic in sources for each in first.get(topic, {}).items()]
    places = spark.createDataFrame(read_again, "source INT, topic STRING, partition INT, first BIGINT")
    found = discarded.union(refused).toDF("topic", "partition", "offset", "at_ms", "discarded_ms")
    kept = found.join(F.broadcast(places), ["topic", "partition"]).where("offset >= first")
    return kept.select(*FORMER_SCHEMA.names).toArrow().cast(FORMER_SCHEMA)
