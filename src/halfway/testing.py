"""Kafka and the job in the memory of a service's own tests (docs/transactions.md)."""

from halfway.clients.testing.in_memory import InMemoryHalfway, in_memory_halfway
from halfway.clients.testing.in_memory_producers import InMemoryAsyncProducer, InMemoryProducer

__all__ = ["InMemoryAsyncProducer", "InMemoryHalfway", "InMemoryProducer", "in_memory_halfway"]
