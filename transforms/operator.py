"""The protocol as Spark's stateful operator: each group is one bucket, and its state is one row (decision 2)."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import starmap
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from halfway.schemas.events import PACKED_OUTCOMES_SCHEMA, EventKind
from halfway.schemas.headers import ACTIONS
from halfway.schemas.outcomes import Kind
from halfway.schemas.state_format import STATE_SCHEMA
from halfway.transforms.bucket import Bucket
from halfway.transforms.by_batch import ByBatch
from halfway.transforms.horizon import SourcePartition, Tick, read_on
from halfway.transforms.packing import OutcomePack, Takeover, pack_outcomes, unpack, unpack_times
from halfway.transforms.protocol import Batch, Half, Lost, Op, Outcome, Rules
from halfway.transforms.record_columns import Mask

BucketFunction = Callable[[Any, Iterable[pd.DataFrame], GroupState], Iterator[pd.DataFrame]]


def resolve_events(packs: DataFrame, function: BucketFunction) -> DataFrame:
    """Join halves and ops per transaction. This is the only stateful step of the job.

    Args:
        packs: a streaming frame of PACKED_EVENTS_SCHEMA.
        function: the function that `bucket_function` returns.

    Returns:
        PACKED_OUTCOMES_SCHEMA.
    """
    schema = from_arrow_schema(PACKED_OUTCOMES_SCHEMA)
    return packs.groupBy("bucket").applyInPandasWithState(function, schema, STATE_SCHEMA, "append", GroupStateTimeout.NoTimeout)


def bucket_function(rules: ByBatch[Rules], slots: int, max_undivided: int, takeover: Takeover) -> BucketFunction:
    """Return the function that Spark calls for each bucket that has input in a batch.

    Args:
        rules: the numbers of R4 to R11.
        slots: the number of tasks that read records back.
        max_undivided: up to this many outcomes of a bucket are not divided among the tasks.
        takeover: what adopted tables may hold messages of.
    """

    def resolve_bucket(key: Any, frames: Iterable[pd.DataFrame], group_state: GroupState) -> Iterator[pd.DataFrame]:
        bucket = Bucket.decode(*group_state.get) if group_state.exists else Bucket()
        bucket, outcomes, counts = bucket.after(to_batch(frames), rules.here())
        group_state.update(bucket.encode())
        report = bucket.report(int(key[0]), counts).to_json().encode()
        packs = pack_outcomes(outcomes, slots, max_undivided, takeover)
        rows = [*packs, OutcomePack(int(Kind.REPORT), 0, False, 1, report)]
        yield pd.DataFrame(rows, columns=PACKED_OUTCOMES_SCHEMA.names)

    return resolve_bucket


def to_batch(frames: Iterable[pd.DataFrame]) -> Batch:
    """Turn a bucket's rows (PACKED_EVENTS_SCHEMA) into the protocol's records."""
    halves: list[Half] = []
    ops: list[Op] = []
    lost: list[Lost] = []
    broken: list[Outcome] = []
    counted: Counter[str] = Counter()
    ticks: list[Tick] = []
    read_ms: dict[SourcePartition, int] = {}
    for frame in frames:
        for pack, times in zip(frame["events"], frame["times"], strict=True):
            heard, read = unpack_times(times)
            ticks.extend(heard)
            read_ms = read_on(read_ms, read)
            if pack:
                events = unpack(pack)
                _sort_out(events, halves, ops, lost, broken)
                [counts] = _columns(events, events["event"].to_numpy() == EventKind.COUNTED, ("reason",))
                counted.update(counts)
    return Batch(halves, ops, lost, ticks, broken, read_ms, counted)


_OP_FIELDS = tuple(name for name in Op._fields if name != "due_ms")
"""Those that an event has. When it is due is known once it waits."""


def _sort_out(events: pa.Table, halves: list[Half], ops: list[Op], lost: list[Lost], broken: list[Outcome]) -> None:
    """Append the records of EVENT_SCHEMA to the lists of their kinds."""
    kinds = events["event"].to_numpy()
    halves.extend(map(Half._make, zip(*_columns(events, kinds == EventKind.HALF, Half._fields), strict=True)))
    ids, groups, incarnations, actions, *places = _columns(events, kinds == EventKind.OP, _OP_FIELDS)
    ops.extend(starmap(Op, zip(ids, groups, incarnations, map(ACTIONS.__getitem__, actions), *places, strict=True)))
    lost_rows = zip(*_columns(events, kinds == EventKind.LOST, ("transaction_id", "half_pointer", "at_ms")), strict=True)
    for transaction_id, pointer, at_ms in lost_rows:
        half_partition, half_offset = pointer.split(":")
        lost.append(Lost(transaction_id, int(half_partition), int(half_offset), at_ms))
    names = ("transaction_id", "source", "partition", "offset", "at_ms", "reason", "detail")
    refused = zip(*_columns(events, kinds == EventKind.BROKEN, names), strict=True)
    broken.extend(Outcome(Kind.QUARANTINE, **dict(zip(names, row, strict=True))) for row in refused)


def _columns(events: pa.Table, chosen: Mask, names: Sequence[str]) -> list[list[Any]]:
    """Return the named columns of the chosen rows: a pack holds several kinds, which need few columns."""
    if not chosen.any():
        return [[] for _ in names]
    # numpy turns a column into Python's values several times faster than `to_pylist`.
    return [column.to_numpy().tolist() for column in events.select(names).filter(pa.array(chosen)).columns]
