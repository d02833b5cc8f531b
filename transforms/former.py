"""What former checkpoints did to records that a new one reads again, after its tables were adopted (decision 6)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from halfway.schemas.events import EVENT_SCHEMA, FORMER_SCHEMA, EventKind
from halfway.schemas.headers import Source
from halfway.schemas.outcomes import Count
from halfway.transforms.horizon import SourcePartition
from halfway.transforms.record_columns import Integers, is_before


@dataclass(frozen=True, slots=True)
class _Records:
    """The columns of FORMER_SCHEMA for one partition, by offset."""

    offsets: Integers
    at_ms: Integers
    discarded_ms: Integers


@dataclass(frozen=True, slots=True)
class FormerRecords:
    """The records that former checkpoints have discarded or quarantined, and before when every half is deleted."""

    records: dict[SourcePartition, _Records] = field(default_factory=dict)
    halves_since_ms: int = 0
    """Verdicts before this time are of halves that Kafka has deleted, and that a former checkpoint has settled."""
    ends: Mapping[Source, Mapping[int, int]] = field(default_factory=dict)
    """Where the partitions ended when the tables were taken over. A later verdict of such a time is that of a wrong
    clock, and a later notice of a lost half is this checkpoint's own."""

    @classmethod
    def of(cls, table: pa.Table, halves_since_ms: int, ends: Mapping[Source, Mapping[int, int]]) -> "FormerRecords":
        """Sort the records by partition and offset.

        Args:
            table: FORMER_SCHEMA, in any order.
            halves_since_ms: see the field.
            ends: see the field.
        """
        columns = [column.to_numpy() for column in table.sort_by([(name, "ascending") for name in FORMER_SCHEMA.names]).columns]
        sources, partitions, *rest = columns
        edges = np.flatnonzero(np.diff(sources) | np.diff(partitions)) + 1
        parts = zip(*(np.split(column, edges) for column in rest), strict=True)
        begins = [0, *edges.tolist()] if len(sources) else []
        places = [(Source(int(sources[begin])), int(partitions[begin])) for begin in begins]
        return cls({place: _Records(*part) for place, part in zip(places, parts, strict=False)}, halves_since_ms, ends)

    def mark(self, events: pa.RecordBatch) -> pa.RecordBatch:
        """Return events (EVENT_SCHEMA) of which the ones that former checkpoints have dealt with are marked.

        A half that was discarded gets its `discarded_ms`. A record that was quarantined, and a verdict whose half is
        long gone, are only counted: they had no effect the first time. So is a notice of a lost half: if the half can
        be read again, it is not lost.
        """
        kinds, discarded_ms = np.array(events["event"]), np.array(events["discarded_ms"])
        sources, partitions, offsets, at_ms = (np.array(events[name]) for name in ("source", "partition", "offset", "at_ms"))
        is_former_op = (kinds == EventKind.OP) & is_before(self.ends.get(Source.OP), partitions, offsets)
        aged_out = is_former_op & (at_ms < self.halves_since_ms)
        refused = (kinds == EventKind.LOST) & is_before(self.ends.get(Source.HALF), partitions, offsets)
        for (source, partition), known in self.records.items():
            rows = np.flatnonzero((sources == source) & (partitions == partition))
            # The last of its offset: a topic that was deleted and created again has used it before.
            found = np.maximum(np.searchsorted(known.offsets, offsets[rows], "right") - 1, 0)
            is_same = (known.offsets[found] == offsets[rows]) & (known.at_ms[found] == at_ms[rows])
            rows, when_ms = rows[is_same], known.discarded_ms[found[is_same]]
            is_half = kinds[rows] == EventKind.HALF
            # A discarded half that breaks the present limits is not quarantined too.
            refused[rows[(when_ms == 0) | ~is_half]] = True
            discarded_ms[rows[is_half]] = when_ms[is_half]
        if not (aged_out | refused | (discarded_ms > 0)).any():
            return events
        why = np.select([refused, aged_out], [str(Count.ADOPTED), str(Count.AGED_OUT)], "")
        kinds[refused | aged_out] = EventKind.COUNTED
        reasons = pc.if_else(pa.array(refused | aged_out), pa.array(why.tolist(), pa.string()), events["reason"])
        changed = {"event": pa.array(kinds), "discarded_ms": pa.array(discarded_ms), "reason": reasons}
        return pa.RecordBatch.from_arrays([changed.get(name, events[name]) for name in EVENT_SCHEMA.names], schema=EVENT_SCHEMA)
