"""The job opens checkpoints and tables of older versions, and goes on where they stopped, or refuses them by name."""

import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from halfway import MessageReader
from halfway.conf.loader import load_settings
from halfway.pipelines.local.broker import LocalBroker
from halfway.pipelines.storage.manifest import MANIFEST_FILE
from halfway.pipelines.storage.state_reader import read_state
from halfway.schemas.errors import OwnershipError, StateFormatError
from halfway.schemas.state_format import FORMAT_VERSION
from halfway.schemas.tables import Table
from halfway.transforms.views.pending import view_pending
from tests.support.job_world import World
from tests.support.older_formats import DATA, RUNS, first_part, make_topics, settings_for

KEPT = sorted(int(path.name.removeprefix("format-").removesuffix(".tar.gz")) for path in DATA.glob("format-*.tar.gz"))
OPENED = [version for version in KEPT if version == FORMAT_VERSION]
"""Formats 1 and 4 place ids in other buckets; 6 does not tell which partitions name a group. 2, 3 and 5 are gone."""
OpenKept = Callable[[int], World]


@pytest.fixture
def open_kept(spark: SparkSession, broker: LocalBroker, tmp_path: Path) -> OpenKept:
    """`open_kept(1)`: a job with the kept checkpoint and tables of a format, and new topics."""

    def make(version: int) -> World:
        with tarfile.open(DATA / f"format-{version}.tar.gz") as kept:
            kept.extractall(tmp_path, filter="data")
        settings = load_settings(environ={}, overrides=settings_for(version, tmp_path, str(broker.status()["bootstrap_servers"])))
        make_topics(settings)
        manifest = tmp_path / "checkpoint" / MANIFEST_FILE
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "topic_ids": {}}))  # those of another Kafka
        return World(spark, settings)

    return make


def test_the_first_format_and_this_one_are_kept() -> None:
    assert {1, FORMAT_VERSION} <= set(KEPT)


@pytest.mark.long
@pytest.mark.parametrize(
    "version", [pytest.param(version, marks=pytest.mark.long) if version == 1 else version for version in KEPT if version not in OPENED]
)
def test_an_older_format_is_refused_and_its_tables_are_taken_over_with_the_columns_that_they_lack(
    version: int, open_kept: OpenKept, tmp_path: Path
) -> None:
    w = open_kept(version)
    with pytest.raises(OwnershipError, match=rf"has the state's format {version}, .* go on with the version that wrote it") as caught:
        w.resolve()
    assert "`halfway resolve --adopt`" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(StateFormatError, match=f"has the state's format {version}"):
        view_pending(read_state(lambda: w.spark, w.settings.storage).rows)

    for run in range(RUNS):
        first_part(w, run)
    before = {name: set(w.by_id(name)) for name in (Table.MESSAGES, Table.DISCARDED)}
    w.settings = w.settings.model_copy(update={"storage": w.settings.storage.model_copy(update={"checkpoint": str(tmp_path / "new")})})
    w.op("pending", b"COMMIT", 50_000)
    w.tick(52_000)
    w.resolve(adopt=True)
    assert {name: set(w.by_id(name)) for name in before} == {**before, Table.MESSAGES: {"committed", "pending"}}
    ops = {name: row["op_offset"] is not None for name, row in w.by_id(Table.MESSAGES).items()}
    assert ops == {"committed": version >= 6, "pending": True}
    read = [message.transaction_id for batch in MessageReader(w.settings.storage).read() for message in batch.messages]
    assert read == ["committed", "pending"]


@pytest.mark.parametrize("version", OPENED)
def test_a_job_of_an_older_format_goes_on(version: int, open_kept: OpenKept) -> None:
    w = open_kept(version)
    for run in range(RUNS):
        first_part(w, run)
    assert (set(w.by_id(Table.MESSAGES)), set(w.by_id(Table.DISCARDED))) == ({"committed"}, {"discarded"})

    w.op("pending", b"COMMIT", 50_000)
    w.half("early", 49_000)
    w.op("committed", b"COMMIT", 50_000)
    w.op("discarded", b"COMMIT", 50_000)
    w.tick(52_000)
    w.resolve()
    w.tick(62_000)
    w.resolve()

    assert set(w.by_id(Table.MESSAGES)) == {"committed", "pending", "early"}
    read = [message.transaction_id for batch in MessageReader(w.settings.storage).read() for message in batch.messages]
    assert read[0] == "committed"
    assert set(read) == {"committed", "pending", "early"}
    assert {name: (row["reason"], row["check_times"]) for name, row in w.by_id(Table.DISCARDED).items()} == {
        "discarded": ("check_max", 2),
        "checked": ("check_max", 2),
    }
    assert sorted(row["reason"] for row in w.rows(Table.QUARANTINE)) == ["incarnation_refused", "late_verdict", "missing_header"]
    numbers = [(key, headers["TRANSACTION_CHECK_TIMES"]) for key, _, headers in w.checks()]
    assert numbers == [("checked", b"2")], "the earlier checks are in the old topic"
