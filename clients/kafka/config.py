"""Holds the librdkafka options that producers and consumers share."""

from typing import Any

from halfway.clients.kafka.client_log import ClientLog
from halfway.schemas.settings import KafkaSettings

FOLLOW_LEADERS: dict[str, Any] = {
    # A frozen broker does not report that another one leads by now. By default librdkafka refreshes its metadata every
    # 5 minutes, maybe from that broker, and gives up a broker that does not answer after a minute.
    "topic.metadata.refresh.interval.ms": 5_000,
    "socket.timeout.ms": 10_000,
}
"""The options of every client of a replicated Kafka, so that it goes on with the new leader of a partition."""

PRODUCER_OPTIONS: dict[str, Any] = {
    "acks": "all",
    "enable.idempotence": True,
    **FOLLOW_LEADERS,
    # The default of 30 s is as long as a record may take (`send_timeout_ms`): no time would be left for another leader.
    "request.timeout.ms": 10_000,
    # Java's default. All records of an id are then in one partition, whichever client sends them (docs/contract.md).
    "partitioner": "murmur2_random",
    # librdkafka asks for the topics that it knows each second. Brokers that create topics would make a deleted one.
    "allow.auto.create.topics": False,
    # librdkafka's largest. The limit is the topic's, which Kafka compares with the size after compression.
    "message.max.bytes": 1_000_000_000,
}
"""The options that every producer needs."""

READ_ANY_SIZE = {
    # A fetch returns the next record whatever its size. Above this limit, 100 MB by default, librdkafka would drop the
    # connection and ask for the same record for ever.
    "receive.message.max.bytes": str(2**31 - 1),
}
"""The option of every consumer: one large record must not stop it."""


def librdkafka_config(settings: KafkaSettings, client_log: ClientLog) -> dict[str, Any]:
    """Return the options that the client's producer and consumer share. They hold the password in clear text."""
    return {
        **settings.as_librdkafka_dict(),
        "client.id": "halfway",
        "logger": client_log,
        "error_cb": client_log.error,
        # Reconnect within a second or two after an outage. librdkafka waits up to 10 s by default.
        "reconnect.backoff.max.ms": 1_000,
        # Brokers close idle connections as a matter of course.
        "log.connection.close": False,
    }
