"""The job, with Spark's contract simulated: logs of planned and of committed batches, and versions of the state.

Spark writes what a batch will read before it runs it, and that it is done after `foreachBatch` has returned. After a
crash it runs the last planned batch again, with the same offsets and the state that the batch began with. Start,
rules, decoder, ownership, and the order in which a batch is written are the product's.
"""

from collections.abc import Iterator, Sequence
from math import ceil
from typing import Any, NamedTuple

from halfway.pipelines.kafka.range_reader import reading_options
from halfway.pipelines.resolve.sent_checks import SentChecks
from halfway.pipelines.resolve.sources import former_records_to_read, source_options
from halfway.pipelines.resolve.ticks import TickPace
from halfway.pipelines.storage.batch_settings import settings_of_batches
from halfway.pipelines.storage.first_start import TopicFacts, begin_checkpoint
from halfway.pipelines.storage.lineage import BatchOrigin, verify_lineage
from halfway.pipelines.storage.manifest import STATUS_FILE, Manifest
from halfway.pipelines.storage.ownership import read_ownership, verify_ownership
from halfway.schemas.batch_status import BatchStatus
from halfway.schemas.errors import CheckpointInUseError, RecordsLostError
from halfway.schemas.outcomes import Kind, Phase
from halfway.schemas.reports import BucketReport
from halfway.schemas.settings import Settings
from halfway.schemas.state_format import WAITING_COMMIT, WAITING_ROLLBACK
from halfway.transforms import packing
from halfway.transforms import protocol as core
from halfway.transforms.bucket import Bucket, read_digest
from halfway.transforms.by_batch import ByBatch
from halfway.transforms.decoding import DecoderConfig
from halfway.transforms.operator import bucket_function
from halfway.transforms.packing import Takeover
from halfway.transforms.rules import rules_of
from tests.simulation.decoded import to_arrow, to_batch, to_packs
from tests.simulation.groups import SimulatedLag
from tests.simulation.history import HALF, OP, Place, Record
from tests.simulation.log import Kafka
from tests.simulation.storage import Checkpoint, Offsets, Step, Storage
from tests.simulation.writer import BatchOutcomes, SimulatedWriter

_HANGS_MS = 5_000
"""So short that the ticks of histories reach it."""
Resolved = tuple[list[core.Outcome], dict[int, BucketReport], dict[int, Any]]
"""What came of a batch: the outcomes, the buckets' reports, and their states after it."""


class Job:
    """One run of the job."""

    def __init__(self, name: str, kafka: Kafka, storage: Storage, settings: Settings, step: Step, *, is_full: bool) -> None:
        self.name, self.kafka, self.storage, self.settings, self.step = name, kafka, storage, settings, step
        self.path = settings.storage.checkpoint
        self.is_full = is_full
        self.lag = SimulatedLag(settings, kafka)
        self.sent = SentChecks(settings.resolution.transactionCheckInterval, lambda: kafka.clock.now_ms / 1000)
        self.pace = TickPace(1_000, _HANGS_MS)
        self.is_started = False
        self.reads_committed = source_options(settings.kafka).get("kafka.isolation.level") == "read_committed"
        self.fetches_committed = reading_options("group").get("isolation.level", "read_committed") == "read_committed"

    @property
    def checkpoint(self) -> Checkpoint:
        return self.storage.checkpoint(self.path)

    def start(self, *, adopt: bool, in_use: set[str]) -> None:
        """Start as `ResolveJob.run` does. Raises what the product raises if it refuses."""
        if self.path in in_use:
            raise CheckpointInUseError(f"another job is running on the checkpoint {self.path}")
        spark: Any = self.storage
        settings, checkpoint = self.settings, self.checkpoint
        found = read_ownership(spark, settings.storage)
        verify_ownership(settings, found, {}, adopt=adopt)
        self.manifest: Manifest = found.complete_manifest or self._begin(found)
        held: Sequence[BatchOrigin] = ()
        if found.query_id is not None:
            held = verify_lineage(spark, settings.storage, self.manifest, found.last_batch_id)
        by_batch = settings_of_batches(spark, settings)
        taken_at, query_id = self.manifest.taken_at.get(HALF, {}), self.manifest.query_id
        self.configs = ByBatch(
            [(first, DecoderConfig.of(resolution, settings.kafka, taken_at, query_id)) for first, resolution in by_batch]
        )
        self.rules = ByBatch([(first, rules_of(resolution)) for first, resolution in by_batch])
        self.former = former_records_to_read(spark, settings, self.manifest, self.kafka.retained)
        self.writer = SimulatedWriter(self, self.manifest, held)
        status = BatchStatus.parse(checkpoint.files.get(STATUS_FILE))
        if status is not None:
            self.sent.take_up(status.sent_checks, self.kafka.clock.now_ms - status.written_at_ms)
        checkpoint.files.setdefault("metadata", f'{{"id": "{self.manifest.query_id}"}}')
        self.is_started = True

    def _begin(self, found: Any) -> Manifest:
        spark: Any = self.storage
        before_ms = self.kafka.deleted_before_ms(HALF) if found.tables else 0
        return begin_checkpoint(spark, self.settings, found, TopicFacts({}, before_ms, self.kafka.ends))

    def batch(self) -> bool:
        """Run one batch; return False if there is nothing to read."""
        checkpoint = self.checkpoint
        batch_id = checkpoint.last_planned
        if batch_id < 0 or checkpoint.is_committed(batch_id):
            batch_id += 1
            if not self._plan(checkpoint, batch_id):
                return False
            self.step("offsets")
        records = list(self._records(checkpoint, batch_id))
        outcomes = self._resolve(checkpoint, batch_id, records)
        report = self.writer.write(outcomes, batch_id)  # type: ignore[arg-type]
        if report.horizon_ms is not None:
            self.sent.add(report.horizon_ms, any_due=report.any_due)
        status = BatchStatus(
            batch_id,
            seconds=0,
            written_at_ms=self.kafka.clock.now_ms,
            appended=self.writer.appended,
            appended_before=self.writer.appended_before,
            sent_checks=self.sent.status(),
        )
        checkpoint.files[STATUS_FILE] = status.to_json()
        self.step("before commit")
        checkpoint.files[f"commits/{batch_id}"] = "v1\n{}"
        self.pace.note_batch()
        self.step("commit")
        return True

    def _plan(self, checkpoint: Checkpoint, batch_id: int) -> bool:
        """Write down what the next batch reads, up to the limit; return False if there is nothing."""
        if checkpoint.start is None:
            checkpoint.start = {place: partition.first for place, partition in self._places()}
        begin = checkpoint.ends(batch_id - 1) or checkpoint.start
        sizes: dict[Place, int] = {}
        for place, partition in self._places():
            since = begin.get(place, 0)
            if partition.first > since or partition.end < since:
                raise RecordsLostError(f"records of {place} were deleted before the job read them")
            if self.kafka.lagging.get(place, 0) > 0:
                self.kafka.lagging[place] -= 1
                sizes[place] = 0
                continue
            sizes[place] = max(0, partition.visible_end(committed_only=self.reads_committed) - since)
        share = min(1.0, (self.settings.kafka.max_offsets_per_trigger or 10**9) / max(1, sum(sizes.values())))
        end: Offsets = {place: begin.get(place, 0) + min(size, ceil(size * share)) for place, size in sizes.items()}
        if all(end[place] == begin.get(place, 0) for place in end):
            return False
        checkpoint.plan(batch_id, end)
        return True

    def _places(self) -> Iterator[tuple[Place, Any]]:
        for topic in (HALF, OP):
            for number, partition in enumerate(self.kafka.topics[topic]):
                yield (topic, number), partition

    def _records(self, checkpoint: Checkpoint, batch_id: int) -> Iterator[Record]:
        begin, ends = checkpoint.ends(batch_id - 1) or checkpoint.start or {}, checkpoint.ends(batch_id) or {}
        for place, end in ends.items():
            since = begin.get(place, 0)
            if end > since and self.kafka.topics[place[0]][place[1]].first > since:
                raise RecordsLostError(f"records of {place} were deleted before the job read them")
            yield from self.kafka.read(place, since, end, committed_only=self.reads_committed)

    def _resolve(self, checkpoint: Checkpoint, batch_id: int, records: list[Record]) -> BatchOutcomes:
        """Bring the state from its version before the batch to that after it; return what came of it."""
        before = checkpoint.states.get(batch_id, {})
        resolve = self._with_operator if self.is_full else self._with_core
        outcomes, buckets, checkpoint.states[batch_id + 1] = resolve(before, records, batch_id)
        checkpoint.states.pop(batch_id - 2, None)
        held = [self.writer.may_be_held(outcome) for outcome in outcomes]
        return BatchOutcomes(outcomes, sum(held), buckets)

    def _with_core(self, before: dict[int, Any], records: list[Record], batch_id: int) -> Resolved:
        """Run the rules over all records as one bucket."""
        former = self.former if self.former is not None and self._reads_again(records) else None
        batch = to_batch(records, self.configs.of(batch_id), former, self.kafka.timestamp_type)
        resolution = core.resolve(before.get(0, core.BucketState()), batch, self.rules.of(batch_id))
        clock = resolution.state.clock
        report = BucketReport(0, clock.horizon_ms(), 0, 0, None, 0, 0, resolution.counts, {}, read_digest(clock))
        return resolution.outcomes, {0: report}, {0: resolution.state}

    def _reads_again(self, records: list[Record]) -> bool:
        """Return True if a former checkpoint may have dealt with one of these records."""
        taken_at = self.manifest.taken_at
        return any(record.offset < taken_at.get(record.topic, {}).get(record.partition, 0) for record in records)

    def _with_operator(self, before: dict[int, Any], records: list[Record], batch_id: int) -> Resolved:
        """Run the function that Spark calls for each bucket, on packs, with the state as bytes."""
        packs = to_packs(to_arrow(records, self.kafka.timestamp_type), self.configs.of(batch_id), self.manifest.bucket_keys, self.former)
        rules = ByBatch([(0, self.rules.of(batch_id))])
        function = bucket_function(rules, 2, 1_000, Takeover())
        after = dict(before)
        outcomes: list[core.Outcome] = []
        buckets: dict[int, BucketReport] = {}
        for key, frame in packs.groupby("bucket"):
            state = _StateRow(after.get(int(key)))  # type: ignore[call-overload]
            for found in function((key,), [frame], state):  # type: ignore[arg-type]
                for row in found.itertuples():
                    if row.kind == Kind.REPORT:
                        buckets[int(key)] = BucketReport.from_json(row.outcomes)  # type: ignore[call-overload]
                    else:
                        outcomes.extend(_outcomes_in(row.outcomes))
            after[int(key)] = state.row  # type: ignore[call-overload]
        return outcomes, buckets, after


class Pending(NamedTuple):
    """An id whose half is pending, or whose verdict waits for its half."""

    transaction_id: str
    producer_group: str
    incarnation: int
    is_waiting: bool


def pending_in(checkpoint: Checkpoint) -> list[Pending]:
    """Return what the newest state of a checkpoint holds, as `halfway pending` reads it."""
    found: list[Pending] = []
    states = checkpoint.states
    for state in states[max(states)].values() if states else ():
        if isinstance(state, core.BucketState):
            halves = [known.half for known in state.transactions.values() if known.phase is Phase.PENDING]
            found += [Pending(half.transaction_id, half.producer_group, half.incarnation, False) for half in halves]
            ops = [op for waiting in state.waiting.values() for op in waiting]
            found += [Pending(op.transaction_id, op.producer_group, op.incarnation, True) for op in ops]
        else:
            for row in Bucket.decode(*state).entries.to_pylist():
                if row["entry"] in _NOT_SETTLED:
                    pointer = (row["transaction_id"], row["producer_group"], row["incarnation"])
                    found.append(Pending(*pointer, row["entry"] != Phase.PENDING))
    return found


_NOT_SETTLED = (Phase.PENDING, WAITING_COMMIT, WAITING_ROLLBACK)


class _StateRow:
    """Spark's GroupState: one row."""

    def __init__(self, row: tuple[int, bytes] | None) -> None:
        self.row = row

    @property
    def exists(self) -> bool:
        return self.row is not None

    @property
    def get(self) -> tuple[int, bytes]:
        assert self.row is not None
        return self.row

    def update(self, row: tuple[int, bytes]) -> None:
        self.row = row


def _outcomes_in(pack: bytes) -> Iterator[core.Outcome]:
    for values in zip(*(column.to_pylist() for column in packing.unpack(pack).columns), strict=True):
        outcome = core.Outcome._make(values)
        yield outcome._replace(kind=Kind(outcome.kind), source=core.Source(outcome.source))
