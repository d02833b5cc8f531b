"""Bodies, keys and state on a local disk are for the job's user alone."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfway.clients.producer import TransactionProducer
from tests.support.client_world import Listener
from tests.support.commands import options_of, run_halfway
from tests.support.kafka_topics import MakeTopics


@pytest.fixture
def generous_umask() -> Iterator[None]:
    before = os.umask(0o000)
    yield
    os.umask(before)


@pytest.mark.usefixtures("generous_umask")
def test_what_the_job_writes_is_for_its_user_alone(topics: MakeTopics, tmp_path: Path) -> None:
    folders = [tmp_path / "checkpoint", tmp_path / "warehouse"]
    settings = topics(1, overrides={f"storage.{folder.name}": str(folder) for folder in folders} | {"state.buckets": 4})
    with TransactionProducer(settings.kafka, "g", Listener()) as producer:
        producer.send_in_transaction("orders", b"body")
    done = run_halfway("resolve", "--available-now", *options_of(settings), limit_s=170)
    assert done.returncode == 0, done.stderr[-2000:]
    paths = [path for folder in folders for path in (folder, *folder.rglob("*"))]
    assert {"messages", "_delta_log", "halfway.json", "state", "commits"} <= {path.name for path in paths}
    assert [str(path) for path in paths if path.stat().st_mode & 0o077] == []
