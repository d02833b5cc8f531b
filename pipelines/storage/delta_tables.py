"""The Delta tables: created at the first start, owned by one query, appended to exactly once (decisions 5 and 6).

A query whose tables another one has taken over is *fenced*: it can append nothing more, even if it was frozen in the
middle of an append and wakes up much later. Delta skips an append whose `txnVersion` is not above the last one of its
`txnAppId`, and refuses one while which another commit has used its `txnAppId`. So taking a table over commits the
greatest version under each `txnAppId` of the former owner, and of each other query that Delta knows. No append of them
can come after that.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from delta.exceptions import ConcurrentTransactionException
from delta.tables import DeltaTable
from py4j.java_gateway import JavaClass
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, DataFrameWriter, SparkSession
from pyspark.sql.types import StructField, StructType

from halfway.pipelines.storage.file_systems import first_line_of, on_local_disk
from halfway.pipelines.storage.locks import commit_lock
from halfway.pipelines.storage.missing_tables import OFFSETS, missing_table
from halfway.pipelines.storage.state_reader import HadoopFiles
from halfway.schemas.errors import OwnershipError, SetupError
from halfway.schemas.outcomes import Reason
from halfway.schemas.settings import StorageSettings
from halfway.schemas.tables import SEARCHED_COLUMNS, TABLE_SCHEMAS, Table

_OWNER_PROPERTY = "halfway.query_id"
_EPOCH_PROPERTY = "halfway.epoch"
_FORMER_PROPERTY = "halfway.former_query_id"
_STATISTICS_PROPERTY = "delta.dataSkippingStatsColumns"
_APPEND_ONLY = "delta.appendOnly"
FENCED = 2**63 - 1
"""The greatest `txnVersion`."""
_FENCE_TRIES = 100
_LATER_COLUMNS = frozenset(("epoch", "op_partition", "op_offset"))
"""What tables of an earlier version lack."""
_MEMORY_PROPERTY = "delta.setTransactionRetentionDuration"
_COMMIT_LOCK_LIMIT_S = 60.0
_PROPERTIES = {
    # Append only, and readable by any Delta reader.
    "delta.enableDeletionVectors": "false",
    _APPEND_ONLY: "true",
    # Delta keeps 30 days of log and 7 days of deleted files by default. With a commit a second the log would hold 2.6
    # million commits, which each append lists, and each checkpoint of the log 600,000 names of files that a compaction
    # replaced (docs/tables.md).
    "delta.logRetentionDuration": "interval 6 hours",
    "delta.deletedFileRetentionDuration": "interval 6 hours",
    # Delta writes a checkpoint of the log each 10 commits by default, which takes a few tenths of a second. Reading up
    # to a hundred small files of one line each takes less.
    "delta.checkpointInterval": "100",
}


class Owner(NamedTuple):
    """The query that may append to a table, as the table's properties say."""

    query_id: str | None
    """None if the table has no owner."""
    epoch: int = 0
    former_id: str | None = None
    """The owner before this one."""

    @classmethod
    def of(cls, properties: Mapping[str, str]) -> Self:
        """Read the owner from a table's properties."""
        return cls(properties.get(_OWNER_PROPERTY), int(properties.get(_EPOCH_PROPERTY, 0)), properties.get(_FORMER_PROPERTY))

    def properties(self) -> dict[str, str]:
        """Return the table's properties that name this owner."""
        found = {_OWNER_PROPERTY: self.query_id, _EPOCH_PROPERTY: str(self.epoch), _FORMER_PROPERTY: self.former_id}
        return {name: value for name, value in found.items() if value is not None}


def append_id(query_id: str, what: Table | Reason) -> str:
    """Return the `txnAppId` of a query's appends: one for each table, and one for the lost halves (R17)."""
    return f"{query_id}:{what}"


def append_ids(query_id: str, table: Table) -> list[str]:
    """Return the `txnAppId`s of all appends of a query to a table."""
    return [append_id(query_id, what) for what in ((table, Reason.HALF_LOST) if table is Table.QUARANTINE else (table,))]


def table_path(storage: StorageSettings, table: str) -> str:
    """Return the URI of a table's folder.

    Raises:
        SetupError: the table is in a catalog, which chooses the folder.
    """
    if storage.catalog_schema:
        raise SetupError(
            f"the tables are in the catalog, in {storage.catalog_schema}, and this command reads them as folders: read them with Spark, "
            "or set storage.warehouse instead of storage.catalog_schema"
        )
    return f"{storage.warehouse.rstrip('/')}/{table}"


def table_name(storage: StorageSettings, table: str) -> str:
    """Return the name of a table in SQL, for a folder or in a catalog."""
    if storage.catalog_schema:
        return ".".join(f"`{part}`" for part in (*storage.catalog_schema.split("."), table))
    return f"delta.`{table_path(storage, table)}`"


def table_exists(spark: SparkSession, storage: StorageSettings, table: str) -> bool:
    """Return True if the table exists."""
    if storage.catalog_schema:
        return spark.catalog.tableExists(table_name(storage, table))
    return DeltaTable.isDeltaTable(spark, table_path(storage, table))


def read_table(spark: SparkSession, storage: StorageSettings, table: str) -> DataFrame:
    """Return a table as it is now."""
    if storage.catalog_schema:
        return spark.table(table_name(storage, table))
    return spark.read.format("delta").load(table_path(storage, table))


def stored_tables(spark: SparkSession, storage: StorageSettings) -> dict[Table, DataFrame]:
    """Return the three tables as they are now, in the order `messages`, `discarded`, `quarantine`.

    Raises:
        HalfwayError: a table does not exist, as `verify_exists` says it.
    """
    for table in Table:
        verify_exists(spark, storage, table)
    return {table: read_table(spark, storage, table) for table in Table}


def verify_exists(spark: SparkSession, storage: StorageSettings, table: Table) -> None:
    """Refuse to read a table that does not exist.

    Raises:
        TableError: no job has made it yet.
        OwnershipError: the checkpoint has run, so that the table is gone, or elsewhere.
    """
    if not table_exists(spark, storage, table):
        has_run = bool(HadoopFiles(spark, storage).batches(OFFSETS))
        raise missing_table(storage, table_name(storage, table), has_run=has_run)


def owner_of(spark: SparkSession, storage: StorageSettings, table: Table) -> Owner:
    """Return the owner of an existing table."""
    return Owner.of(properties_of(spark, storage, table))


def owner_at_append(spark: SparkSession, storage: StorageSettings, table: Table) -> Owner:
    """Return the owner of a table as this session's last append to it found it, or as it was later."""
    log = _delta_log(spark, storage, table)
    if log is None:
        return owner_of(spark, storage, table)
    stored = log.unsafeVolatileSnapshot().metadata().configuration()
    names = (_OWNER_PROPERTY, _EPOCH_PROPERTY, _FORMER_PROPERTY)
    return Owner.of({name: str(stored.apply(name)) for name in names if stored.contains(name)})


def last_appended(spark: SparkSession, storage: StorageSettings, table: Table, app_id: str) -> int | None:
    """Return the last batch that Delta knows of an application id, -1 if it knows none; None if it does not tell."""
    log = _delta_log(spark, storage, table)
    if log is None:
        return None
    found = log.unsafeVolatileSnapshot().transactions().get(app_id)
    return int(found.get()) if found.isDefined() else -1


def properties_of(spark: SparkSession, storage: StorageSettings, table: Table) -> dict[str, str]:
    """Return the properties of an existing table."""
    # DESCRIBE DETAIL has them too, but counts the table's files, which takes half of the time of a start.
    return {str(name): str(value) for name, value in spark.sql(f"SHOW TBLPROPERTIES {table_name(storage, table)}").collect()}


def table_id_of(spark: SparkSession, storage: StorageSettings, table: Table) -> str:
    """Return the id of an existing table, which no other table has."""
    [[table_id]] = spark.sql(f"DESCRIBE DETAIL {table_name(storage, table)}").select("id").collect()
    return str(table_id)


def property_ms(spark: SparkSession, storage: StorageSettings, table: Table, name: str, default: str) -> int:
    """Return a property of an existing table that holds an interval, such as `interval 6 hours`, in milliseconds."""
    interval = properties_of(spark, storage, table).get(name, default).strip()
    # Delta takes `6 hours` too.
    whole = interval if interval.lower().startswith("interval") else f"interval {interval}"
    [[length_ms]] = spark.sql(f"SELECT unix_millis(timestamp_millis(0) + {whole})").collect()
    return int(length_ms)


def claim_tables(spark: SparkSession, storage: StorageSettings, query_id: str, epoch: int = 0) -> None:
    """Make a query the owner of all tables: create the missing ones, and take the others over.

    A start that was killed here can be repeated. What a former owner has appended by the time that this returns, it has
    appended; it can append nothing more.

    Another start may have made or taken a table since `read_ownership` looked, for example while this one was frozen.
    Its epoch is then as high as this one's, and this one is refused.

    Args:
        spark: the session.
        storage: where the tables are.
        query_id: the owner.
        epoch: how often the tables were adopted.

    Raises:
        OwnershipError: another start has taken a table meanwhile, or somebody has changed a table's columns.
        SetupError: a table cannot be created.
        CheckpointInUseError: another process has held a table's lock for a minute.
    """
    existing = {table for table in TABLE_SCHEMAS if table_exists(spark, storage, table)}
    for table in existing:  # If one is refused, the former owner goes on with all of them.
        _new_fields(spark, storage, table, properties_of(spark, storage, table))
    for table, schema in TABLE_SCHEMAS.items():
        if table not in existing:
            create_table(spark, storage, table, schema, {**Owner(query_id, epoch).properties(), **_statistics(table)})
        _take_over(spark, storage, table, query_id, epoch)


def create_table(
    spark: SparkSession, storage: StorageSettings, table: str, schema: StructType, properties: Mapping[str, str] | None = None
) -> None:
    """Create an append-only table, unless it exists, or another process creates it at the same time.

    Raises:
        SetupError: Spark or the file system refuses.
    """
    # DeltaTable's builder takes no names of three parts.
    columns = ", ".join(f"`{field.name}` {field.dataType.simpleString()}" for field in schema)
    name, own = table_name(storage, table), _sql_map({**_PROPERTIES, **(properties or {})})
    try:
        spark.sql(f"CREATE TABLE IF NOT EXISTS {name} ({columns}) USING delta TBLPROPERTIES ({own})")
    except (PySparkException, Py4JJavaError) as error:
        # Delta fails if another process has created the table meanwhile, with other properties.
        if not table_exists(spark, storage, table):
            raise SetupError(f"the table {name} cannot be created: {first_line_of(error)}") from error


def upgrade_tables(spark: SparkSession, storage: StorageSettings) -> None:
    """Add the columns of this version to tables of an earlier one, whose rows have NULL there.

    A table on a local disk that a killed erasure has left open to changes is append-only again.

    Raises:
        OwnershipError: somebody has changed a table's columns.
        CheckpointInUseError: another process has held a table's lock for a minute.
    """
    for table in Table:
        _upgrade_table(spark, storage, table)


def _upgrade_table(spark: SparkSession, storage: StorageSettings, table: Table) -> None:
    found = properties_of(spark, storage, table)
    new = _new_fields(spark, storage, table, found)
    # Elsewhere than on a local disk, nothing would keep this from an erasure that is under way.
    if found.get(_APPEND_ONLY) == "false" and local_warehouse(spark, storage) is not None:
        restore_append_only(spark, storage, table)
    name, is_counted = table_name(storage, table), set(SEARCHED_COLUMNS[table]) <= set(found.get(_STATISTICS_PROPERTY, "").split(","))
    if not new and is_counted:  # A start beside a compaction does not wait for it.
        return
    with commit_lock(local_warehouse(spark, storage), table, limit_s=_COMMIT_LOCK_LIMIT_S):
        if new:
            columns = ", ".join(f"`{field.name}` {field.dataType.simpleString()}" for field in new)
            spark.sql(f"ALTER TABLE {name} ADD COLUMNS ({columns})")
        if not is_counted:
            spark.sql(f"ALTER TABLE {name} SET TBLPROPERTIES ({_sql_map(_statistics(table))})")


def _new_fields(spark: SparkSession, storage: StorageSettings, table: Table, properties: Mapping[str, str]) -> list[StructField]:
    """Return the columns that a table of an earlier version, with these properties, lacks.

    Raises:
        OwnershipError: somebody has changed its columns or properties, so that its messages could be written twice.
    """
    name, known = table_name(storage, table), read_table(spark, storage, table).columns
    new = [field for field in TABLE_SCHEMAS[table] if field.name not in known]
    if gone := sorted({field.name for field in new} - _LATER_COLUMNS):
        raise OwnershipError(f"the table {name} has no column {', '.join(gone)}, which was renamed or dropped: put it back")
    if _MEMORY_PROPERTY in properties:
        raise OwnershipError(
            f"the table {name} has the property {_MEMORY_PROPERTY}, by which Delta forgets the batches that it has: "
            f"`ALTER TABLE {name} UNSET TBLPROPERTIES ('{_MEMORY_PROPERTY}')`, and look for one in Spark's defaults"
        )
    return new


def restore_append_only(spark: SparkSession, storage: StorageSettings, table: Table) -> None:
    """Make a table append-only again, if an erasure was killed before it did so. Waits for one that is under way."""
    if properties_of(spark, storage, table).get(_APPEND_ONLY) != "false":
        return
    with commit_lock(local_warehouse(spark, storage), table):
        if properties_of(spark, storage, table).get(_APPEND_ONLY) == "false":
            set_append_only(spark, storage, table, "true")


def set_append_only(spark: SparkSession, storage: StorageSettings, table: Table, value: str) -> None:
    """Set whether a table takes appends alone. The caller holds the table's lock."""
    spark.sql(f"ALTER TABLE {table_name(storage, table)} SET TBLPROPERTIES ('{_APPEND_ONLY}' = '{value}')")


def _take_over(spark: SparkSession, storage: StorageSettings, table: Table, query_id: str, epoch: int) -> None:
    """Make a query the owner of an existing table, and fence all others that Delta knows: a copy names no owner.

    The new owner is named first. So a former owner whose append is skipped finds out why.
    """
    owner = owner_of(spark, storage, table)
    verify_unclaimed(owner, query_id, epoch, table_name(storage, table))
    _upgrade_table(spark, storage, table)
    if owner.query_id != query_id:
        _name_owner(spark, storage, table, Owner(query_id, epoch, owner.query_id))
    # A start that was killed may have named itself and fenced nobody.
    others = {owner.former_id, owner.query_id, *_unfenced(spark, storage, table)} - {query_id}
    for other in sorted(each for each in others if each is not None):
        _fence(spark, storage, table, other)


def _name_owner(spark: SparkSession, storage: StorageSettings, table: Table, owner: Owner) -> None:
    name = table_name(storage, table)
    with commit_lock(local_warehouse(spark, storage), table, limit_s=_COMMIT_LOCK_LIMIT_S):
        # Another start may have taken it meanwhile. In an object store, nothing keeps it from doing so now.
        verify_unclaimed(owner_of(spark, storage, table), str(owner.query_id), owner.epoch, name)
        properties = owner.properties()
        if owner.former_id is None:  # A copy has none of them.
            properties = {**_PROPERTIES, **properties_of(spark, storage, table), **properties}
        spark.sql(f"ALTER TABLE {name} SET TBLPROPERTIES ({_sql_map(properties)})")


def verify_unclaimed(owner: Owner, query_id: str, epoch: int, name: str) -> None:
    """Refuse to take over a table that another start has taken, or made, in the meantime.

    Raises:
        OwnershipError: the message names the other start's query.
    """
    if owner.query_id not in (None, query_id) and owner.epoch >= epoch:
        raise OwnershipError(
            f"while this job started, another one (query {owner.query_id}, epoch {owner.epoch}) has taken the table {name}: nothing was "
            "taken from it; start again if this one is to own the tables"
        )


def fence_note(query_id: str) -> str:
    """Return the `userMetadata` of the commit that fences a query. It stays in a history that RESTORE has put back."""
    return json.dumps({"fenced": query_id})


def fenced_in(note: str | None) -> str | None:
    """Return the query that a commit fences, by its `userMetadata`; None if it fences none."""
    try:
        found = json.loads(note or "null")
    except ValueError:  # another program's
        return None
    return found.get("fenced") if isinstance(found, dict) else None


def _unfenced(spark: SparkSession, storage: StorageSettings, table: Table) -> list[str]:
    """Return the queries that have appended to a table and are not fenced; none if Delta does not tell."""
    log = _delta_log(spark, storage, table)
    if log is None:
        return []
    found, known = log.unsafeVolatileSnapshot().transactions().iterator(), []
    while found.hasNext():
        entry = found.next()
        query_id = str(entry._1()).rpartition(":")[0]
        if str(entry._1()) in append_ids(query_id, table) and int(entry._2()) < FENCED:
            known.append(query_id)
    return known


def _fence(spark: SparkSession, storage: StorageSettings, table: Table, query_id: str) -> None:
    """Let no append of a query come after this, also none that is under way."""
    nothing = spark.createDataFrame([], TABLE_SCHEMAS[table])
    for app_id in append_ids(query_id, table):
        for left in reversed(range(_FENCE_TRIES)):
            try:
                append_once(nothing, storage, table, app_id, FENCED, origin=fence_note(query_id))
                break
            except ConcurrentTransactionException:  # an append of that query came first
                if not left:
                    raise


def append_once(rows: DataFrame, storage: StorageSettings, table: Table, app_id: str, batch_id: int, *, origin: str = "") -> None:
    """Append rows. Delta skips a second append with the same application id and batch id (`txnAppId`, `txnVersion`).

    Args:
        rows: the rows.
        storage: where the tables are.
        table: the table.
        app_id: what `append_id` returns.
        batch_id: the batch.
        origin: what the batch was made of, or whom the commit fences, for its `userMetadata`.

    Raises:
        OwnershipError: the table is gone. Spark would make another one, without an owner, for these rows.
    """
    spark = rows.sparkSession
    options = {"txnAppId": app_id, "txnVersion": str(batch_id), **({"userMetadata": origin} if origin else {})}
    writer = rows.write.format("delta").mode("append").options(**options)
    with commit_lock(local_warehouse(spark, storage), table):
        if not table_exists(spark, storage, table):
            raise missing_table(storage, table_name(storage, table), has_run=True)
        save(writer, storage, table)


def save(writer: DataFrameWriter, storage: StorageSettings, table: str) -> None:
    """Run a writer's append to a table. The caller holds the table's lock."""
    if storage.catalog_schema:
        writer.saveAsTable(table_name(storage, table))
    else:
        writer.save(table_path(storage, table))


def read_log_ahead(spark: SparkSession, storage: StorageSettings, table: Table) -> None:
    """Let Delta compute the table's snapshot now, so that the next append finds it cached.

    An append reads the whole log to find out whether its batch is in the table: three stages of Spark, 0.25 to 0.5 s in
    which it does nothing else. Delta caches the snapshot until the next commit.
    """
    log = _delta_log(spark, storage, table)
    if log is None:
        # The public statement that computes a snapshot also counts files, which costs another job.
        spark.sql(f"DESCRIBE DETAIL {table_name(storage, table)}").collect()
    else:
        log.unsafeVolatileSnapshot().transactions()


def _delta_log(spark: SparkSession, storage: StorageSettings, table: Table) -> Any:
    """Return Delta's own object for a table in a folder; None in a catalog, and on Databricks with its own class."""
    jvm: Any = spark._jvm
    delta_log = jvm.org.apache.spark.sql.delta.DeltaLog
    if storage.catalog_schema or not isinstance(delta_log, JavaClass):
        return None
    return delta_log.forTable(spark._jsparkSession, table_path(storage, table))


def _statistics(table: Table) -> dict[str, str]:
    return {_STATISTICS_PROPERTY: ",".join(SEARCHED_COLUMNS[table])}


def local_warehouse(spark: SparkSession, storage: StorageSettings) -> Path | None:
    """Return the folder on a local disk that holds the tables; None if they are elsewhere."""
    return None if storage.catalog_schema else on_local_disk(spark, storage.warehouse)


def _sql_map(properties: Mapping[str, str]) -> str:
    return ", ".join(f"{_sql_text(key)} = {_sql_text(value)}" for key, value in properties.items())


def _sql_text(text: str) -> str:
    """Return a literal of any text: who may write the checkpoint's files chooses the id of a query."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
