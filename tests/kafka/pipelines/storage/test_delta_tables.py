"""The tables' own properties, which name their owner."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from halfway.conf.loader import load_settings
from halfway.pipelines.storage.delta_tables import claim_tables, owner_of
from halfway.schemas.tables import Table


@pytest.mark.parametrize("query_id", ["x', 'delta.appendOnly' = 'false", "\\', 'a' = 'o\"brien`\\"])
def test_the_id_of_a_query_may_be_any_text(spark: SparkSession, tmp_path: Path, query_id: str) -> None:
    """It comes from a file of the checkpoint, and goes into SQL."""
    storage = load_settings(environ={}, overrides={"storage.warehouse": str(tmp_path)}).storage
    claim_tables(spark, storage, query_id)
    assert {owner_of(spark, storage, table).query_id for table in Table} == {query_id}
    claim_tables(spark, storage, f"{query_id}2", 1)
    owner = owner_of(spark, storage, Table.MESSAGES)
    assert (owner.query_id, owner.epoch, owner.former_id) == (f"{query_id}2", 1, query_id)
