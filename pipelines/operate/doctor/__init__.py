"""The checks of `halfway doctor`: machine, Kafka, storage.

May import `schemas`, `kafka`, `storage` and `runtime`.
"""
