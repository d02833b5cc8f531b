"""Names and limits of the Kafka contract, which docs/contract.md describes: headers, actions, sizes."""

from enum import IntEnum, StrEnum

HeaderList = list[tuple[str, bytes | None]]
"""The headers of a Kafka record: in order, and a name may occur more than once."""
HEADER_OBJECTS_BYTES = 100
"""How much memory Python's objects for one header take, beside its bytes. Kafka's record has two bytes for it."""

REAL_TOPIC = "REAL_TOPIC"
PGROUP = "PGROUP"
REAL_QID = "REAL_QID"
TAGS = "TAGS"
KEYS = "KEYS"
CHECK_IMMUNITY_TIME_IN_SECONDS = "CHECK_IMMUNITY_TIME_IN_SECONDS"
BORN_TIMESTAMP = "BORN_TIMESTAMP"
INCARNATION = "INCARNATION"
SIGNED_AT = "SIGNED_AT"
"""On a signed half: when it was signed, in ms since 1970."""

ACTION = "ACTION"
FROM_CHECK = "FROM_CHECK"
CHECK_TIMES = "CHECK_TIMES"
REMARK = "REMARK"
HALF_SIGNATURE = "HALF_SIGNATURE"
"""On an op: the `SIGNATURE` of the half that it answers."""
SIGNATURE = "SIGNATURE"
"""On a half or op whose group has a key, and on the job's own records. Verified only if the job's settings hold
keys. Without them a half that has one is remembered longer all the same (R11)."""

TRANSACTION_CHECK_TIMES = "TRANSACTION_CHECK_TIMES"
CHECK_ID = "CHECK_ID"
CHECK_SIGNATURE = "CHECK_SIGNATURE"
"""On a check of a group with a key: the job's signature. `SIGNATURE` is the half's."""

TRANSACTION_ID = "TRANSACTION_ID"
"""On a record of the relay: the id of the transaction that committed it."""

TICK = "TICK"
PARTITIONS = "PARTITIONS"
HALF_LOST = "HALF_LOST"
"""On the job's own notice in the half topic: `<partition>:<offset>` of a half that could not be read back (R17)."""

HALF_HEADERS = (
    REAL_TOPIC,
    PGROUP,
    REAL_QID,
    TAGS,
    KEYS,
    CHECK_IMMUNITY_TIME_IN_SECONDS,
    BORN_TIMESTAMP,
    INCARNATION,
    SIGNED_AT,
    SIGNATURE,
)
OP_HEADERS = (ACTION, PGROUP, INCARNATION, FROM_CHECK, CHECK_TIMES, REMARK, HALF_SIGNATURE)
CHECK_HEADERS = (TRANSACTION_CHECK_TIMES, CHECK_ID, CHECK_SIGNATURE)
DELAY_HEADERS = ("DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS")

MAX_KEY_BYTES = 255
MAX_NAME_BYTES = 255
"""The longest `REAL_TOPIC` and `PGROUP`."""
MAX_HEADERS_BYTES = 32_767
"""RocketMQ's limit for properties: of the names and values of all headers of a record together, and of their number."""
MAX_INCARNATION = 999_999
MAX_TICK_BYTES = 32 * 1024
"""The longest value of a tick."""
MAX_INT = 2**31 - 1
SIGNED_WINDOW_MS = 5 * 60_000
"""How far apart `SIGNED_AT` and the record's timestamp may be, and how long after `SIGNED_AT` a half is accepted."""
MIN_TIMESTAMP_MS = -62_135_596_800_000
"""0001-01-01T00:00Z, the earliest one. A producer sets the times of its records on a CreateTime topic."""
MAX_TIMESTAMP_MS = 253_402_300_799_999
"""9999-12-31T23:59:59.999Z, the latest time that every reader of the tables can show."""
RECORD_OVERHEAD_BYTES = 1024 * 1024
"""The room for key and headers beside the body, in topics."""
CHECK_OVERHEAD_BYTES = 4 * 1024
"""The room for what a check request has in addition to its half: three headers, of 500 bytes at most."""


class LocalTransactionState(StrEnum):
    """What a producer knows about its local transaction: the value of the `ACTION` header."""

    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"
    UNKNOWN = "UNKNOWN"


ACTIONS = {str(state): state for state in LocalTransactionState} | {"UNKNOW": LocalTransactionState.UNKNOWN}
"""What `ACTION` may say. RocketMQ spells the third one `UNKNOW`."""


class Source(IntEnum):
    """The topic of a record."""

    HALF = 0
    OP = 1


def check_group(producer_group: str) -> str:
    """Return the id of the consumer group that reads a producer group's check requests."""
    return f"txn-check-{producer_group}"


def check_id(transaction_id: str, half_partition: int, half_offset: int, check_times: int) -> str:
    """Return the `CHECK_ID` of a check request. It stays the same when the request is resent."""
    return f"{transaction_id}:{half_partition}.{half_offset}:{check_times}"
