"""A table of typed orders, kept up to date from the committed messages of one topic."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F


@dp.table(name="orders", format="delta", comment="the committed messages of the topic orders")
def orders() -> DataFrame:
    """Return the stream of orders. Epoch and batch_id tell other readers how far it has come."""
    spark = SparkSession.active()
    # An erasure changes rows, which would end the stream. Of an erased message the body is NULL.
    messages = spark.readStream.format("delta").option("skipChangeCommits", "true").load(spark.conf.get("halfway.messages"))
    order = F.from_json(F.col("body").cast("string"), "item STRING, quantity INT")
    return (
        messages.where((F.col("topic") == "orders") & F.col("body").isNotNull())
        .select("transaction_id", "epoch", "batch_id", "committed_at", order.alias("order"))
        .select("transaction_id", "epoch", "batch_id", "committed_at", "order.*")
    )
