"""The checks of `halfway doctor`: machine, Kafka, relays, storage.

May import `schemas`, `kafka`, `relay`, `storage` and `runtime`.
"""
