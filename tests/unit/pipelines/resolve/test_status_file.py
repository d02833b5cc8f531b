"""A start takes up which checks count from `status.json`, whatever a crash has left of it."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halfway.conf.loader import load_settings
from halfway.pipelines.resolve import job as job_module
from halfway.pipelines.resolve.groups import GroupWatch
from halfway.pipelines.resolve.job import ResolveJob
from halfway.pipelines.storage import file_systems
from halfway.pipelines.storage.manifest import STATUS_FILE
from halfway.pipelines.storage.state_reader import LocalFiles
from halfway.schemas.batch_status import BatchStatus
from halfway.schemas.tables import Table

WRITTEN_MS = 1_700_000_000_000
STATUS = {
    "batch_id": 7,
    "seconds": 1.0,
    "written_at_ms": WRITTEN_MS,
    "horizon_ms": 1_699_996_400_000,
    "pending": 1,
    "counts": {},
    "groups_listed_ms_ago": {"g": 7},
    "sent_checks": {"asked_ms": 0, "ms_ago": [[0, 1_699_996_400_000]]},
}


def asked_after(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, now_ms: int = WRITTEN_MS) -> int:
    """Return what the first tick of a start says, by this machine's clock."""
    monkeypatch.setattr(file_systems, "on_local_disk", lambda _, uri: Path(uri))
    monkeypatch.setattr(job_module, "time", SimpleNamespace(time_ns=lambda: now_ms * 1_000_000))
    (folder / STATUS_FILE).write_text(text)
    overrides = {"kafka.bootstrap_servers": "none:1", "storage.checkpoint": str(folder)}
    job = ResolveJob(load_settings(environ={}, overrides=overrides))
    spark: Any = None
    groups = GroupWatch(spark, job._settings.kafka, 30_000, lambda: now_ms)
    job._take_up_status(spark, groups)
    assert groups.listed_ms_ago().keys() == ({"g"} if '"g"' in text else set())
    return job._sent.asked_ms()


def test_commands_read_what_the_job_wrote_and_nothing_of_what_a_power_cut_left() -> None:
    whole = json.dumps(STATUS)
    status = BatchStatus.parse(whole)
    assert status is not None
    assert status.sent_checks.ms_ago == ((0, STATUS["horizon_ms"]),)
    assert BatchStatus.parse(status.to_json()) == status
    counted = replace(status, counts=Counter({"halves": 7}), appended={Table.MESSAGES: 7}, groups_listed_ms_ago={"grüße": 7})
    assert BatchStatus.parse(counted.to_json()) == counted
    assert counted.to_json().isascii(), "a part that a power cut leaves is text"
    assert [BatchStatus.parse(text) for text in (None, "", "\0" * 200, whole[:40], "[7]", '{"batch_id": 7}')] == [None] * 6


def test_a_status_of_which_a_power_cut_left_no_text_ends_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disks put back blocks of something else."""
    left = json.dumps(STATUS)[:40].encode() + b"\xff\xfe\x80\x00"
    (tmp_path / STATUS_FILE).write_bytes(left)
    monkeypatch.setattr(file_systems, "on_local_disk", lambda _, uri: Path(uri))
    spark: Any = None
    for text in (LocalFiles(tmp_path).text(STATUS_FILE), file_systems.read_text(spark, str(tmp_path / STATUS_FILE))):
        assert text is not None
        assert BatchStatus.parse(text) is None


def test_what_was_sent_long_ago_counts_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_after(json.dumps(STATUS), tmp_path, monkeypatch, WRITTEN_MS + 60_000) == STATUS["horizon_ms"]
    assert asked_after(json.dumps(STATUS), tmp_path, monkeypatch) == 0


@pytest.mark.parametrize(
    "text",
    ["", '{"batch_id": 7, "sec', "{}", json.dumps({**STATUS, "groups_listed_ms_ago": {}, "sent_checks": {"asked_ms": 1, "ms_ago": [3]}})],
    ids=["empty", "cut off", "of another version", "not whole"],
)
def test_a_status_file_that_a_power_cut_left_ends_no_start(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`write_json` renames without `fsync`; on an object store, and on Databricks, others write there too."""
    assert asked_after(text, tmp_path, monkeypatch) == 0
