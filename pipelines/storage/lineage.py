"""Finds out whether checkpoint and tables are of one time, or one of them is from a backup (decision 6).

An older copy would number its batches from its own position, and Delta would skip those whose numbers the tables have,
although they hold other rows. The tables know their last batch, and what it was made of, from the commit that appended
it: the job writes how far the batch had read into the commit's `userMetadata`. Where no commit says so, as in a copy of
the table, or where it was cloned, its rows have the batch's number: to look at them takes some seconds.

Tables that are older than their checkpoint lack messages that nobody would write again. The checkpoint knows the last
batch that was appended to each table from `STATUS_FILE`, and Delta's log the last one that the table has taken. A
RESTORE leaves that as it was, so it is looked for among the commits.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from hashlib import sha256
from typing import Any, NamedTuple, NoReturn

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from halfway.pipelines.storage.delta_tables import FENCED, append_ids, fenced_in, last_appended, read_table, table_name
from halfway.pipelines.storage.manifest import STATUS_FILE, Manifest
from halfway.pipelines.storage.missing_tables import OFFSETS
from halfway.pipelines.storage.state_reader import COMMITS, CheckpointFiles, HadoopFiles, ends_in
from halfway.schemas.batch_status import BatchStatus
from halfway.schemas.errors import READ_WHAT_IS_THERE, OwnershipError, RecordsLostError
from halfway.schemas.settings import StorageSettings
from halfway.schemas.tables import Table

COMMITS_LOOKED_AT = 100
"""The newest commits of a table to look through: compactions follow the last append."""

_WITH_ROWS = {
    *("WRITE", "MERGE", "STREAMING UPDATE", "COPY INTO", "CLONE", "CONVERT", "CREATE TABLE AS SELECT"),
    *(f"{how} TABLE{rows}" for how in ("REPLACE", "CREATE OR REPLACE") for rows in ("", " AS SELECT")),
}
"""Delta's names of what puts rows of another program, such as those of a backup, into a table or in its place."""


class TableCommit(NamedTuple):
    """A commit of a table, as its history tells it."""

    version: int
    operation: str
    note: str | None
    """Its `userMetadata`."""
    restored: int | None = None
    """The version to which it has put the table back, if its operation is RESTORE and it says so."""
    inserts: bool = True
    """False for a MERGE that inserts nothing."""


class TableHistory(NamedTuple):
    """What a table's log says of the batches of a query."""

    commits: Sequence[TableCommit]
    """The newest `COMMITS_LOOKED_AT`, the newest first."""
    appended: int | None
    """The last batch that it has taken (Delta's `txn`), -1 if it has taken none; None if the log is out of reach."""


@dataclass(frozen=True, slots=True)
class BatchOrigin:
    """What a batch was made of, as its commits in the tables say."""

    query_id: str
    batch_id: int
    read: int
    """The sum of the end offsets of all partitions. It never falls from batch to batch."""
    digest: str
    """Of the end offsets."""
    read_digest: int = field(default=0, compare=False)
    """Of the records at these offsets, as `BucketReport` has it; 0 if it is not known."""

    @classmethod
    def of(cls, query_id: str, batch_id: int, offsets: str) -> "BatchOrigin":
        """Return the origin of a batch from its file in Spark's offset log."""
        ends = ends_in(offsets)
        digest = sha256(json.dumps(ends, sort_keys=True).encode()).hexdigest()[:16]
        return cls(query_id, batch_id, sum(end for places in ends.values() for end in places.values()), digest)

    def to_json(self) -> str:
        """Return the origin as the `userMetadata` of a commit."""
        return json.dumps(asdict(self))


def origin_in(commits: Iterable[str | None], query_id: str | None = None) -> BatchOrigin | None:
    """Return the first origin of a batch, of a query or of any, in the `userMetadata` of commits; None without one."""
    for text in commits:
        try:
            origin = BatchOrigin(**json.loads(text or "null"))
        except (TypeError, ValueError):  # another program's
            continue
        if query_id in (None, origin.query_id):
            return origin
    return None


def origin_of(files: CheckpointFiles, query_id: str, batch_id: int, read_digest: int) -> BatchOrigin:
    """Return the origin of a batch that the checkpoint has planned."""
    planned = BatchOrigin.of(query_id, batch_id, files.text(f"{OFFSETS}/{batch_id}") or "")
    return replace(planned, read_digest=read_digest)


def verify_lineage(spark: SparkSession, storage: StorageSettings, manifest: Manifest, last_batch_id: int | None) -> Sequence[BatchOrigin]:
    """Refuse checkpoint and tables of which one is older, or that were not written together. No job runs on them.

    Args:
        spark: the session.
        storage: where checkpoint and tables are.
        manifest: the checkpoint's.
        last_batch_id: the last batch that the checkpoint has planned; None before the first one.

    Returns:
        What the last batch in each table was made of, where its commits tell.

    Raises:
        OwnershipError: the message says what to do.
    """
    query_id, files = manifest.query_id, HadoopFiles(spark, storage)
    appended = appended_in(files)
    histories = {table: history_of(spark, storage, query_id, table) for table in Table}
    origins = _origins(histories, query_id)
    end, last = ("has run no batch", -1) if last_batch_id is None else (f"ends with batch {last_batch_id}", last_batch_id)
    held = {table: origin for table, origin in origins.items() if origin is not None}
    untold = [table for table in Table if _last_batch(histories[table].commits, query_id) is None]
    # Not where a hundred compactions have followed: a batch whose halves were all lost is an append without rows.
    copies = [table for table in untold if any(map(_is_of_another, histories[table].commits))]
    since = {table: appended.get(table, last) if table in copies else last + 1 for table in untold}
    in_rows = _batches_since(spark, storage, manifest.epoch, since)
    for table, batch_id in [*((table, origin.batch_id) for table, origin in held.items()), *in_rows.items()]:
        if batch_id > last:
            _refuse(storage, f"{end}, and the table {table_name(storage, table)} holds batch {batch_id} of it")
    _verify_histories(files, storage, query_id, appended, histories)
    is_committed = last in files.batches(COMMITS)
    for table in copies:
        if table in appended and table not in in_rows:
            _refuse_older(storage, table, appended[table])
        known, noted = histories[table].appended, origins[table]
        if known is None and noted is not None:  # by a commit of this very table
            known = noted.batch_id
        if not is_committed and in_rows.get(table) == last and (known is None or known < last):
            _refuse_table(storage, table, f"holds batch {last}, which Delta does not know and", "is a copy, and the batch would come twice")
    return list(held.values())


def verify_histories(files: CheckpointFiles, storage: StorageSettings, query_id: str, read: Callable[[Table], TableHistory]) -> None:
    """Refuse a checkpoint that has not read what the last commits of its query were made of, or has appended more.

    A job may run on it.

    Args:
        files: the checkpoint's.
        storage: where checkpoint and tables are.
        query_id: the checkpoint's.
        read: returns the history of a table.

    Raises:
        OwnershipError: the message says what to do.
    """
    # The tables after what says which batches they have, and before which batches were planned: a job may run.
    appended = appended_in(files)
    histories = {table: read(table) for table in Table}
    _verify_histories(files, storage, query_id, appended, histories)


def _verify_histories(
    files: CheckpointFiles,
    storage: StorageSettings,
    query_id: str,
    appended: Mapping[Table, int],
    histories: Mapping[Table, TableHistory],
) -> None:
    _verify_read(files, storage, _origins(histories, query_id))
    _verify_not_fenced(storage, query_id, histories)
    _verify_not_older(storage, query_id, appended, histories)


def _origins(histories: Mapping[Table, TableHistory], query_id: str) -> dict[Table, BatchOrigin | None]:
    return {table: origin_in((each.note for each in history.commits), query_id) for table, history in histories.items()}


def _verify_read(files: CheckpointFiles, storage: StorageSettings, origins: Mapping[Table, BatchOrigin | None]) -> None:
    for table, origin in origins.items():
        if origin is not None and not _has_read(files, origin):
            _refuse(storage, f"has not read what batch {origin.batch_id} of the table {table_name(storage, table)} was made of")


def appended_in(files: CheckpointFiles) -> dict[Table, int]:
    """Return the last batch that the job has appended to each table, as far as the checkpoint says so.

    A batch that was not committed is left out: it runs again, and the power cut that has kept its commit from the disk
    may have taken its append too.
    """
    last = max(files.batches(COMMITS), default=-1)
    status = BatchStatus.parse(files.text(STATUS_FILE))
    if status is None:
        return {}
    both = [*status.appended_before.items(), *status.appended.items()]
    return {table: batch_id for table, batch_id in both if batch_id <= last}


def _verify_not_fenced(storage: StorageSettings, query_id: str, histories: Mapping[Table, TableHistory]) -> None:
    """Refuse tables that were taken over and put back. Delta skips each append of the former owner, silently."""
    for table, history in histories.items():
        if history.appended == FENCED or any(fenced_in(each.note) == query_id for each in history.commits):
            _refuse_fenced(storage, table, "takes no more batches")


def _verify_not_older(
    storage: StorageSettings, query_id: str, appended: Mapping[Table, int], histories: Mapping[Table, TableHistory]
) -> None:
    for table, history in histories.items():
        held = _last_batch(history.commits, query_id) if history.appended is None else history.appended
        lacks = _taken_back(history.commits, query_id)
        if held is not None and held < appended.get(table, -1):
            lacks = appended[table]
        if lacks is not None:
            _refuse_older(storage, table, lacks)


def _last_batch(commits: Sequence[TableCommit], query_id: str) -> int | None:
    """Return the last batch that a query has appended, -1 if it has appended none; None if the commits do not tell.

    They do not if another program has written rows since, which may be those of a backup.
    """
    for each in commits:
        origin = origin_in([each.note])
        if origin is not None and origin.query_id == query_id:
            return origin.batch_id
        if _is_of_another(each):
            return None
    return -1 if commits and commits[-1].version == 0 else None


def _is_of_another(commit: TableCommit) -> bool:
    """Return True if another program has written rows, which may be those of a backup."""
    is_own = origin_in([commit.note]) is not None or fenced_in(commit.note) is not None
    return commit.operation in _WITH_ROWS and commit.inserts and not is_own


def _taken_back(commits: Sequence[TableCommit], query_id: str) -> int | None:
    """Return the last batch of a query that a RESTORE has taken back; None if there is none."""
    end = commits[0].version if commits else 0
    for each in commits:
        if each.version > end:  # A later RESTORE has taken it back.
            origin = origin_in([each.note], query_id)
            if origin is not None:
                return origin.batch_id
        elif each.operation == "RESTORE":
            end = -1 if each.restored is None else each.restored
    return None


def history_of(spark: SparkSession, storage: StorageSettings, query_id: str, table: Table) -> TableHistory:
    """Return what a table's log says of a query."""
    history = spark.sql(f"DESCRIBE HISTORY {table_name(storage, table)} LIMIT {COMMITS_LOOKED_AT}")
    rows = history.select("version", "operation", "userMetadata", "operationParameters").collect()
    commits = sorted((commit_of(*row) for row in rows), key=lambda each: each.version, reverse=True)
    found = [last_appended(spark, storage, table, app_id) for app_id in append_ids(query_id, table)]
    return TableHistory(commits, max((batch_id for batch_id in found if batch_id is not None), default=None))


def commit_of(version: int, operation: str, note: str | None, parameters: Mapping[str, Any] | None) -> TableCommit:
    """Return a commit from what Delta notes of it. A RESTORE by a time does not tell its version."""
    said = parameters or {}
    restored = said.get("version") if operation == "RESTORE" else None
    inserts = operation != "MERGE" or said.get("notMatchedPredicates") != "[]"
    return TableCommit(version, operation, note, None if restored is None else int(restored), inserts)


def _batches_since(spark: SparkSession, storage: StorageSettings, epoch: int, since: Mapping[Table, int]) -> dict[Table, int]:
    """Return the last batch of each table that has rows of a batch or later. Statistics answer for nearly all files."""
    if not since:
        return {}

    def last(table: Table) -> DataFrame:
        later = (F.col("epoch") == epoch) & (F.col("batch_id") >= since[table])
        return read_table(spark, storage, table).where(later).agg(F.lit(str(table)), F.max("batch_id"))

    found = reduce(DataFrame.union, map(last, since)).collect()
    return {Table(table): number for table, number in found if number is not None}


def _has_read(files: CheckpointFiles, origin: BatchOrigin) -> bool:
    """Return True if the checkpoint has this very batch or, where Spark has removed it, has read at least as far."""
    for batch_id in files.batches(OFFSETS):
        offsets = files.text(f"{OFFSETS}/{batch_id}") if batch_id >= origin.batch_id else None
        if offsets is not None:  # a running job has not removed it since
            own = BatchOrigin.of(origin.query_id, batch_id, offsets)
            return own == origin if batch_id == origin.batch_id else own.read >= origin.read
    return False


def verify_not_skipped(spark: SparkSession, storage: StorageSettings, table: Table, app_id: str, origin: BatchOrigin) -> None:
    """Refuse to go on if Delta has left out an append, and not because it holds this very batch.

    Where Delta does not tell, in a catalog, a commit of the batch is looked for if the table was put back.

    Args:
        spark: the session.
        storage: where the tables are.
        table: the table.
        app_id: of the append.
        origin: of the batch.

    Raises:
        OwnershipError: it holds a later one, or another checkpoint has once taken the table over and fenced this one.
    """
    held = last_appended(spark, storage, table, app_id)
    if held is None:
        commits = history_of(spark, storage, origin.query_id, table).commits
        own = origin_in((each.note for each in commits), origin.query_id)
        is_there = own is not None and own.batch_id >= origin.batch_id
        is_skipped = not is_there and any(each.operation == "RESTORE" or _is_of_another(each) for each in commits)
    else:
        is_skipped = held != origin.batch_id
    if is_skipped:
        _refuse_fenced(storage, table, f"takes no batch {origin.batch_id}")


def verify_same_records(storage: StorageSettings, held: Iterable[BatchOrigin], batch_id: int, read_digest: int) -> None:
    """Refuse a batch that tables have a part of already, made of other records than were read now.

    Delta would leave out what it has, and what the other tables get would not fit.

    Args:
        storage: where checkpoint and tables are.
        held: what `verify_lineage` has returned.
        batch_id: the batch.
        read_digest: what its reports say.

    Raises:
        RecordsLostError: the message says what to do.
    """
    if any(each.batch_id == batch_id and 0 != each.read_digest != read_digest != 0 for each in held):
        raise RecordsLostError(
            f"batch {batch_id}, which a table holds and the checkpoint {storage.checkpoint} has not committed, was made of other records "
            f"than Kafka has now: {READ_WHAT_IS_THERE}"
        )


def _refuse_fenced(storage: StorageSettings, table: Table, what: str) -> NoReturn:
    raise OwnershipError(
        f"the table {table_name(storage, table)} {what} of the checkpoint {storage.checkpoint}: it was taken over by another one, or "
        "holds later batches. Nothing is lost: set storage.checkpoint to a new folder and start once with `halfway resolve --adopt`"
    )


def _refuse_older(storage: StorageSettings, table: Table, batch_id: int) -> NoReturn:
    _refuse_table(storage, table, f"lacks batch {batch_id}, which", "was restored from a backup, and the messages since would be lost")


def _refuse_table(storage: StorageSettings, table: Table, what: str, why: str) -> NoReturn:
    raise OwnershipError(
        f"the table {table_name(storage, table)} {what} the checkpoint {storage.checkpoint} has appended to it: it {why}. Restore the "
        "newest one, or set storage.checkpoint to a new folder and start once with `halfway resolve --adopt`"
    )


def _refuse(storage: StorageSettings, what: str) -> NoReturn:
    raise OwnershipError(
        f"the checkpoint {storage.checkpoint} {what}: it is an older copy. Restore the newest one, or set storage.checkpoint "
        "to a new folder and start once with `halfway resolve --adopt`"
    )
