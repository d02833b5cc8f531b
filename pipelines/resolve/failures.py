"""Explains to the operator in one line why a batch failed, and what to do."""

import re

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

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
from halfway.schemas.settings import Settings, StorageSettings

_REMEDY = (
    "set storage.checkpoint to a new folder and start once with `halfway resolve --adopt`, which reads the topics from the earliest record "
    "that is left and writes nothing that the tables hold"
)
_MESSAGE_CHARS = 400
_STACK_TRACE = re.compile(r"\n\s*at |\n\n")
# Some of Spark's messages have the error condition in brackets, others only its text.
_RECORDS_LOST = re.compile(
    r"Some data may have been lost because they are not available in Kafka any more.*?Reason:\s*|(?=UnknownTopic(OrPartition|Id)Exception)",
    re.DOTALL,
)
# What `range_reader` says of records that were there. To librdkafka a partition without a leader is unknown, too.
_NOT_THERE = re.compile(
    r"\S+ ends at offset \d+ of partition \d+, and \d+ was read from there before|cannot read \S+: .*Unknown (?:topic|partition).*"
)
# An error of an executor arrives as a traceback.
_ERRORS = {error.__name__: error for error in (KafkaUnavailableError, RecordTooLargeError, StateFormatError)}
_RAISED = re.compile(rf"schemas\.errors\.({'|'.join(_ERRORS)}): (.+)")
# A broker is down; or the topic is gone, and the executor is the first to ask for it.
_NO_POSITION = re.compile(r"Timeout of \d+ms expired before the position for partition (\S+) could be determined")
# Spark's source asks three times, a minute each.
_NO_ANSWER = re.compile(r"kafka\.common\.errors\.TimeoutException: (.+?)(?: SQLSTATE|\n|$)")
# An executor waits for records that the driver has planned to read.
_NO_RECORD = re.compile(r"TimeoutException: (Cannot fetch record for offset \d+ in \d+ milliseconds)")
_TAKEN_BY_ANOTHER = re.compile(r"FileNotFoundException: .*/\w+\.json\.part")
"""In an object store another job has renamed the file that this one has just written."""
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_STATE_DAMAGED = re.compile(r"(?=\[CANNOT_LOAD_STATE_STORE\b)")


def explain(error: Exception, settings: Settings) -> HalfwayError | None:
    """Return the error to raise instead of the one that ended the query; None if it is unknown and none of Spark's.

    Args:
        error: what Spark or a batch raised. Its text holds Spark's error conditions and the messages of the causes.
        settings: the job's settings, for the names in the message.
    """
    text = str(error)
    kafka, storage = settings.kafka, settings.storage
    if found := _RECORDS_LOST.search(text):
        return RecordsLostError(
            f"records of {kafka.half_topic} or {kafka.op_topic} were deleted before this job had read them, or the topic was "
            f"({_cause(text, found)}): what they held is lost. If Kafka has just been down, start again first. To go on with what is left, "
            f"{_REMEDY}; `halfway topics create` first, if a topic is missing"
        )
    if known := _of_storage(text, storage) or _of_kafka(text):
        return known
    if found := _RAISED.search(text):
        return _ERRORS[found[1]](found[2])
    if isinstance(error, PySparkException | Py4JError):
        return JobFailedError("a batch failed, for the reason that Spark gives above: the next start repeats it")
    return None


def _of_kafka(text: str) -> HalfwayError | None:
    if found := _NO_POSITION.search(text):
        return KafkaUnavailableError(
            f"Kafka has not reported for a minute where the partition {found[1]} is: if a broker is down, start again when it is back. "
            f"If the topic was deleted, {_REMEDY}; `halfway topics create` first"
        )
    if found := _NOT_THERE.search(text):
        return KafkaUnavailableError(
            f"{found[0]}: if a broker is down or has just come back, start again when it has all its records. If they are lost for good, "
            f"or the topic was deleted, {_REMEDY}; `halfway topics create` first, if the topic is missing"
        )
    if found := _NO_ANSWER.search(text) or _NO_RECORD.search(text):
        return KafkaUnavailableError(
            f"Kafka has not answered for minutes ({found[1]}): start the job again when its brokers are back, nothing is lost"
        )
    return None


def _of_storage(text: str, storage: StorageSettings) -> HalfwayError | None:
    if found := _STATE_DAMAGED.search(text):
        return StateDamagedError(
            f"the state in {storage.checkpoint} cannot be read, a file there is damaged or missing ({_cause(text, found)}): {_REMEDY}"
        )
    if "[CONCURRENT_STREAM_LOG_UPDATE]" in text or _TAKEN_BY_ANOTHER.search(text):
        return CheckpointInUseError(
            f"another job is running on the checkpoint {storage.checkpoint}, and it goes on: this one has ended, and nothing is lost or "
            "written twice. Give this one a checkpoint, a warehouse and topics of its own"
        )
    if _DISK_FULL.search(text):
        places = f"{storage.checkpoint}, of {storage.catalog_schema or storage.warehouse}, or of Spark's own files (spark.local.dir)"
        return SetupError(f"the disk is full that holds {places}: make room and start again, the batch is repeated")
    return None


def _cause(text: str, found: re.Match[str]) -> str:
    """Return Spark's own words from there on, up to the stack trace."""
    return " ".join(_STACK_TRACE.split(text[found.end() :], 1)[0].split())[:_MESSAGE_CHARS]
