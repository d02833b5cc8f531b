"""Where the job reads: both topics in one stream, so that one batch sees both up to one point."""

from pyspark.sql import DataFrame, SparkSession

from schemas.settings import KafkaSettings


def read_records(spark: SparkSession, kafka: KafkaSettings) -> DataFrame:
    """Return the stream of Kafka records of the half and op topics, with headers."""
    options = {
        **kafka.as_spark_options(),
        "subscribe": f"{kafka.half_topic},{kafka.op_topic}",
        "startingOffsets": kafka.starting_offsets,
        "includeHeaders": "true",
        # Records that were deleted before they were read are lost: that is never passed over.
        "failOnDataLoss": "true",
        # 500 by default: each partition of a nearly idle batch would wait for it.
        "kafka.fetch.max.wait.ms": "10",
        "kafka.max.partition.fetch.bytes": str(8 * 1024 * 1024),
    }
    if kafka.max_offsets_per_trigger:
        options["maxOffsetsPerTrigger"] = str(kafka.max_offsets_per_trigger)
    return spark.readStream.format("kafka").options(**options).load()
