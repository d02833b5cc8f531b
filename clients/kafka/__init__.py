"""The client's way into Kafka: librdkafka's configuration, the idempotent sender, the diagnosis of refused connections.

May import `schemas`.
"""
