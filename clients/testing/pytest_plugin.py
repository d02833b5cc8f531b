"""The pytest plugin of `halfway`: the fixture `in_memory` for a service's own tests."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from halfway.clients.testing.in_memory import InMemoryHalfway


@pytest.fixture
def in_memory() -> "Iterator[InMemoryHalfway]":
    """Kafka and the job in the memory of one test (`halfway.testing.in_memory_halfway`)."""
    from halfway.clients.testing.in_memory import in_memory_halfway  # noqa: PLC0415  # pytest loads plugins at every start

    with in_memory_halfway() as halfway:
        yield halfway
