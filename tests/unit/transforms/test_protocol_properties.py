"""Random halves, ops and ticks, in any order, duplication and split into batches, compared with the naive model."""

from collections import Counter
from dataclasses import dataclass
from operator import attrgetter

from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from halfway.schemas.headers import LocalTransactionState, Source
from halfway.schemas.outcomes import Count, Phase, Reason
from halfway.schemas.reports import latency_counts
from halfway.schemas.tick_value import ALL_ASKED
from halfway.transforms.bucket import Bucket
from halfway.transforms.horizon import Clock, SourcePartition, Tick
from halfway.transforms.protocol import Batch, BucketState, Half, Op, Rules, resolve
from tests.support.naive_model import all_outcomes
from tests.support.scenario import told

PARTITIONS = 2
SMALL = Rules(timeout_ms=6, check_interval_ms=10, check_max=2, half_retention_ms=40, resolved_retention_ms=15)

# The world is small, so that ids, times and incarnations meet often. These are the steps of time in a log.
_ids = st.sampled_from(["a", "b", "c", "d"])
_groups = st.sampled_from(["g", "g", "g", "h"])
_incarnations = st.sampled_from([0, 0, 0, 1, 2])
_steps = st.sampled_from([0, 0, 1, 1, 2, 5, 11, 31, -20])
_immunity = st.sampled_from([0, 0, 0, 3, 30, 60])
_actions = st.sampled_from([LocalTransactionState.COMMIT, LocalTransactionState.ROLLBACK, LocalTransactionState.UNKNOWN])
_away = st.sampled_from([(), (), (), ("g",), ("h",)])
_asked = st.sampled_from([ALL_ASKED, ALL_ASKED, 0, 11, 40])


@dataclass(frozen=True)
class Log:
    """One partition of one topic, in order of offset. The clock may have been set back between two records."""

    records: tuple[Half | Op | Tick, ...]
    has_broker_times: bool = False
    """True with LogAppendTime, False with CreateTime."""


@st.composite
def _logs(draw: st.DrawFn, source: Source, partition: int) -> Log:
    at_ms, records = 0, []
    for offset in range(draw(st.integers(0, 12))):
        at_ms = max(0, at_ms + draw(_steps))
        if draw(st.integers(0, 2)) == 0:
            records.append(Tick(source, partition, PARTITIONS, at_ms, draw(_away), draw(_asked)))
        elif source is Source.HALF:
            key = f"{draw(_ids)}{partition}"
            records.append(Half(key, draw(_groups), "t", draw(_incarnations), at_ms, partition, offset, immunity_ms=draw(_immunity)))
        else:
            key = f"{draw(_ids)}{partition}"
            records.append(Op(key, draw(_groups), draw(_incarnations), draw(_actions), at_ms, partition, offset))
    return Log(tuple(records), draw(st.booleans()))


_world = st.tuples(*(_logs(source, partition) for source in Source for partition in range(PARTITIONS)))
_cuts = st.lists(st.tuples(*[st.integers(0, 12)] * (len(Source) * PARTITIONS)), max_size=6)


def _split(world: tuple[Log, ...], cuts: list[tuple[int, ...]]) -> list[Batch]:
    """Cut the logs into batches. Each batch reads each log on, by any distance."""
    batches, done = [], [0] * len(world)
    for cut in [*cuts, tuple(len(log.records) for log in world)]:
        read: list[Half | Op | Tick] = []
        read_ms: dict[SourcePartition, int] = {}
        for place, log in enumerate(world):
            upto = max(done[place], min(cut[place], len(log.records)))
            read.extend(log.records[done[place] : upto])
            for record in log.records[done[place] : upto] if log.has_broker_times else ():
                source = record.source if isinstance(record, Tick) else Source.HALF if isinstance(record, Half) else Source.OP
                read_ms[source, record.partition] = record.at_ms
            done[place] = upto
        batches.append(
            Batch(
                [record for record in read if isinstance(record, Half)],
                [record for record in read if isinstance(record, Op)],
                ticks=[record for record in read if isinstance(record, Tick)],
                read_ms=read_ms,
            )
        )
    return batches


def _resolve_all(batches: list[Batch]) -> tuple[list[str], BucketState, Counter[str]]:
    state, lines, counts = BucketState(), [], Counter[str]()
    for batch in batches:
        resolution = resolve(state, batch, SMALL)
        state = resolution.state
        counts += resolution.counts
        lines.extend(told(outcome) for outcome in resolution.outcomes)
    return sorted(lines), state, counts


def _tick(source: Source, partition: int, at_ms: int, *absent: str) -> Tick:
    return Tick(source, partition, PARTITIONS, at_ms, absent)


_NAMED_IN_ONE = (
    Log((Half("a0", "g", "t", 0, 0, 0, 0), _tick(Source.HALF, 0, 32))),
    Log((_tick(Source.HALF, 1, 32),)),
    Log((_tick(Source.OP, 0, 31, "g"),)),
    Log((_tick(Source.OP, 1, 31),)),
)
"""The group is named by the latest tick of one partition, which is not the newest of all (R15)."""


@settings(max_examples=600)
@given(_world, _cuts)
@example(_NAMED_IN_ONE, [(0, 0, 0, 0)])
def test_same_outcomes_as_the_naive_model(world: tuple[Log, ...], cuts: list[tuple[int, ...]]) -> None:
    batches = _split(world, cuts)
    lines, state, _ = _resolve_all(batches)
    expected, phases = all_outcomes(batches, SMALL)
    for line in {line.split()[2] if line.startswith("quarantine") else line.split()[0] for line in lines}:
        event(line)
    assert lines == expected
    assert {transaction_id: known.phase.name for transaction_id, known in state.transactions.items()} == phases


_moments = st.tuples(st.sampled_from([1, 9, 10, 11, 25, 60]), st.sampled_from([(), ("g",)]))


@settings(max_examples=400)
@given(st.lists(_immunity, min_size=1, max_size=3), st.lists(_moments, max_size=15))
def test_r8_as_the_naive_model_has_it(immunities: list[int], moments: list[tuple[int, tuple[str, ...]]]) -> None:
    """Halves without a verdict, long after their retention, while their group comes and goes."""
    halves = [Half(f"{number}", "g", "t", 0, number, 0, number, immunity_ms=immunity_ms) for number, immunity_ms in enumerate(immunities)]
    batches, at_ms = [Batch(halves)], 0
    for step_ms, away in moments:
        at_ms += step_ms
        batches.append(Batch(ticks=[Tick(source, 0, 1, at_ms, away) for source in Source]))
    lines, state, _ = _resolve_all(batches)
    expected, phases = all_outcomes(batches, SMALL)
    for line in {" ".join(line.split()[2:4]) for line in lines if line.startswith("discard")}:
        event(line)
    assert lines == expected
    assert {transaction_id: known.phase.name for transaction_id, known in state.transactions.items()} == phases


@settings(max_examples=300)
@given(_world, _cuts)
def test_a_buckets_columns_are_the_same_state(world: tuple[Log, ...], cuts: list[tuple[int, ...]]) -> None:
    """A bucket that is encoded after each batch, and reads only the affected entries, misses nothing."""
    batches = _split(world, cuts)
    bucket, lines = Bucket(), []
    for batch in batches:
        bucket, outcomes, _ = Bucket.decode(*bucket.encode()).after(batch, SMALL)
        lines.extend(told(outcome) for outcome in outcomes)
    expected, state, counts = _resolve_all(batches)
    assert sorted(lines) == expected
    assert {name: bucket.totals[name] for name in counts} == counts
    assert sum(latency_counts(bucket.totals)) == counts[Count.COMMITTED]
    assert bucket.totals[Reason.CHECK_MAX] + bucket.totals[Reason.EXPIRED] == counts[Count.DISCARDED]
    assert bucket.clock == state.clock
    timers = ("due_ms", "check_times", "checked_ms", "late_put_offs", "put_off_ms")
    entries = {row["transaction_id"]: [row[name] for name in timers] for row in bucket.entries.to_pylist() if row["entry"] < 100}
    assert entries == {transaction_id: list(attrgetter(*timers)(known)) for transaction_id, known in state.transactions.items()}


@settings(max_examples=300)
@given(_world, _cuts)
def test_horizon_and_read_mark_never_go_back_and_the_mark_is_never_behind(world: tuple[Log, ...], cuts: list[tuple[int, ...]]) -> None:
    clock, last = Clock(), (-1, -1)
    for batch in _split(world, cuts):
        clock = clock.after(batch.ticks, batch.read_ms)
        horizon_ms, read_mark_ms = clock.horizon_ms(), clock.read_mark_ms()
        assert (horizon_ms is None) == (read_mark_ms is None)
        if horizon_ms is not None and read_mark_ms is not None:
            assert last[0] <= horizon_ms <= read_mark_ms >= last[1]
            last = horizon_ms, read_mark_ms


@settings(max_examples=300)
@given(_world, _cuts)
def test_each_half_ends_once(world: tuple[Log, ...], cuts: list[tuple[int, ...]]) -> None:
    """Every accepted half is either committed, rolled back, discarded or pending: the four numbers add up."""
    batches = _split(world, cuts)
    _, state, counts = _resolve_all(batches)
    refused = sum(counts[reason] for reason in ("id_conflict", "stale_incarnation", "incarnation_refused"))
    accepted = counts[Count.HALVES] - refused - counts[Count.DUPLICATE_HALF]
    pending = sum(known.phase is Phase.PENDING for known in state.transactions.values())
    assert accepted == counts[Count.COMMITTED] + counts[Count.ROLLED_BACK] + counts[Count.DISCARDED] + pending


@settings(max_examples=300)
@given(_world, _cuts, _cuts)
def test_without_time_the_split_does_not_matter(world: tuple[Log, ...], cuts: list[tuple[int, ...]], others: list[tuple[int, ...]]) -> None:
    """While time stands still, and no clock is set back, outcomes do not depend on how the logs are cut.

    UNKNOWN is left out: one that is read before its half is only counted, whatever its group.
    """
    timeless = tuple(
        Log(
            tuple(
                r._replace(at_ms=r.offset)
                for r in log.records
                if not isinstance(r, Tick) and not (isinstance(r, Op) and r.action is LocalTransactionState.UNKNOWN)
            )
        )
        for log in world
    )
    assert _resolve_all(_split(timeless, cuts))[0] == _resolve_all(_split(timeless, others))[0]
