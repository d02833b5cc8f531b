"""Looks a pending transaction up in the state, to settle it by hand."""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce

import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from halfway.pipelines.operate.settle import Target, argument_of
from halfway.pipelines.storage.delta_tables import stored_tables
from halfway.pipelines.storage.state_reader import StoredState, no_batch_yet, read_state
from halfway.schemas.errors import NotPendingError
from halfway.schemas.outcomes import Phase
from halfway.schemas.settings import StorageSettings
from halfway.schemas.tables import Table
from halfway.transforms.views.pending import is_signed, phase_of, view_pending

_SHOWN = 5


def find_pending(session: Callable[[], SparkSession], storage: StorageSettings, transaction_id: str) -> Target:
    """Look up a pending transaction in the state.

    Raises:
        NotPendingError: the transaction is not pending. The message says what is known about it.
        OwnershipError: a table of the checkpoint is gone, or elsewhere.
        HalfwayError: there is no checkpoint or table yet, or the state cannot be read.
    """
    stored = read_state(session, storage)
    if stored.batch_id is None:
        without = "with --group and --incarnation the op is sent without a lookup"
        raise NotPendingError(f"nothing tells whether {transaction_id} is pending: {no_batch_yet(storage)}; {without}")
    view = view_pending(stored.rows)
    pending = view.find(transaction_id)
    if pending is not None:
        return Target(transaction_id, pending["producer_group"], pending["incarnation"], is_signed(stored.rows, transaction_id))
    ids = view.transactions["transaction_id"]
    of_block = ids.filter(pc.starts_with(ids, f"{transaction_id}.")).to_pylist()
    if ask := _did_you_mean(sorted(of_block, key=lambda each: (len(each), each))[:_SHOWN], len(of_block)):
        raise NotPendingError(f"the transaction {transaction_id} is not pending{ask}")
    known = _what_is_known(session(), storage, stored, transaction_id)
    raise NotPendingError(f"the transaction {transaction_id} is not pending: {known}")


def did_you_mean(rows: Iterable[DataFrame], transaction_id: str) -> str:
    """Return ", did you mean …?" if an id is a block's, whose messages are `<its id>.0`, `.1`, …; else nothing."""
    messages = reduce(DataFrame.union, (each.select("transaction_id") for each in rows))
    found = messages.where(F.col("transaction_id").startswith(f"{transaction_id}.")).distinct()
    # By length first, so that number 10 comes after 9.
    first = found.orderBy(F.length("transaction_id"), "transaction_id").limit(_SHOWN).collect()
    return _did_you_mean([row[0] for row in first], found.count() if len(first) == _SHOWN else len(first))


def _did_you_mean(first: Sequence[str], total: int) -> str:
    others = f", or one of {total - len(first):,} more that begin so" if total > len(first) else ""
    return f", did you mean {' or '.join(first)}{others}?" if first else ""


def _what_is_known(spark: SparkSession, storage: StorageSettings, stored: StoredState, transaction_id: str) -> str:
    """Return what the tables, or else the state, say about a transaction that is not pending."""
    tables = stored_tables(spark, storage)

    def latest(table: Table, *columns: str | Column) -> list[object] | None:
        rows = tables[table].where(F.col("transaction_id") == transaction_id)
        first = rows.orderBy(F.col("incarnation").desc()).select(*columns).first()
        return list(first) if first is not None else None

    committed = latest(Table.MESSAGES, F.date_format("committed_at", "yyyy-MM-dd HH:mm:ss"))
    if committed is not None:
        return f"it was committed at {committed[0]} UTC, see the table messages"
    discarded = latest(Table.DISCARDED, "reason", "check_times")
    phase = phase_of(stored.rows, transaction_id)
    if discarded is not None and phase in (None, Phase.DISCARDED):
        reason, check_times = discarded
        resend = f"`halfway replay {argument_of(transaction_id)}` resends it"
        replayed = "a replay is pending after the job's next batch"
        return f"it was discarded ({reason}, after {check_times} checks): {resend}, unless that was done; {replayed}"
    if phase is Phase.ROLLED_BACK:
        return "it was rolled back"
    if phase is not None:
        return f"it was settled as {phase.name}"
    return (
        f"up to batch {stored.batch_id} its half was not read, or it was rolled back and is forgotten; with --group and --incarnation "
        "the op is sent without a lookup"
    )
