"""A small run of `make fuzz`: the job accounts for each record of every shape exactly once."""

import shutil
from collections import Counter
from pathlib import Path

import pandas
import pyarrow
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from halfway.schemas.outcomes import Count, Reason
from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table
from tests.fuzz.generator import Control, Fate
from tests.fuzz.judge import RecordKind
from tests.fuzz.reconciliation import reconcile
from tests.fuzz.run import CHECK_MAX, PARTITIONS, SETTINGS, fuzz
from tests.fuzz.signing import Signing
from tests.support.job_world import MakeWorld
from tests.support.kafka_topics import MakeTopics

BROKEN = {
    *(Reason.MISSING_KEY, Reason.KEY_TOO_LONG, Reason.KEY_NOT_UTF8, Reason.MISSING_HEADER, Reason.BAD_HEADER, Reason.DUPLICATE_HEADER),
    *(Reason.UNKNOWN_ACTION, Reason.DELAY_NOT_SUPPORTED, Reason.BODY_TOO_LARGE, Reason.BAD_TICK),
}
RULED = {
    *(Reason.CONFLICTING_VERDICT, Reason.LATE_VERDICT, Reason.ORPHAN_OP, Reason.GROUP_MISMATCH),
    *(Reason.ID_CONFLICT, Reason.STALE_INCARNATION, Reason.INCARNATION_REFUSED),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_record_of_every_shape_is_accounted_for(world: MakeWorld, tmp_path: Path) -> None:
    w = world(partitions=PARTITIONS, **{**SETTINGS, "kafka.max_offsets_per_trigger": 12_000, "trigger.available_now": False})
    result = fuzz(w.settings, lambda: w.spark, records=20_000, seed=7, limit_s=280)
    account = result.account
    assert account.examples == []
    assert account.records > 20_000
    assert set(account.refused_for_one) >= BROKEN
    assert set(account.quarantined) >= BROKEN | RULED

    # Each mistake in the tables, the counts or the control transactions shows as a difference.
    counts = result.run.counts + Counter({Count.HALVES: 1})
    committed = next(name for name, promised in result.control.items() if promised.fate is Fate.COMMIT)
    control = {**result.control, committed: Control(Fate.ROLLBACK, 0)}
    found = reconcile(with_mistakes(w.settings, tmp_path / "mistakes"), counts, control, CHECK_MAX).examples
    shown = (
        "is refused for [], not for",
        "in quarantine has another value",
        "is refused for ['bad_header', 'bad_header']",
        "halves counted",
        "control rollback",
    )
    assert [sum(part in line for line in found) for part in shown] == [1] * len(shown)


def with_mistakes(settings: Settings, warehouse: Path) -> Settings:
    """Copy the tables. In `quarantine` one broken record is missing, one is changed, and one is there twice."""
    for table in (Table.MESSAGES, Table.DISCARDED):
        shutil.copytree(Path(settings.storage.warehouse) / table, warehouse / table)
    rows = DeltaTable(str(Path(settings.storage.warehouse) / Table.QUARANTINE)).to_pyarrow_table().to_pandas()
    broken = rows.index[(rows["reason"] == Reason.BAD_HEADER) & (rows["value"].str.len() > 0)]
    rows.at[broken[0], "value"] = b"another"
    changed = pandas.concat([rows, rows.loc[[broken[1]]]]).drop(index=broken[2])
    write_deltalake(warehouse / Table.QUARANTINE, pyarrow.Table.from_pandas(changed, preserve_index=False))
    return settings.model_copy(update={"storage": settings.storage.model_copy(update={"warehouse": str(warehouse)})})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_signed_forged_and_copied_records_are_accounted_for(topics: MakeTopics, spark: SparkSession, tmp_path: Path) -> None:
    places = {f"storage.{name}": str(tmp_path / name) for name in ("warehouse", "checkpoint")}
    names = {f"kafka.{name}_topic": f"{name}-{tmp_path.name}" for name in ("half", "op")}
    signing = Signing.of(names["kafka.half_topic"], names["kafka.op_topic"])
    own = {**SETTINGS, "kafka.max_offsets_per_trigger": 6_000, "state.buckets": 4, "state.shuffle_partitions": 1}
    settings = topics(PARTITIONS, "CreateTime", {**own, **places, **names, **signing.settings()})
    result = fuzz(settings, lambda: spark, records=10_000, seed=7, limit_s=280, signing=signing)
    account = result.account
    assert account.examples == []
    assert account.refused_for_one[Reason.BAD_SIGNATURE] > 1_000
    assert account.accepted[RecordKind.HALF] > 1_000
    assert result.run.counts[Count.DUPLICATE_HALF] > 0
    assert account.late > 0, "small batches read some halves after their signature was valid"
    forged = reconcile(settings, result.run.counts, result.control, CHECK_MAX).examples
    assert any("is refused for ['bad_signature'], a good" in line for line in forged), "without the keys each of them shows"
