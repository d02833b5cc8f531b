"""The client's access to Kafka: librdkafka's options, the idempotent sender, the diagnosis of refused connections.

May import `schemas`.
"""
