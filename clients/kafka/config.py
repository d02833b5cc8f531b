"""What the client's producer and consumer have in common: the way into Kafka, and librdkafka's own log as Python's."""

import logging
from typing import Any

from confluent_kafka import KafkaError

from halfway.schemas.settings import KafkaSettings

log = logging.getLogger(__name__)
librdkafka_log = logging.getLogger("clients.librdkafka")
# An application that sets up no logging is not to find librdkafka's lines on stderr; one that does gets them.
librdkafka_log.addHandler(logging.NullHandler())


def librdkafka_config(settings: KafkaSettings) -> dict[str, Any]:
    """Return the options that producer and consumer share; secrets in clear."""
    return {
        **settings.as_librdkafka_dict(),
        "client.id": "halfway",
        "logger": librdkafka_log,
        "error_cb": log_error,
        # After an outage, be back within a second or two of Kafka; librdkafka would wait for up to ten.
        "reconnect.backoff.max.ms": 1_000,
        # Brokers close idle connections as a matter of course.
        "log.connection.close": False,
    }


def log_error(error: KafkaError) -> None:
    """Log an error of the connections; librdkafka goes on after all but the fatal ones."""
    log.log(logging.ERROR if error.fatal() else logging.WARNING, "event=kafka_error code=%s error=%s", error.name(), error)
