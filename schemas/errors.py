"""Errors: one class for each cause. A message says what is wrong and what to do about it."""


class HalfwayError(Exception):
    """Base of Halfway's own errors. The command line prints its message in one line and exits with 1."""


class SettingsError(HalfwayError):
    """The configuration file, the environment or the command line has a wrong or unknown setting."""


class SetupError(HalfwayError):
    """Something that the machine needs is missing or wrong: Java, a JAR, a free port, disk space."""


class MissingPackageError(SetupError):
    """A package is not installed that one of Halfway's extras brings."""

    def __init__(self, user: str, package: str | None, extras: str) -> None:
        """Say who needs the package, and how to install the extras that bring it."""
        super().__init__(f"{user} needs {package}, which is not installed: pip install '.[{extras}]' in a clone of Halfway")


class BrokerError(HalfwayError):
    """The local development broker does not start, stop or answer."""


class KafkaUnavailableError(HalfwayError):
    """Kafka cannot be reached, or refuses the connection."""


class AccessError(HalfwayError):
    """Kafka accepts the connection and refuses the request, because a right (ACL) is missing."""


class TopicError(HalfwayError):
    """A topic is missing, or its configuration breaks a guarantee (R17)."""


class RecordTooLargeError(TopicError):
    """A topic refuses a record that is larger than its `max.message.bytes`."""


class OwnershipError(HalfwayError):
    """Checkpoint and tables do not belong together, or the checkpoint was made with other buckets or topics."""


class TableError(HalfwayError):
    """A table is missing, was made by an earlier version, or cannot be read without Spark."""


class CheckpointInUseError(HalfwayError):
    """Another process holds a lock: a job, replay or erasure on the checkpoint, or a commit to a table."""


class StateFormatError(HalfwayError):
    """The payload of a state row has another format version, or cannot be decoded."""


class StateDamagedError(HalfwayError):
    """Spark cannot load the state: a file of the checkpoint is damaged or missing."""


class SparkFailedError(HalfwayError):
    """Spark, a table or its store has failed, for a reason that only Spark's text has."""


class JobFailedError(HalfwayError):
    """A batch failed, for a reason that only Spark's text has."""


READ_WHAT_IS_THERE = (
    "a broker lost its disk, or was elected without them. To read what is there, set storage.checkpoint to a new folder and start once "
    "with `halfway resolve --adopt`, which writes nothing that the tables hold"
)


class RecordsLostError(HalfwayError):
    """Kafka has lost records: some that the job had not read, or read ones, in whose place new ones are."""


class ProducerClosedError(HalfwayError):
    """The producer was closed, and sends nothing more."""


class ForkedProducerError(ProducerClosedError):
    """A process uses a producer that its parent started. It needs one of its own."""


class SendError(HalfwayError):
    """A half message could not be stored. Its local transaction was not run (docs/contract.md)."""


class QueueFullError(SendError):
    """The queue to Kafka stayed full (backpressure). The half was not sent, and its local transaction was not run."""


class RolledBackError(HalfwayError):
    """A transaction cannot commit: a check came first, or it was over before its block. No message becomes readable."""


class OutcomeUnknownError(HalfwayError):
    """The answer to a database's commit was lost, and so was the look-up. A check finds out."""


class SharedGroupError(HalfwayError):
    """A check asks for what is not of this database: another service's, or from before the table was recreated."""


class BookmarkMovedError(HalfwayError):
    """Another instance has moved a reader's bookmark. What this one did since is rolled back."""


class RelayError(HalfwayError):
    """The relay has no bookmark, or one that does not belong to the table, or a topic is stopped."""


class NotErasableError(HalfwayError):
    """A transaction is pending, so that its body is still needed, or no table holds anything of it."""


class NotPendingError(HalfwayError):
    """No pending or discarded transaction has this id."""
