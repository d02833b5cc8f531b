"""What can go wrong, one class a cause. Each message says what is wrong and what to do about it."""


class HalfwayError(Exception):
    """Base of every error that Halfway raises on purpose; the command line prints it in one line and exits 1."""


class SettingsError(HalfwayError):
    """The configuration file, the environment or the command line has a wrong or unknown setting."""


class SetupError(HalfwayError):
    """Something the machine must have is missing or wrong: Java, a JAR, a free port, room on the disk."""


class BrokerError(HalfwayError):
    """The local development broker does not start, stop or answer."""


class KafkaUnavailableError(HalfwayError):
    """Kafka cannot be reached, or refuses us."""


class AccessError(KafkaUnavailableError):
    """Kafka lets us in, and refuses what we ask for: a right (ACL) is missing."""


class TopicError(HalfwayError):
    """A topic is missing, or is set up in a way that breaks a guarantee (R17)."""


class OwnershipError(HalfwayError):
    """The checkpoint and the tables do not belong together, or the checkpoint was made with other buckets or topics."""


class CheckpointInUseError(HalfwayError):
    """Another job is running on this checkpoint."""


class StateFormatError(HalfwayError):
    """A state row was written by a newer version than this one, or is not a state row."""


class StateDamagedError(HalfwayError):
    """A file of the checkpoint's state is damaged or missing."""


class RecordsLostError(HalfwayError):
    """Kafka has deleted records, or a whole topic, that the job had not read yet."""


class ProducerClosedError(HalfwayError):
    """The producer was closed; it sends nothing more."""


class SendError(HalfwayError):
    """A half message could not be stored; its local transaction was not run (design §7)."""


class QueueFullError(SendError):
    """Too many records wait for Kafka, and none got through in time; this one was not sent, and its local transaction was not run."""


class NotPendingError(HalfwayError):
    """No pending or discarded transaction of this id exists."""
