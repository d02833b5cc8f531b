"""The checks of `halfway doctor`: machine, Kafka, relays, storage.

May import `schemas`, `clients/kafka`, `clients/reading`, `kafka`, `relay`, `storage` and `runtime`.
"""
