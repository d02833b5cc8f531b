"""The job's and the commands' way into Kafka: administration, topics, range reader, producer.

May import `clients.kafka` and `schemas`.
"""
