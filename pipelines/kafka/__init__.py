"""The job's and the commands' way into Kafka: administration, topics, ticks, range reader, producer.

May import `schemas` and `clients/kafka`.
"""
