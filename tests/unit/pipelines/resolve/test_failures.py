"""The explanation of a failed batch: one line that says what to do."""

import pytest
from pyspark.errors import AnalysisException

from halfway.conf.loader import load_settings
from halfway.pipelines.resolve.failures import explain
from halfway.schemas.errors import (
    CheckpointInUseError,
    HalfwayError,
    JobFailedError,
    KafkaUnavailableError,
    RecordsLostError,
    RecordTooLargeError,
    SetupError,
    StateDamagedError,
    StateFormatError,
)

SETTINGS = load_settings(environ={}, overrides={"storage.checkpoint": "/data/checkpoint", "storage.warehouse": "/data/tables"})
_LOST = "Some data may have been lost because they are not available in Kafka any more"
_DELETED = f"""[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: [KAFKA_DATA_LOSS.PARTITION_OFFSET_CHANGED] {_LOST};
either the data was aged out by Kafka or the topic may have been deleted before all the data in the topic was processed.
Reason:
Partition transactions.half-0 offset was changed from 40 to 0. SQLSTATE: 22000
    at org.apache.spark.sql.kafka010
"""
_TRUNCATED = f"""Job aborted due to stage failure: org.apache.spark.sql.kafka010.KafkaIllegalStateException: {_LOST};
either the data was aged out by Kafka or the topic may have been deleted before all the data in the
topic was processed.
If you don't want your streaming query to fail on such cases, set the source option failOnDataLoss to false.
Reason: Could not read records in offset [77, 251) for topic partition transactions.half-0
with consumer group spark-kafka-source-6048.
\tat org.apache.spark.sql.kafka010.KafkaExceptions$.couldNotReadOffsetRange(KafkaExceptions.scala:94)
"""
_STATE = """Job aborted due to stage failure: org.apache.spark.SparkException: [CANNOT_LOAD_STATE_STORE.UNCATEGORIZED] An error
occurred during loading state.  SQLSTATE: 58030
\tat org.apache.spark.sql
"""
_EXECUTOR = """Traceback (most recent call last):
  File "records.py", line 1, in record_at
halfway.schemas.errors.KafkaUnavailableError: transactions.half ends at offset 3
\tat org.apache.spark.api.python
"""
_GONE = "transactions.half ends at offset 0 of partition 0, and 5 was read from there before: is a broker still down?"
_NO_LEADER = "cannot read transactions.half: Failed to get offsets: Local: Unknown partition"
"""So librdkafka calls a partition without a leader, and one of a deleted topic."""
_AWAY = """Job aborted due to stage failure: Task 0 in stage 45.0 failed 1 times, most recent failure:
org.apache.kafka.common.errors.TimeoutException: Timeout of 60000ms expired before the position for partition transactions.half-0 could be determined
"""  # noqa: E501  # Kafka's own line
_NO_ANSWER = """[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: org.apache.kafka.common.errors.TimeoutException: \
Timed out waiting for a node assignment. Call: listNodes SQLSTATE: XXKST

JVM stacktrace:
"""
_OTHERS_FILE = (
    "An error occurred while calling o77.rename.\n: java.io.FileNotFoundException: No such file or directory: s3a://x/status.json.part"
)
_TWO_JOBS = "[STREAM_FAILED] Query terminated with exception: [CONCURRENT_STREAM_LOG_UPDATE] Concurrent update to the log."
SAID = {
    "two jobs": (_TWO_JOBS, CheckpointInUseError, ("/data/checkpoint", "a checkpoint, a warehouse and topics of its own")),
    "two jobs on S3": (_OTHERS_FILE, CheckpointInUseError, ("/data/checkpoint", "another job is running")),
    "deleted": (_DELETED, RecordsLostError, ("halfway resolve --adopt", "transactions.half", "offset was changed from 40 to 0")),
    "truncated": (_TRUNCATED, RecordsLostError, ("halfway resolve --adopt", "transactions.half", "offset [77, 251)")),
    "state": (_STATE, StateDamagedError, ("halfway resolve --adopt", "/data/checkpoint")),
    "state row": (
        _EXECUTOR.replace("KafkaUnavailableError: transactions.half ends at offset 3", "StateFormatError: a state row is damaged: --adopt"),
        StateFormatError,
        ("a state row is damaged: --adopt",),
    ),
    "away": (_AWAY, KafkaUnavailableError, ("transactions.half-0", "halfway resolve --adopt", "when it is back")),
    "executor": (_EXECUTOR, KafkaUnavailableError, ("transactions.half ends at offset 3",)),
    "gone": (_GONE, KafkaUnavailableError, ("offset 0 of partition 0", "halfway resolve --adopt", "`halfway topics create` first")),
    "gone on an executor": (_EXECUTOR.replace("transactions.half ends at offset 3", _GONE), KafkaUnavailableError, ("--adopt",)),
    "no leader": (_NO_LEADER, KafkaUnavailableError, ("Unknown partition: if a broker is down", "--adopt", "`halfway topics create`")),
    "no leader on an executor": (_EXECUTOR.replace("transactions.half ends at offset 3", _NO_LEADER), KafkaUnavailableError, ("--adopt",)),
    "too large": (
        _EXECUTOR.replace("KafkaUnavailableError: ", "RecordTooLargeError: topic "),
        RecordTooLargeError,
        ("topic transactions.half ends",),
    ),
    "no answer": (_NO_ANSWER, KafkaUnavailableError, ("(Timed out waiting for a node assignment. Call: listNodes)", "nothing is lost")),
    "disk": ("java.io.IOException: No space left on device\n\tat java.base", SetupError, ("/data/checkpoint", "/data/tables", "make room")),
}


@pytest.mark.parametrize(("text", "kind", "words"), SAID.values(), ids=SAID)
def test_a_known_failure_is_explained_with_what_to_do(text: str, kind: type[HalfwayError], words: tuple[str, ...]) -> None:
    explained = explain(RuntimeError(text), SETTINGS)
    assert type(explained) is kind
    assert all(word in str(explained) for word in words), explained
    assert " at org." not in str(explained)
    assert "failOnDataLoss" not in str(explained), "this option would skip lost records silently"


def test_an_unknown_error_of_spark_is_left_to_the_log_and_any_other_one_as_it_is() -> None:
    assert type(explain(AnalysisException("[DELTA_TABLE_NOT_FOUND] Delta table `messages` doesn't exist."), SETTINGS)) is JobFailedError
    assert explain(ValueError("ours"), SETTINGS) is None
