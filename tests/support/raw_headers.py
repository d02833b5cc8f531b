"""Sends a record whose headers have names of any bytes, which confluent_kafka does not: it takes texts."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import confluent_kafka

_TOPIC, _PARTITION, _VALUE, _KEY, _FLAGS, _TIMESTAMP, _HEADER, _END = 1, 3, 4, 5, 7, 8, 9, 0
"""The tags of `rd_kafka_producev` (rdkafka.h, rd_kafka_vtype_t)."""
_COPY = 2
_LIMIT_MS = 30_000


def send_raw(servers: str, topic: str, key: bytes, value: bytes, headers: Sequence[tuple[bytes, bytes]], at_ms: int) -> None:
    """Send one record to the first partition by librdkafka itself, and wait until it is stored."""
    packages = Path(confluent_kafka.__file__).parents[1]
    [library] = packages.glob("confluent_kafka.libs/librdkafka-*.so*")
    rdkafka = ctypes.CDLL(str(library))
    for function in (rdkafka.rd_kafka_conf_new, rdkafka.rd_kafka_new):
        function.restype = ctypes.c_void_p
    error = ctypes.create_string_buffer(512)
    conf = ctypes.c_void_p(rdkafka.rd_kafka_conf_new())
    assert rdkafka.rd_kafka_conf_set(conf, b"bootstrap.servers", servers.encode(), error, ctypes.c_size_t(512)) == 0, error.value
    producer = ctypes.c_void_p(rdkafka.rd_kafka_new(0, conf, error, ctypes.c_size_t(512)))
    assert producer.value is not None, error.value
    named = [each for name, said in headers for each in (_HEADER, name, said, ctypes.c_ssize_t(len(said)))]
    place = (_TOPIC, topic.encode(), _PARTITION, ctypes.c_int32(0), _FLAGS, _COPY, _TIMESTAMP, ctypes.c_int64(at_ms))
    body = (_VALUE, value, ctypes.c_size_t(len(value)), _KEY, key, ctypes.c_size_t(len(key)))
    assert rdkafka.rd_kafka_producev(producer, *place, *body, *named, _END) == 0
    assert rdkafka.rd_kafka_flush(producer, _LIMIT_MS) == 0
    rdkafka.rd_kafka_destroy(producer)
