"""The view of what is pending, held against the plain protocol core."""

import json
from collections.abc import Iterable

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfway.schemas.errors import StateFormatError
from halfway.schemas.outcomes import Phase
from halfway.schemas.state_format import ENTRY_SCHEMA, FORMAT_VERSION, decode_payload
from halfway.transforms.bucket import Bucket
from halfway.transforms.views.pending import PENDING_SCHEMA, GroupPending, PendingView, is_signed, pending_by_group, phase_of, view_pending
from tests.support.scenario import Record, commit, half, lost, rollback, states_after, tick


def view_after(*batches: Iterable[Record]) -> PendingView:
    return view_pending(states_after(batches)[0])


def test_no_state_is_no_pending_and_no_horizon() -> None:
    view = view_pending([])
    assert (view.transactions.num_rows, view.horizon_ms, view.totals) == (0, None, {})
    assert view.transactions.schema == PENDING_SCHEMA


def test_oldest_first_with_all_that_is_known() -> None:
    view = view_after(
        [half("young", 9_000, offset=7), half("old", 1_000, group="h", partition=1, offset=3, incarnation=2), half("done", 0)],
        [commit("done", 5), tick(10_000)],
    )
    assert view.transactions.to_pylist() == [
        {
            "transaction_id": "old",
            "incarnation": 2,
            "producer_group": "h",
            "topic": "orders",
            "start_ms": 1_000,
            "age_ms": 9_000,
            "check_times": 1,
            "next_due_ms": 40_000,
            "half_partition": 1,
            "half_offset": 3,
        },
        {
            "transaction_id": "young",
            "incarnation": 0,
            "producer_group": "g",
            "topic": "orders",
            "start_ms": 9_000,
            "age_ms": 1_000,
            "check_times": 0,
            "next_due_ms": 15_001,
            "half_partition": 0,
            "half_offset": 7,
        },
    ]
    assert (view.horizon_ms, view.remembered, view.waiting) == (10_000, 1, 0)


def test_ages_are_unknown_while_the_horizon_is() -> None:
    view = view_after([half("a", 1_000)])
    assert view.horizon_ms is None
    assert view.transactions.select(["age_ms", "next_due_ms"]).to_pylist() == [{"age_ms": None, "next_due_ms": 7_001}]


def test_one_bucket_without_a_horizon_leaves_it_undefined() -> None:
    states, _ = states_after([[half("a"), tick(1_000)]])
    assert view_pending(states).horizon_ms == 1_000
    assert view_pending([*states, Bucket().encode()]).horizon_ms is None


def test_groups_that_are_away_and_what_waits_and_is_remembered() -> None:
    view = view_after([half("a"), half("b"), lost("b"), commit("stranger", 1), rollback("a", 2), tick(1_000, away=["g", "h"])])
    assert view.absent_groups == {"g", "h"}
    assert (view.transactions.num_rows, view.waiting, view.remembered) == (0, 1, 2)
    assert (view.totals["halves"], view.totals["ops"], view.totals["rolled_back"], view.totals["lost"]) == (2, 2, 1, 1)


def test_groups_with_the_most_pending_first() -> None:
    records = [half("a1", 2_000, group="a"), half("b1", 0, group="b"), half("b2", 4_000, group="b"), half("c1", 3_000, group="c")]
    view = view_after([*records, tick(10_000, away=["c"])])
    assert pending_by_group(view.transactions, view.absent_groups) == [
        GroupPending("b", pending=2, oldest_age_ms=10_000, most_checks=1, is_absent=False),
        GroupPending("a", pending=1, oldest_age_ms=8_000, most_checks=1, is_absent=False),
        GroupPending("c", pending=1, oldest_age_ms=7_000, most_checks=0, is_absent=True),
    ]
    unknown = view_after([half("a")])
    assert [group.oldest_age_ms for group in pending_by_group(unknown.transactions, unknown.absent_groups)] == [None]


def test_where_one_transaction_stands() -> None:
    records = [half(name) for name in ("pending", "committed", "rolled", "lost")]
    ops = [commit("committed"), rollback("rolled"), lost("lost"), commit("waiting"), tick(1_000)]
    states, _ = states_after([[*records, *ops]])
    phases = [phase_of(states, name) for name in ("pending", "committed", "rolled", "lost", "waiting", "never")]
    assert phases == [Phase.PENDING, Phase.COMMITTED, Phase.ROLLED_BACK, Phase.LOST, None, None]


def test_a_pending_half_is_signed_or_not() -> None:
    signed, committed = half("signed", binding=7), half("committed", binding=7)
    states, _ = states_after([[signed, half("plain"), committed, commit("committed")._replace(binding=7), tick(1_000)]])
    assert [is_signed(states, name) for name in ("signed", "plain", "committed", "never")] == [True, False, False, False]


@pytest.mark.parametrize("other", [FORMAT_VERSION - 1, FORMAT_VERSION + 1])
def test_another_format_is_refused(other: int) -> None:
    with pytest.raises(StateFormatError, match=f"format {other}, .* go on with the version that wrote it"):
        view_pending([(other, Bucket().encode()[1])])


def test_other_fields_under_the_same_number_are_another_format() -> None:
    table, metadata = decode_payload(*Bucket().encode())
    sink = pa.BufferOutputStream()
    schema = table.drop_columns(["put_off_ms"]).schema.with_metadata({b"halfway": json.dumps(metadata).encode()})
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(schema.empty_table())
    with pytest.raises(StateFormatError, match=f"format {FORMAT_VERSION} with other fields, .* go on with the version that wrote it"):
        view_pending([(FORMAT_VERSION, bytes(sink.getvalue()))])


IDS = st.sampled_from([f"t{n}" for n in range(8)])
TIMES = st.integers(0, 150_000)
RECORDS = st.one_of(
    st.builds(half, IDS, TIMES, group=st.sampled_from(["g", "h"]), incarnation=st.integers(0, 1), offset=st.integers(0, 99)),
    st.builds(commit, IDS, TIMES),
    st.builds(rollback, IDS, TIMES),
    st.builds(tick, TIMES, away=st.sampled_from([(), ("g",)])),
)


@settings(max_examples=150)
@given(st.lists(st.lists(RECORDS, max_size=8), max_size=6))
def test_it_tells_what_the_plain_core_holds(batches: list[list[Record]]) -> None:
    states, plain = states_after(batches)
    view = view_pending(states)
    expected = [
        (
            transaction_id,
            known.half.incarnation,
            known.half.producer_group,
            known.half.topic,
            known.half.at_ms,
            None if horizon_ms is None else horizon_ms - known.half.at_ms,
            known.check_times,
            known.due_ms,
            known.half.partition,
            known.half.offset,
        )
        for state in plain
        for horizon_ms in [state.clock.horizon_ms()]
        for transaction_id, known in state.transactions.items()
        if known.phase is Phase.PENDING
    ]
    assert [tuple(row.values()) for row in view.transactions.to_pylist()] == sorted(expected, key=lambda row: (row[4], row[0]))
    assert view.waiting == sum(len(ops) for state in plain for ops in state.waiting.values())
    horizons = {state.clock.horizon_ms() for state in plain}
    assert horizons == {view.horizon_ms}


def test_a_million_pending_take_columns_not_objects() -> None:
    """In seconds: a Python object each would take many."""
    rows = 1_000_000
    numbers = pa.array(range(rows), pa.int64())
    small = pa.array([0], pa.int32()).take(pa.array([0] * rows))
    name = pa.DictionaryArray.from_arrays(small, ["g"])
    columns = [numbers.cast(pa.string()), small.cast(pa.int8()), name, name, small, numbers, small, numbers, numbers, small, numbers]
    columns += [small.cast(pa.bool_()), small, numbers]
    payload = Bucket(pa.table(columns, schema=ENTRY_SCHEMA)).encode()[1]
    view = view_pending([(FORMAT_VERSION, payload)])
    assert (view.transactions.num_rows, view.transactions["start_ms"][rows - 1].as_py()) == (rows, rows - 1)
