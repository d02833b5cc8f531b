"""A table of committed messages and its relays, on the broker of the tests."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfway.pipelines.local.broker import LocalBroker
from tests.support.relay_world import RelayWorld


@pytest.fixture
def world(broker: LocalBroker, tmp_path: Path) -> Iterator[RelayWorld]:
    made = RelayWorld(str(broker.status()["bootstrap_servers"]), tmp_path, uuid.uuid4().hex[:8])
    yield made
    made.close()
