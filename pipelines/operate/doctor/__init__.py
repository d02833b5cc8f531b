"""The checks of `halfway doctor`: machine, Kafka, storage.

May import what `operate` may import.
"""
