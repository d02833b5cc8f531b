"""A small compressed batch may hold any amount of data: 25 halves of 4 MiB of zeros, in each codec."""

import pytest
from confluent_kafka import KafkaError, Message, Producer
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from halfway.pipelines.kafka.spark_options import spark_options
from halfway.pipelines.resolve.read_back import RecordFetcher
from halfway.pipelines.resolve.sources import source_options
from halfway.schemas.headers import Source
from halfway.schemas.settings import KafkaSettings
from tests.support.kafka_topics import MakeTopics, set_topic_config
from tests.support.waiting import until

HALVES = 25
BODY = bytes(4 * 1024 * 1024)
CODECS = ("gzip", "snappy", "lz4", "zstd")


def send_bomb(kafka: KafkaSettings, topic: str, codec: str) -> list[tuple[KafkaError | None, Message]]:
    """Send all halves in one batch, and return what became of each."""
    large = 2 * HALVES * len(BODY)
    options = {
        "bootstrap.servers": kafka.servers(),
        "compression.type": codec,
        "linger.ms": 60_000,  # until the batch is whole, however slow the machine is
        "batch.num.messages": HALVES,
        "batch.size": large,
        "message.max.bytes": large,
        "queue.buffering.max.kbytes": large // 1024,
        "retries": 0,
    }
    producer, results = Producer(options), []
    for number in range(HALVES):
        headers = [("REAL_TOPIC", b"orders"), ("PGROUP", b"g")]
        producer.produce(topic, BODY, b"%d" % number, partition=0, headers=headers, on_delivery=lambda *result: results.append(result))
    # `flush` would send what is there, whether the batch is whole or not.
    until(lambda: producer.poll(0.1) >= 0 and len(results) == HALVES, "Kafka's answers")
    return results


@pytest.mark.parametrize("codec", CODECS)
def test_both_readers_read_what_each_codec_made_small(topics: MakeTopics, spark: SparkSession, codec: str) -> None:
    settings = topics(partitions=1)
    kafka = settings.kafka
    for name, value in (("compression.type", "producer"), ("max.message.bytes", 16 * 1024 * 1024)):
        set_topic_config(settings, kafka.half_topic, name, value)
    halves = [record for error, record in send_bomb(kafka, kafka.half_topic, codec) if error is None]
    assert len(halves) == HALVES
    pointers = [(0, 0, record.offset() or 0, record.timestamp()[1], (record.key() or b"").decode()) for record in halves]
    fetcher = RecordFetcher(kafka.as_librdkafka_dict(), {Source.HALF: kafka.half_topic, Source.OP: kafka.op_topic})
    try:
        assert sum(record is not None and record.value == BODY for record in fetcher.records(pointers)) == HALVES
    finally:
        fetcher.close()
    options = {**source_options(kafka), **spark_options(kafka), "subscribe": kafka.half_topic}
    read = spark.read.format("kafka").options(**options).load().where(F.col("key").isNotNull())
    assert read.select(F.sum(F.length("value"))).first() == (HALVES * len(BODY),)


@pytest.mark.parametrize("codec", CODECS)
def test_a_new_topic_takes_no_batch_that_was_made_small(topics: MakeTopics, codec: str) -> None:
    kafka = topics(partitions=1).kafka
    for topic in kafka.job_topics():
        errors = {error and error.code() for error, _ in send_bomb(kafka, topic, codec)}
        assert errors == {KafkaError.MSG_SIZE_TOO_LARGE}, topic
