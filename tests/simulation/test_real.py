"""What is simulated is true: a real Kafka, Spark and Delta end with the same tables and check requests."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from halfway.pipelines.local.broker import LocalBroker
from tests.simulation.real import differences, playable

HISTORIES = 2


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_real_job_ends_as_the_simulated_one(spark: SparkSession, broker: LocalBroker, tmp_path: Path) -> None:
    for taped in playable(1, HISTORIES):
        assert differences(taped, spark, broker, tmp_path / str(taped.seed)) == [], taped.seed
