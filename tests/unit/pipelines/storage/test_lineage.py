"""What a batch was made of, as the tables know it."""

import json
from pathlib import Path

import pytest

from halfway.conf.loader import load_settings
from halfway.pipelines.storage.delta_tables import FENCED, fence_note
from halfway.pipelines.storage.lineage import (
    BatchOrigin,
    TableCommit,
    TableHistory,
    _is_of_another,
    _last_batch,
    _taken_back,
    _verify_not_fenced,
    appended_in,
    commit_of,
    origin_in,
    verify_histories,
)
from halfway.pipelines.storage.manifest import STATUS_FILE
from halfway.pipelines.storage.missing_tables import OFFSETS
from halfway.pipelines.storage.state_reader import COMMITS, LocalFiles
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
    ("commits", "last"),
    [
        ([("CREATE TABLE", None), ("ADD COLUMNS", None)], -1),
        ([("CREATE TABLE", None), (APPEND, "q"), ("OPTIMIZE", None), ("DELETE", None), ("VACUUM END", None)], 1),
        ([("CREATE TABLE", None), (APPEND, "q"), (APPEND, "q")], 2),
        ([("CREATE TABLE", None), (APPEND, "q"), (APPEND, "other")], 1),
        ([("CREATE TABLE", None), (APPEND, "other")], -1),
        ([("CLONE", None)], None),
        ([("CREATE TABLE", None), (APPEND, "q"), (APPEND, None)], None),
        ([("CREATE TABLE", None), (APPEND, "q"), ("REORG", None), ("CHANGE COLUMN", None), ("COMPUTE STATS", None)], 1),
        ([("CREATE TABLE", None), (APPEND, None), (APPEND, "q")], 2),
    ],
)
def test_commits_tell_the_last_batch_unless_another_program_has_written_since(
    commits: list[tuple[str, str | None]], last: int | None
) -> None:
    history = [
        TableCommit(version, operation, query and BatchOrigin.of(query, version, offsets(p0=1)).to_json())
        for version, (operation, query) in enumerate(commits)
    ]
    assert _last_batch(history[::-1], "q") == last


def test_a_history_whose_beginning_is_gone_does_not_tell_that_a_query_has_no_batch() -> None:
    assert _last_batch([TableCommit(7, "OPTIMIZE", None)], "q") is None


def commit(note: str) -> TableCommit:
    return TableCommit(7, APPEND, note)


@pytest.mark.parametrize(
    ("operations", "batch_id"),
    [
        ([], None),
        (["1", "2"], None),
        (["1", "2", ("RESTORE", 1)], 2),
        (["1", "2", ("RESTORE", 1), "OPTIMIZE", ("RESTORE", 2)], None),
        (["1", "2", ("RESTORE", 1), "3"], 2),
        (["1", "OPTIMIZE", ("RESTORE", 1), "2"], None),
        (["1", "2", ("RESTORE", 0)], 2),
        (["1", "2", ("RESTORE", None)], 2),
    ],
)
def test_a_restore_takes_batches_back_whatever_is_appended_later(
    operations: list[str | tuple[str, int | None]], batch_id: int | None
) -> None:
    history = [commit_of(0, "CREATE TABLE", None, {"isManaged": "false"})]
    for version, each in enumerate(operations, 1):
        operation, restored = each if isinstance(each, tuple) else (each, None)
        note = BatchOrigin.of("q", int(operation), offsets(p0=1)).to_json() if operation.isdecimal() else None
        history.append(commit_of(version, APPEND if note else operation, note, {"version": restored, "timestamp": None}))
    assert _taken_back(history[::-1], "q") == batch_id
    assert _taken_back(history[::-1], "other") is None


@pytest.mark.parametrize(("committed", "appended"), [(50, {"messages": 50, "discarded": 7}), (49, {"messages": 48, "discarded": 7})])
def test_of_a_batch_that_was_not_committed_only_the_one_before_is_known(tmp_path: Path, committed: int, appended: dict[str, int]) -> None:
    """The job was killed after it had written its status, and before Spark committed the batch."""
    (tmp_path / COMMITS).mkdir()
    (tmp_path / COMMITS / str(committed)).touch()
    known = {"appended": {"messages": 50, "discarded": 7}, "appended_before": {"messages": 48, "discarded": 7}}
    (tmp_path / STATUS_FILE).write_text(json.dumps({"batch_id": 50, "seconds": 1, "written_at_ms": 1, **known}))
    assert appended_in(LocalFiles(tmp_path)) == appended


def test_tables_lack_what_delta_says_that_they_have_not_taken(tmp_path: Path) -> None:
    """Whatever their newest commits say, as after a hundred compactions, or where a power cut has emptied one."""
    storage = load_settings(environ={}, overrides={"storage.checkpoint": str(tmp_path)}).storage
    for folder in (OFFSETS, COMMITS):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "5").write_text(offsets(p0=50))
    (tmp_path / STATUS_FILE).write_text(json.dumps({"batch_id": 5, "seconds": 1, "written_at_ms": 1, "appended": {"messages": 5}}))
    for newest in ([TableCommit(205, "VACUUM END", None)], [TableCommit(9, "", None)]):
        verify_histories(LocalFiles(tmp_path), storage, "q", lambda _, newest=newest: TableHistory(newest, 5))
        with pytest.raises(OwnershipError, match=r"messages.* lacks batch 5, which the checkpoint"):
            verify_histories(LocalFiles(tmp_path), storage, "q", lambda _, newest=newest: TableHistory(newest, 4))


@pytest.mark.parametrize(
    ("operation", "note", "is_of_another"),
    [
        *(
            (operation, None, True)
            for operation in ("CLONE", "CREATE TABLE AS SELECT", "CREATE OR REPLACE TABLE AS SELECT", "MERGE", APPEND)
        ),
        *((operation, None, False) for operation in ("OPTIMIZE", "VACUUM END", "CHANGE COLUMN", "REORG")),
        *((APPEND, note, False) for note in (fence_note("q"), fence_note("other"), BatchOrigin("q", 1, 1, "").to_json())),
    ],
)
def test_a_clone_of_a_table_has_rows_that_the_job_did_not_write(operation: str, note: str | None, *, is_of_another: bool) -> None:
    """A hundred compactions are none: only rows tell then what a clone holds, and a batch may have had none."""
    assert _is_of_another(TableCommit(206, operation, note)) == is_of_another


def test_tables_whose_adoption_was_undone_are_refused(tmp_path: Path) -> None:
    """RESTORE puts the owner back. Delta still skips what a query appends that was fenced."""
    storage = load_settings(environ={}, overrides={"storage.checkpoint": str(tmp_path)}).storage
    own = BatchOrigin("q", 1, 1, "").to_json()
    commits = [TableCommit(4, "RESTORE", None, 2), TableCommit(3, APPEND, fence_note("q")), TableCommit(2, APPEND, own)]
    with pytest.raises(OwnershipError, match=r"messages.* takes no more batches of the checkpoint .*--adopt"):
        _verify_not_fenced(storage, "q", {Table.MESSAGES: TableHistory(commits, None)})
    _verify_not_fenced(storage, "other", {Table.MESSAGES: TableHistory(commits, None)})
    with pytest.raises(OwnershipError, match="takes no more batches"):  # The note is out of sight, and Delta tells.
        _verify_not_fenced(storage, "q", {Table.MESSAGES: TableHistory(commits[:1], FENCED)})


@pytest.mark.parametrize(("predicates", "is_of_another"), [("[]", False), ('[{"actionType":"insert"}]', True), (None, True)])
def test_a_merge_that_inserts_nothing_brings_no_rows(predicates: str | None, *, is_of_another: bool) -> None:
    assert _is_of_another(commit_of(7, "MERGE", None, {"notMatchedPredicates": predicates})) == is_of_another


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
    of_messages, of_others = TableHistory([commit(origin)], 4), TableHistory([], None)
    verify_histories(RemovedMeanwhile(tmp_path), storage, "q", lambda table: of_messages if table is Table.MESSAGES else of_others)
    ahead = BatchOrigin.of("q", 4, offsets(p0=51)).to_json()
    with pytest.raises(OwnershipError, match="has not read what batch 4"):
        verify_histories(LocalFiles(tmp_path), storage, "q", lambda _: TableHistory([commit(ahead)], 4))
