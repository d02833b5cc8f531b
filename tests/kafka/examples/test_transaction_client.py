"""The example client in Java loses no check that it failed to answer."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.service import CLIENT_SOURCE, java_program
from halfway.schemas.settings import KafkaSettings
from halfway.schemas.tables import Table
from tests.support.client_world import check_of, ops, send_checks
from tests.support.job_world import MakeWorld


def run(kafka: KafkaSettings, name: str, folder: Path) -> str:
    """Run a program that uses the client, and return what it prints."""
    program = java_program(name, (CLIENT_SOURCE, Path(__file__).with_name(f"{name}.java")), folder / "java")
    arguments = [kafka.servers(), kafka.half_topic, kafka.op_topic, kafka.check_topic]
    return subprocess.run([*program, *arguments], capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.slow
def test_checks_are_answered_after_a_failure(world: MakeWorld, tmp_path: Path) -> None:
    w = world(partitions=1)
    kafka = w.settings.kafka
    for name in "abc":
        w.half(name)
    w.tick(7_000)
    w.resolve()
    assert run(kafka, "AnswersAfterFailure", tmp_path).split() == ["failed", "failed", "3"]
    w.resolve()
    assert {name: row.check_times for name, row in w.by_id(Table.MESSAGES).items()} == dict.fromkeys("abc", 1)


@pytest.mark.slow
def test_a_look_up_that_fails_holds_up_no_other_check(kafka: KafkaSettings, tmp_path: Path) -> None:
    send_checks(kafka, *(check_of(name, group="g") for name in "abc"))
    run(kafka, "LookUpFails", tmp_path)
    answers = {name: (headers["ACTION"], headers.get("REMARK")) for name, headers in ops(kafka) if "FROM_CHECK" in headers}
    assert answers == {"a": ("COMMIT", None), "b": ("UNKNOWN", "java.sql.SQLException"), "c": ("COMMIT", None)}
