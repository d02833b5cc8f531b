"""The job opens checkpoints and tables of older versions, and goes on where they stopped."""

import tarfile
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from halfway.conf.loader import load_settings
from halfway.pipelines.local.broker import LocalBroker
from halfway.schemas.tables import Table
from tests.support.job_world import World
from tests.support.older_formats import DATA, RUNS, first_part, make_topics, settings_for

VERSIONS = sorted(int(path.name.removeprefix("format-").removesuffix(".tar.gz")) for path in DATA.glob("format-*.tar.gz"))


def test_the_first_format_is_kept() -> None:
    assert VERSIONS[:1] == [1]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_of_an_older_format_goes_on(version: int, spark: SparkSession, broker: LocalBroker, tmp_path: Path) -> None:
    with tarfile.open(DATA / f"format-{version}.tar.gz") as kept:
        kept.extractall(tmp_path, filter="data")
    servers = str(broker.status()["bootstrap_servers"])
    settings = load_settings(environ={}, overrides=settings_for(version, tmp_path, servers))
    make_topics(settings)
    w = World(spark, settings)
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
    assert {name: (row["reason"], row["check_times"]) for name, row in w.by_id(Table.DISCARDED).items()} == {
        "discarded": ("check_max", 2),
        "checked": ("check_max", 2),
    }
    assert sorted(row["reason"] for row in w.rows(Table.QUARANTINE)) == ["incarnation_refused", "late_verdict", "missing_header"]
    numbers = [(key, headers["TRANSACTION_CHECK_TIMES"]) for key, _, headers in w.checks()]
    assert numbers == [("checked", b"2")], "the earlier checks are in the old topic"
