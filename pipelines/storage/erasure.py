"""Erases what one transaction left in the tables (docs/security.md#erasure). Nothing else changes a row.

The rows stay, with id, topic, group, times and pointers: a later `--adopt` must still know what was committed and
discarded, and bookmarks must still find every batch. What the producer sent is null.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from delta.exceptions import (
    ConcurrentAppendException,
    ConcurrentDeleteDeleteException,
    ConcurrentDeleteReadException,
    MetadataChangedException,
)
from delta.tables import DeltaTable
from pyspark.sql import Column, Row, SparkSession
from pyspark.sql import functions as F

from halfway.pipelines.storage.delta_tables import (
    create_table,
    local_warehouse,
    property_ms,
    save,
    set_append_only,
    table_name,
    table_path,
)
from halfway.pipelines.storage.locks import commit_lock
from halfway.schemas.errors import HalfwayError
from halfway.schemas.headers import PGROUP
from halfway.schemas.settings import StorageSettings
from halfway.schemas.tables import ERASURES, ERASURES_SCHEMA, Table

_SENT = ("tags", "keys", "body", "properties")
_ERASED: Mapping[Table, tuple[str, ...]] = {
    Table.MESSAGES: _SENT,
    Table.DISCARDED: _SENT,
    # `detail` may quote a header.
    Table.QUARANTINE: ("value", "headers", "detail"),
}
"""The columns with what a producer has sent."""
_TRIES = 20
# By an append, or by a compaction. They have no base class of their own.
_OVERTAKEN = (ConcurrentAppendException, ConcurrentDeleteDeleteException, ConcurrentDeleteReadException, MetadataChangedException)


def rows_to_erase(transaction_id: str, producer_group: str | None, table: Table) -> Column:
    """Return the condition on the rows of a transaction that still hold something of what was sent.

    Args:
        transaction_id: its id.
        producer_group: its group; None for every group's.
        table: the table.
    """
    if table is Table.QUARANTINE:
        # Without value and headers a row is a pointer, and its detail names the rule.
        filled = F.col("value").isNotNull() | F.col("headers").isNotNull()
        groups = F.filter("headers", lambda each: (each["key"] == PGROUP) & (F.length(each["value"]) > 0))["value"]
        # Headers that cannot be read, or are far too many, are not in the table: they may have named the group.
        named = F.coalesce(F.size(groups) <= 0, F.lit(True)) | F.array_contains(groups, F.lit((producer_group or "").encode()))
    else:
        filled = F.coalesce(*(F.col(name).cast("string") for name in ("body", "tags", "keys")), F.to_json("properties")).isNotNull()
        named = F.col("producer_group") == F.lit(producer_group)
    own = (F.col("transaction_id") == F.lit(transaction_id)) & filled
    return own if producer_group is None else own & named


def erase_rows(spark: SparkSession, storage: StorageSettings, table: Table, rows: Column) -> None:
    """Set to null what the producer has sent, in some rows of a table. Repeating it does nothing twice.

    The table takes no change but this one: its property `delta.appendOnly` is lifted for it. On a local disk the job
    waits meanwhile. Elsewhere an append that the property's change overtakes is repeated by the job, and a change that
    an append overtakes is repeated here.

    Raises:
        HalfwayError: the job appends faster than the table can be changed.
    """
    with commit_lock(local_warehouse(spark, storage), table), _changeable(spark, storage, table):
        for left in reversed(range(_TRIES)):
            try:
                _delta_table(spark, storage, table).update(rows, {name: F.lit(None) for name in _ERASED[table]})
                return
            except _OVERTAKEN:
                if not left:
                    raise HalfwayError(
                        f"the table {table_name(storage, table)} was appended to during each of {_TRIES} tries: stop the job for a minute, "
                        "and run the command again"
                    ) from None


@contextmanager
def _changeable(spark: SparkSession, storage: StorageSettings, table: Table) -> Iterator[None]:
    set_append_only(spark, storage, table, "false")
    try:
        yield
    finally:
        set_append_only(spark, storage, table, "true")


def _delta_table(spark: SparkSession, storage: StorageSettings, table: Table) -> DeltaTable:
    if storage.catalog_schema:
        return DeltaTable.forName(spark, table_name(storage, table))
    return DeltaTable.forPath(spark, table_path(storage, table))


def note_erasure(spark: SparkSession, storage: StorageSettings, row: Row) -> None:
    """Append a row to the table `erasures` (ERASURES_SCHEMA), which is made if it does not exist.

    Raises:
        SetupError: the table cannot be created.
    """
    with commit_lock(local_warehouse(spark, storage), ERASURES):
        create_table(spark, storage, ERASURES, ERASURES_SCHEMA)
        writer = spark.createDataFrame([row], ERASURES_SCHEMA).write.format("delta").mode("append")
        save(writer, storage, ERASURES)


def old_files_kept_ms(spark: SparkSession, storage: StorageSettings, table: Table) -> int:
    """Return how long VACUUM leaves files that were replaced."""
    return property_ms(spark, storage, table, "delta.deletedFileRetentionDuration", "interval 7 days")
