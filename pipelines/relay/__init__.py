"""The relay: committed messages go on to the Kafka topics that they name, exactly once. Without Spark.

May import `schemas`, `clients/kafka`, `clients/reading` and `kafka`.
"""
