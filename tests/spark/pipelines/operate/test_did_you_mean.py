"""What a command asks who gives the id of a block, whose messages have ids of their own."""

from pyspark.sql import SparkSession

from halfway.pipelines.operate.find_pending import did_you_mean


def test_the_messages_of_a_block_are_told_in_their_order_and_how_many_more_there_are(spark: SparkSession) -> None:
    """Who erased or resent the five would leave the others."""

    def asked(*ids: str) -> str:
        return did_you_mean([spark.createDataFrame([(each,)], "transaction_id string") for each in ids], "b")

    assert asked("b", "c.0", "bb.0") == ""
    assert asked("b.1", "b.0", "b.1") == ", did you mean b.0 or b.1?"
    in_order = [f"b.{number}" for number in range(5)]
    assert asked(*reversed(in_order)) == f", did you mean {' or '.join(in_order)}?"
    assert asked("b.10", "b.11", *in_order, "b.5") == f", did you mean {' or '.join(in_order)}, or one of 3 more that begin so?"
