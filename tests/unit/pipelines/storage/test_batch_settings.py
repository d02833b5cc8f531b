"""R16: which batches run under which settings. A stand-in holds the checkpoint's files."""

from typing import Any, cast

import pytest
from pyspark.sql import SparkSession

from halfway.conf.loader import load_settings
from halfway.pipelines.storage import batch_settings, manifest, state_reader
from halfway.pipelines.storage.batch_settings import settings_of_batches
from halfway.schemas.errors import OwnershipError

NO_SPARK = cast(SparkSession, None)


class Checkpoint:
    """The files of a checkpoint: batches that were planned and committed, and the batches' settings."""

    def __init__(self) -> None:
        self.planned = self.committed = 0
        self.content: dict[str, Any] | None = None
        self.writes = 0

    def names_in(self, _: object, uri: str) -> list[str]:
        upto = {"offsets": self.planned, "commits": self.committed}[uri.rpartition("/")[2]]
        return [*map(str, range(upto)), ".7.crc", "9.tmp"]

    def read_json(self, _spark: object, _uri: str) -> dict[str, Any] | None:
        return self.content

    def write_json(self, _spark: object, uri: str, content: dict[str, Any]) -> None:
        assert uri.endswith("/batch_settings.json")
        self.content = content
        self.writes += 1


@pytest.fixture
def checkpoint(monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    stand_in = Checkpoint()
    for module, name in ((state_reader, "names_in"), (manifest, "read_json"), (batch_settings, "write_json")):
        monkeypatch.setattr(module, name, getattr(stand_in, name))
    return stand_in


def start(check_max: int, keys: dict[str, list[str]] | None = None) -> list[tuple[int, int]]:
    """Start a run; return (first batch, transactionCheckMax)."""
    overrides: dict[str, object] = {"resolution.transactionCheckMax": check_max}
    settings = load_settings(environ={}, overrides=overrides | ({"kafka.signing.cluster": "c", "kafka.signing.keys": keys} if keys else {}))
    return [(first, each.transactionCheckMax) for first, each in settings_of_batches(NO_SPARK, settings)]


def test_a_change_counts_from_the_first_batch_that_was_not_planned(checkpoint: Checkpoint) -> None:
    assert start(15) == [(0, 15)]
    assert start(3) == [(0, 3)], "the first run planned nothing"
    checkpoint.planned, checkpoint.committed = 8, 7
    assert start(5) == [(0, 3), (8, 5)]
    assert start(6) == [(0, 3), (8, 6)], "no batch was planned since"
    assert start(3) == [(0, 3)], "changed back in time"
    assert start(5) == [(0, 3), (8, 5)]
    checkpoint.planned = checkpoint.committed = 20
    assert start(7) == [(8, 5), (20, 7)], "older batches are never repeated"


def test_unchanged_settings_are_not_written_again(checkpoint: Checkpoint) -> None:
    start(15)
    checkpoint.planned = checkpoint.committed = 4
    start(15)
    assert checkpoint.writes == 1


def test_a_batch_whose_settings_are_lost_is_not_repeated(checkpoint: Checkpoint) -> None:
    checkpoint.planned, checkpoint.committed = 3, 2
    with pytest.raises(OwnershipError, match=r"batch_settings\.json is missing, which says under which settings batch 2 began"):
        start(15)
    checkpoint.committed = 3
    assert start(15) == [(3, 15)], "nothing is to be repeated"


def test_a_batch_is_repeated_with_the_same_signing_keys_only(checkpoint: Checkpoint) -> None:
    keys, others = {"shop": ["k" * 32]}, {"shop": ["l" * 32]}
    start(15, keys)
    assert "kkk" not in str(checkpoint.content)
    checkpoint.planned, checkpoint.committed = 3, 2
    for changed in (others, None, {"store": ["k" * 32]}, {"shop": ["k" * 32, "l" * 32]}):
        with pytest.raises(OwnershipError, match=r"^batch 2 of .* began under other kafka.signing settings and is to be repeated: set"):
            start(15, changed)
    assert start(15, keys) == [(0, 15)]
    checkpoint.committed = 3
    assert start(15, others) == [(0, 15), (3, 15)]
