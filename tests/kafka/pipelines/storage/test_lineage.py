"""A checkpoint restored from a backup is refused where its tables hold what it has not read."""

import shutil
from pathlib import Path

import pytest

from halfway.pipelines.operate.doctor.finding import Health
from halfway.pipelines.operate.doctor.storage_checks import storage_findings
from halfway.pipelines.storage.batch_settings import BATCH_SETTINGS_FILE
from halfway.pipelines.storage.local_ownership import read_local_ownership
from halfway.pipelines.storage.manifest import MANIFEST_FILE, METADATA_FILE
from halfway.pipelines.storage.missing_tables import OFFSETS
from halfway.pipelines.storage.state_reader import COMMITS, LocalFiles
from halfway.schemas.errors import OwnershipError, SetupError
from halfway.schemas.tables import Table
from tests.support.job_world import MakeWorld, World


def send(w: World, number: int) -> None:
    w.half(f"t{number}", number)
    w.op(f"t{number}", b"COMMIT", number)
    w.tick(number)
    w.resolve()


def save(w: World, folder: Path) -> None:
    shutil.copytree(w.settings.storage.checkpoint, folder)


def restore(w: World, folder: Path) -> None:
    shutil.rmtree(w.settings.storage.checkpoint)
    shutil.copytree(folder, w.settings.storage.checkpoint)


def told_by_doctor(w: World, health: Health) -> str:
    """Return what `halfway doctor` says of the ownership."""
    [finding] = [each for each in storage_findings(w.settings) if each.check == "ownership"]
    assert finding.health is health, finding
    return finding.text


def forget_origins(w: World, table: Table) -> None:
    """Let no commit of a table say what its batch was made of, as in a copy of the table."""
    for commit in Path(w.settings.storage.warehouse, table, "_delta_log").glob("*.json"):
        commit.write_text(commit.read_text().replace('"userMetadata"', '"formerMetadata"'))
        commit.with_name(f".{commit.name}.crc").unlink(missing_ok=True)


def test_an_older_checkpoint_is_refused_and_the_newest_goes_on(world: MakeWorld, tmp_path: Path) -> None:
    w = world()
    send(w, 1)
    save(w, tmp_path / "older")
    send(w, 2)
    save(w, tmp_path / "newest")
    restore(w, tmp_path / "older")
    w.half("t3", 3)
    w.op("t3", b"COMMIT", 3)
    older = r"ends with batch 0, and the table .*messages` holds batch 1 of it: .*Restore the newest"
    with pytest.raises(OwnershipError, match=older) as caught:
        w.resolve()
    assert "\n" not in str(caught.value)
    assert "it is an older copy" in told_by_doctor(w, Health.PROBLEM)
    forget_origins(w, Table.MESSAGES)
    with pytest.raises(OwnershipError, match=older):
        w.resolve()
    restore(w, tmp_path / "newest")
    assert told_by_doctor(w, Health.OK) == "checkpoint and tables belong together"
    w.resolve()
    assert set(w.by_id(Table.MESSAGES)) == {"t1", "t2", "t3"}


@pytest.mark.parametrize("how", ["files", "clone", *(pytest.param(each, marks=pytest.mark.long) for each in ("in place", "torn"))])
def test_tables_that_are_older_than_their_checkpoint_are_refused(world: MakeWorld, tmp_path: Path, how: str) -> None:
    """What was committed since the backup would be lost, and nobody would say so."""
    w = world()
    table = Path(w.settings.storage.warehouse, Table.MESSAGES)
    send(w, 1)
    shutil.copytree(table, tmp_path / "backup")
    send(w, 2)
    w.tick(3)
    w.resolve()  # a batch that appends nothing
    if how == "files":
        shutil.rmtree(table)
        shutil.copytree(tmp_path / "backup", table)
    elif how == "clone":  # Delta still knows the batches that it had.
        w.spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('delta.appendOnly' = 'false')")
        w.spark.sql(f"DELETE FROM delta.`{table}`")
        w.spark.sql(f"CREATE OR REPLACE TABLE delta.`{table}` SHALLOW CLONE delta.`{tmp_path / 'backup'}`")
    elif how == "torn":
        newest_commit = max((table / "_delta_log").glob("[0-9]*.json"))
        newest_commit.write_bytes(b"")  # as a power cut may leave it
        newest_commit.with_name(f".{newest_commit.name}.crc").unlink()
    else:
        newest = w.spark.sql(f"DESCRIBE HISTORY delta.`{table}` LIMIT 1").first()
        w.spark.sql(f"RESTORE TABLE delta.`{table}` TO VERSION AS OF {newest.version - 1}")
    if how != "clone":  # The doctor reads no rows.
        assert "lacks batch 1" in told_by_doctor(w, Health.PROBLEM)
    with pytest.raises(OwnershipError, match=r"the table .*messages`? lacks batch 1, which the checkpoint .*--adopt"):
        w.resolve()
    if how == "in place":
        w.spark.sql(f"RESTORE TABLE delta.`{table}` TO VERSION AS OF {newest.version}")
        assert told_by_doctor(w, Health.OK)
        send(w, 4)
        assert set(w.by_id(Table.MESSAGES)) == {"t1", "t2", "t4"}


@pytest.mark.long
def test_a_table_whose_last_row_somebody_has_deleted_is_no_backup(world: MakeWorld) -> None:
    w = world()
    send(w, 1)
    send(w, 2)
    table = f"delta.`{w.settings.storage.warehouse}/{Table.MESSAGES}`"
    w.spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.appendOnly' = 'false')")
    wanted = "(SELECT 't2' AS transaction_id)"
    w.spark.sql(f"MERGE INTO {table} AS t USING {wanted} AS s ON t.transaction_id = s.transaction_id WHEN MATCHED THEN DELETE")
    w.spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.appendOnly' = 'true')")
    send(w, 3)
    assert set(w.by_id(Table.MESSAGES)) == {"t1", "t3"}


@pytest.mark.long
def test_of_two_copies_that_ran_on_one_is_refused(world: MakeWorld, tmp_path: Path) -> None:
    """Both have a batch 1, and the tables hold that of the second copy."""
    w = world()
    send(w, 1)
    save(w, tmp_path / "copy")
    w.tick(2)
    w.resolve()  # a batch that appends nothing
    save(w, tmp_path / "first")
    restore(w, tmp_path / "copy")
    send(w, 3)
    save(w, tmp_path / "second")
    restore(w, tmp_path / "first")
    with pytest.raises(OwnershipError, match=r"has not read what batch 1 of the table .*messages` was made of: it is an older copy"):
        w.resolve()
    restore(w, tmp_path / "second")
    send(w, 4)
    assert set(w.by_id(Table.MESSAGES)) == {"t1", "t3", "t4"}


@pytest.mark.long
def test_a_checkpoint_goes_on_after_a_batch_that_was_written_and_not_committed(world: MakeWorld) -> None:
    w = world()
    send(w, 1)
    send(w, 2)
    commits = Path(w.settings.storage.checkpoint) / "commits"
    for name in ("1", ".1.crc"):
        (commits / name).unlink(missing_ok=True)
    send(w, 3)
    assert set(w.by_id(Table.MESSAGES)) == {"t1", "t2", "t3"}


def test_a_file_that_a_power_cut_has_left_in_part_is_named(world: MakeWorld) -> None:
    w = world()
    send(w, 1)
    newest = [f"{log}/{max(LocalFiles(Path(w.settings.storage.checkpoint)).batches(log))}" for log in (OFFSETS, COMMITS)]
    for name in (MANIFEST_FILE, METADATA_FILE, BATCH_SETTINGS_FILE, *newest):
        file = Path(w.settings.storage.checkpoint, name)
        whole = file.read_bytes()
        for left in (b"", whole[:5]):
            file.write_bytes(left)
            with pytest.raises(OwnershipError, match=f"/{name} is damaged: restore it, or start a new checkpoint"):
                w.resolve()
            if name in newest:
                with pytest.raises(SetupError, match=f"cannot read the checkpoint .*: {name} is damaged"):
                    read_local_ownership(w.settings.storage)
        file.write_bytes(whole)
    send(w, 2)
    assert set(w.by_id(Table.MESSAGES)) == {"t1", "t2"}
