"""Makes librdkafka declare an idempotent producer dead, by its own function for tests.

What the producer does from then on is what it does after an error of a broker: the same code raises both.
"""

import ctypes
from pathlib import Path

import confluent_kafka
from confluent_kafka import KafkaError, Producer

_OBJECT_HEAD_BYTES = 16
"""A Python object's reference count and type. The next field of confluent_kafka's producer is librdkafka's handle."""


def declare_dead(producer: Producer) -> None:
    """Raise a fatal error in a producer."""
    [path] = Path(confluent_kafka.__file__).parent.with_name("confluent_kafka.libs").glob("librdkafka-*")
    library = ctypes.CDLL(str(path))
    handle = ctypes.c_void_p.from_address(id(producer) + _OBJECT_HEAD_BYTES)
    library.rd_kafka_test_fatal_error(handle, KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, b"the test says so")
