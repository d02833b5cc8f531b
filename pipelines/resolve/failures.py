"""What a failed batch means to whoever runs the job, where a new start would fail in the same way and Spark does not say what to do."""

import re

from halfway.schemas.errors import HalfwayError, KafkaUnavailableError, RecordsLostError, SetupError, StateDamagedError
from halfway.schemas.settings import Settings

_WAY_OUT = (
    "set storage.checkpoint to a new folder and start once with `halfway resolve --adopt`, which reads the topics from the earliest record "
    "that is left and writes nothing that the tables hold"
)
_TOLD_CHARS = 400
_NO_PROSE = re.compile(r"\n\s*at |\n\n")
# Spark gives its conditions in brackets in some messages, and in others only their words.
_RECORDS_LOST = re.compile(
    r"Some data may have been lost because they are not available in Kafka any more.*?Reason:\s*|(?=UnknownTopic(OrPartition|Id)Exception)",
    re.DOTALL,
)
# Raised on an executor, it comes back as a traceback.
_UNAVAILABLE = re.compile(r"schemas\.errors\.KafkaUnavailableError: (.+)")
# Of a broker that is away, and, if the executor is the first to ask, of a topic that is.
_NO_POSITION = re.compile(r"Timeout of \d+ms expired before the position for partition (\S+) could be determined")
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_STATE_DAMAGED = re.compile(r"(?=\[CANNOT_LOAD_STATE_STORE\b)")


def explain(error: Exception, settings: Settings) -> HalfwayError | None:
    """Return what to raise in place of the error that ended the query, None if it tells enough.

    Args:
        error: what Spark raised, or what a batch did; its text has Spark's conditions and the messages of the causes below.
        settings: name the places.
    """
    text = str(error)
    kafka, storage = settings.kafka, settings.storage
    if found := _RECORDS_LOST.search(text):
        return RecordsLostError(
            f"records of {kafka.half_topic} or {kafka.op_topic} were deleted before this job had read them, or the topic was "
            f"({_told(text, found)}): what they held is lost. If Kafka has just been down, start again first. To go on with what is left, "
            f"{_WAY_OUT}; `halfway topics create` first, if a topic is missing"
        )
    if found := _STATE_DAMAGED.search(text):
        return StateDamagedError(
            f"the state in {storage.checkpoint} cannot be read, a file there is damaged or missing ({_told(text, found)}): {_WAY_OUT}"
        )
    if _DISK_FULL.search(text):
        places = f"{storage.checkpoint}, of {storage.catalog_schema or storage.warehouse}, or of Spark's own files (spark.local.dir)"
        return SetupError(f"there is no room left on the disk of {places}: make room and start again, the batch is repeated")
    if found := _NO_POSITION.search(text):
        return KafkaUnavailableError(
            f"Kafka has not told for a minute where the partition {found[1]} is: if a broker is down, start again when it is back. "
            f"If the topic was deleted, {_WAY_OUT}; `halfway topics create` first"
        )
    if found := _UNAVAILABLE.search(text):
        return KafkaUnavailableError(found[1])
    return None


def _told(text: str, found: re.Match[str]) -> str:
    """What Spark says from there on, as far as it is prose."""
    return " ".join(_NO_PROSE.split(text[found.end() :], 1)[0].split())[:_TOLD_CHARS]
