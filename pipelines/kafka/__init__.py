"""The job's and the commands' way into Kafka: administration, topics, range reader, producer.

May import `schemas` and `clients/kafka`.
"""
