"""The example client in Java loses no check that it failed to answer."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.service import CLIENT_SOURCE, java_program
from halfway.schemas.tables import Table
from tests.support.job_world import MakeWorld


@pytest.mark.slow
def test_checks_are_answered_after_a_failure(world: MakeWorld, tmp_path: Path) -> None:
    w = world(partitions=1)
    kafka = w.settings.kafka
    for name in "abc":
        w.half(name)
    w.tick(7_000)
    w.resolve()
    program = java_program("AnswersAfterFailure", (CLIENT_SOURCE, Path(__file__).with_name("AnswersAfterFailure.java")), tmp_path / "java")
    arguments = [kafka.servers(), kafka.half_topic, kafka.op_topic, kafka.check_topic]
    done = subprocess.run([*program, *arguments], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["failed", "3"]
    w.resolve()
    assert {name: row.check_times for name, row in w.by_id(Table.MESSAGES).items()} == dict.fromkeys("abc", 1)
