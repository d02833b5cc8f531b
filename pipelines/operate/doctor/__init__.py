"""The checks of `halfway doctor`: machine, Kafka, relays, storage.

May import `schemas`, `clients/kafka`, `kafka`, `relay`, `storage` and `runtime`.
"""
