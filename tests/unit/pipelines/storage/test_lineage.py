"""What a batch was made of, as the tables know it."""

import json
from pathlib import Path

import pytest

from halfway.conf.loader import load_settings
from halfway.pipelines.storage.lineage import (
    BatchOrigin,
    TableCommit,
    _last_batch,
    commit_of,
    is_last_batch_told,
    origin_in,
    verify_commits,
)
from halfway.pipelines.storage.missing_tables import OFFSETS
from halfway.pipelines.storage.state_reader import LocalFiles
from halfway.schemas.errors import OwnershipError
from halfway.schemas.tables import Table


def offsets(**ends: int) -> str:
    return "v1\n{}\n" + json.dumps({"half": {partition[1:]: end for partition, end in ends.items()}})


def test_an_origin_is_the_same_for_the_same_offsets_only() -> None:
    one = BatchOrigin.of("q", 3, offsets(p0=5, p1=7))
    assert one == BatchOrigin.of("q", 3, offsets(p1=7, p0=5))
    assert one != BatchOrigin.of("q", 3, offsets(p0=7, p1=5))
    assert one.read == 12


def test_the_newest_origin_of_the_query_is_found_among_other_commits() -> None:
    older, newest, others = (BatchOrigin.of(query, batch, offsets(p0=batch)) for query, batch in (("q", 1), ("q", 2), ("other", 9)))
    commits = [None, "made by hand", "[1]", '{"batch_id": 1}', others.to_json(), newest.to_json(), older.to_json()]
    assert origin_in(commits, "q") == newest
    assert origin_in(commits[:5], "q") is None


APPEND = "WRITE"


@pytest.mark.parametrize(
    ("commits", "told"),
    [
        ([("CREATE TABLE", None), ("ADD COLUMNS", None)], True),
        ([("CREATE TABLE", None), (APPEND, "q"), ("OPTIMIZE", None), ("VACUUM END", None)], True),
        ([("CREATE TABLE", None), (APPEND, "q"), (APPEND, "other")], True),
        ([("CREATE TABLE", None), (APPEND, "other")], True),
        ([("CLONE", None)], False),
        ([("CREATE TABLE", None), (APPEND, "q"), (APPEND, None)], False),
        ([("CREATE TABLE", None), (APPEND, "q"), ("RESTORE", None), ("OPTIMIZE", None)], False),
        ([("CREATE TABLE", None), (APPEND, None), (APPEND, "q")], True),
    ],
)
def test_commits_is_last_batch_told_unless_another_program_has_written_since(commits: list[tuple[str, str | None]], told: bool) -> None:
    notes = [query and BatchOrigin.of(query, 1, offsets(p0=1)).to_json() for _, query in commits]
    history = [TableCommit(version, operation, note) for version, ((operation, _), note) in enumerate(zip(commits, notes, strict=True))]
    assert is_last_batch_told(history[::-1], "q") == told


def test_a_history_whose_beginning_is_gone_does_not_tell_that_a_query_has_no_batch() -> None:
    assert not is_last_batch_told([TableCommit(7, "OPTIMIZE", None)], "q")


def commit(note: str) -> TableCommit:
    return TableCommit(7, APPEND, note)


@pytest.mark.parametrize(
    ("operations", "last"),
    [
        (["1", "2"], 2),
        (["1", "OPTIMIZE", "DELETE"], 1),
        ([], -1),
        (["1", "2", ("RESTORE", 1)], 1),
        (["1", "2", ("RESTORE", 1), ("RESTORE", 2)], 2),
        (["1", "2", ("RESTORE", 1), "3"], 3),
        (["1", "2", ("RESTORE", 0)], -1),
        (["1", "2", ("RESTORE", None)], -1),
        (["1", APPEND], None),
        (["1", "CLONE"], None),
    ],
)
def test_the_last_batch_that_a_table_holds(operations: list[str | tuple[str, int | None]], last: int | None) -> None:
    history = [commit_of(0, "CREATE TABLE", None, {"isManaged": "false"})]
    for version, each in enumerate(operations, 1):
        operation, restored = each if isinstance(each, tuple) else (each, None)
        note = BatchOrigin.of("q", int(operation), offsets(p0=1)).to_json() if operation.isdecimal() else None
        history.append(commit_of(version, APPEND if note else operation, note, {"version": restored, "timestamp": None}))
    assert _last_batch(history[::-1], "q") == last


class RemovedMeanwhile(LocalFiles):
    """A checkpoint whose job removes its oldest batch after a reader has listed it."""

    def batches(self, of: str) -> list[int]:
        found = super().batches(of)
        for first in found[:1]:
            (self.folder / of / str(first)).unlink()
        return found


def test_a_batch_that_a_running_job_removes_meanwhile_is_passed_over(tmp_path: Path) -> None:
    storage = load_settings(environ={}, overrides={"storage.checkpoint": str(tmp_path)}).storage
    (tmp_path / OFFSETS).mkdir()
    for batch_id, end in ((4, 40), (5, 50)):
        (tmp_path / OFFSETS / str(batch_id)).write_text(offsets(p0=end))
    origin = BatchOrigin.of("q", 4, offsets(p0=40)).to_json()
    verify_commits(RemovedMeanwhile(tmp_path), storage, "q", lambda table: [commit(origin)] if table is Table.MESSAGES else [])
    ahead = BatchOrigin.of("q", 4, offsets(p0=51)).to_json()
    with pytest.raises(OwnershipError, match="has not read what batch 4"):
        verify_commits(LocalFiles(tmp_path), storage, "q", lambda _: [commit(ahead)])
