"""The protocol as Spark's stateful operator: each group is one bucket, and its state is one row (decision 2)."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.types import DataType, IntegerType, LongType

from halfway.schemas.events import OUTCOME_SCHEMA, EventKind
from halfway.schemas.headers import LocalTransactionState, Source
from halfway.schemas.outcomes import Kind, Reason
from halfway.schemas.settings import ResolutionSettings
from halfway.schemas.signing import Keyring
from halfway.schemas.state_format import STATE_SCHEMA
from halfway.transforms.bucket import Bucket
from halfway.transforms.horizon import Tick
from halfway.transforms.protocol import Batch, Half, Lost, Op, Outcome, Rules

_NUMPY_TYPES: dict[type[DataType], str] = {IntegerType: "int32", LongType: "int64"}
_OUTCOME_TYPES = {field.name: _NUMPY_TYPES.get(type(field.dataType), "object") for field in OUTCOME_SCHEMA}
Mask = npt.NDArray[np.bool_]
BucketFunction = Callable[[Any, Iterable[pd.DataFrame], GroupState], Iterator[pd.DataFrame]]

_ACTIONS = {str(action): action for action in LocalTransactionState}
_SOURCES = {int(source): source for source in Source}
_POINTER = ("transaction_id", "partition", "offset", "at_ms")


def rules_of(settings: ResolutionSettings) -> Rules:
    """Return the rules' numbers from the settings."""
    return Rules(
        timeout_ms=settings.transactionTimeOut,
        check_interval_ms=settings.transactionCheckInterval,
        check_max=settings.transactionCheckMax,
        half_retention_ms=settings.half_retention,
        resolved_retention_ms=settings.resolved_retention,
    )


def resolve_events(events: DataFrame, function: BucketFunction) -> DataFrame:
    """Join halves and ops per transaction. This is the only stateful step of the job.

    Args:
        events: a streaming frame of EVENT_SCHEMA.
        function: the function that `bucket_function` returns.

    Returns:
        OUTCOME_SCHEMA: one row for each outcome, and one REPORT for each bucket that had input.
    """
    return events.groupBy("bucket").applyInPandasWithState(function, OUTCOME_SCHEMA, STATE_SCHEMA, "append", GroupStateTimeout.NoTimeout)


def bucket_function(rules: Rules, keyring: Keyring | None = None) -> BucketFunction:
    """Return the function that Spark calls for each bucket that has input in a batch.

    Args:
        rules: the numbers of R4 to R11.
        keyring: the keys that ops must be signed with (R14). Spark sends it to the Python workers inside the function,
            so that no key is in the query plan.
    """

    def resolve_bucket(key: Any, frames: Iterable[pd.DataFrame], group_state: GroupState) -> Iterator[pd.DataFrame]:
        bucket = Bucket.decode(*group_state.get) if group_state.exists else Bucket()
        bucket, outcomes, counts = bucket.after(to_batch(frames, keyring), rules)
        group_state.update(bucket.encode())
        report = bucket.report(int(key[0]), counts).to_json()
        outcomes.append(Outcome(kind=Kind.REPORT, detail=report))
        yield to_frame(outcomes)

    return resolve_bucket


def to_frame(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """Turn outcomes into rows of OUTCOME_SCHEMA.

    The columns are typed, because pandas would look at every value to infer a type.
    """
    columns = zip(_OUTCOME_TYPES.items(), zip(*outcomes, strict=True), strict=True)
    return pd.DataFrame({name: np.array(values, np.dtype(dtype)) for (name, dtype), values in columns})


def to_batch(frames: Iterable[pd.DataFrame], keyring: Keyring | None = None) -> Batch:
    """Turn a bucket's rows (EVENT_SCHEMA) into the protocol's records.

    An op that is not signed as the keyring demands becomes a broken record (R14).
    """
    halves: list[Half] = []
    ops: list[Op] = []
    lost: list[Lost] = []
    ticks: list[Tick] = []
    broken: list[Outcome] = []
    for frame in frames:
        columns = _Columns(frame)
        kinds = columns["event"]
        halves.extend(map(Half._make, columns.rows(kinds == EventKind.HALF, *Half._fields)))
        of_ops = kinds == EventKind.OP
        if keyring is not None:
            of_ops &= ~_unsigned(columns, of_ops, keyring, broken)
        ids, groups, incarnations, actions, *places = columns.lists(of_ops, *Op._fields)
        ops.extend(map(Op._make, zip(ids, groups, incarnations, map(_ACTIONS.__getitem__, actions), *places, strict=True)))
        for transaction_id, pointer, at_ms in columns.rows(kinds == EventKind.LOST, "transaction_id", "half_pointer", "at_ms"):
            half_partition, half_offset = pointer.split(":")
            lost.append(Lost(transaction_id, int(half_partition), int(half_offset), at_ms))
        for source, partition, partitions, at_ms, detail in columns.rows(
            kinds == EventKind.TICK, "source", "partition", "tick_partitions", "at_ms", "detail"
        ):
            absent = json.loads(detail).get("absent_groups") if detail else None
            ticks.append(Tick(_SOURCES[source], partition, partitions, at_ms, tuple(group for group in absent or () if group)))
        for source, *pointer, reason, detail in columns.rows(kinds == EventKind.BROKEN, "source", *_POINTER, "reason", "detail"):
            broken.append(_quarantined(_SOURCES[source], pointer, reason, detail))
    return Batch(halves, ops, lost, ticks, broken)


def _unsigned(columns: "_Columns", ops: Mask, keyring: Keyring, broken: list[Outcome]) -> Mask:
    """Return which of the ops are not signed as the keyring demands, and append them to `broken`."""
    refused = np.zeros(len(ops), bool)
    signed = columns.rows(ops, "transaction_id", "action", "producer_group", "incarnation", "signature")
    for row, fields, pointer in zip(np.flatnonzero(ops), signed, columns.rows(ops, *_POINTER), strict=True):
        problem = keyring.problem(*fields)
        if problem is not None:
            refused[row] = True
            broken.append(_quarantined(Source.OP, pointer, Reason.BAD_SIGNATURE, problem))
    return refused


def _quarantined(source: Source, pointer: Sequence[Any], reason: str, detail: str) -> Outcome:
    """Return the quarantine of a broken record. `pointer` has the fields that `_POINTER` names."""
    return Outcome(kind=Kind.QUARANTINE, source=source, **dict(zip(_POINTER, pointer, strict=True)), reason=reason, detail=detail)


class _Columns:
    """A frame's columns as arrays. Most frames are small, and pandas takes 0.05 ms to select rows of one column."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self._columns = {name: frame[name].to_numpy() for name in frame.columns}

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._columns[name]

    def rows(self, chosen: Mask, *names: str) -> Iterator[tuple[Any, ...]]:
        """Return the chosen rows, of the named columns only. A frame holds several kinds, which need few columns."""
        return zip(*self.lists(chosen, *names), strict=True) if chosen.any() else iter(())

    def lists(self, chosen: Mask, *names: str) -> Iterator[list[Any]]:
        """Return the same as `rows`, column by column."""
        return (self._columns[name][chosen].tolist() for name in names)
