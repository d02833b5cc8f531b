"""Defects that are planted into the product, one at a time, to prove that the simulator sees them.

Each is a patch of one function of the product, as a mistake in that function would be.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pyarrow.compute as pc

from halfway.clients import open_checks
from halfway.pipelines.operate import next_halves, replay
from halfway.pipelines.resolve import check_lag, sinks
from halfway.pipelines.resolve.report import BatchReport
from halfway.pipelines.storage import delta_tables, ownership
from halfway.pipelines.storage.delta_tables import append_id
from halfway.schemas import headers as h
from halfway.schemas.events import EventKind
from halfway.schemas.headers import LocalTransactionState
from halfway.schemas.outcomes import Phase
from halfway.schemas.tables import Table
from halfway.schemas.tick_value import ALL_ASKED
from halfway.transforms import bucket, decoding, horizon, packing
from halfway.transforms import protocol as core
from halfway.transforms import rows as row_makers
from halfway.transforms.former import FormerRecords
from tests.simulation import decoded, job, storage, writer
from tests.simulation.run import Failure, run_seed

_Resolver = core._Resolver
_on_op, _on_half, _on_due = _Resolver.on_op, _Resolver.on_half, _Resolver._on_due
_write, _resolve = sinks.BatchWriter.write, core.resolve


class Planted(NamedTuple):
    """A defect: where to patch what."""

    name: str
    target: Any
    attribute: str
    new: Any
    is_full: bool = False
    """It is in what only a full history runs: buckets, packs."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Run with the defect."""
        self._forget()
        with patch.object(self.target, self.attribute, self.new):
            yield
        self._forget()

    def _forget(self) -> None:
        """Forget what the product said without the defect, or with it."""
        decoded.forget_answers()
        writer.forget_rows()


def _last_verdict_wins(self: Any, op: core.Op) -> None:
    known = self.transactions.get(op.transaction_id)
    if known is not None and known.phase in (Phase.COMMITTED, Phase.ROLLED_BACK) and op.action is not LocalTransactionState.UNKNOWN:
        known = self.transactions[op.transaction_id] = known._replace(phase=Phase.PENDING)
    _on_op(self, op)


def _commits_come_last(record: core.Half | core.Op) -> tuple[bool, int, int, int]:
    is_commit = isinstance(record, core.Op) and record.action is LocalTransactionState.COMMIT
    return is_commit, record.at_ms, record.partition, record.offset


def _contrary_is_counted(self: Any, op: core.Op) -> None:
    known = self.transactions.get(op.transaction_id)
    if known is None or known.phase is not Phase.COMMITTED or known.half.producer_group != op.producer_group:
        _on_op(self, op)


def _unknown_rolls_back(self: Any, op: core.Op) -> None:
    is_unknown = op.action is LocalTransactionState.UNKNOWN
    _on_op(self, op._replace(action=LocalTransactionState.ROLLBACK) if is_unknown else op)


def _horizon_before_ops(state: core.BucketState, batch: core.Batch, rules: core.Rules) -> core.Resolution:
    early = _resolve(state, replace(batch, ops=()), rules)
    late = _resolve(early.state, core.Batch(ops=batch.ops), rules)
    return core.Resolution(late.state, early.outcomes + late.outcomes, Counter())


def _largest_horizon(self: horizon.Clock) -> int | None:
    times_ms = [at_ms for of_topic in self.tick_ms.values() for at_ms in of_topic.values()]
    return max(times_ms, default=None)


def _horizon_of_halves(self: horizon.Clock) -> int | None:
    return min(self.tick_ms[h.Source.HALF].values(), default=None)


def _late_verdict_counts(self: Any, op: core.Op) -> None:
    known = self.transactions.get(op.transaction_id)
    if known is not None and known.phase is Phase.DISCARDED:
        self.transactions[op.transaction_id] = known._replace(phase=Phase.PENDING)
    _on_op(self, op)


def _last_rollback_is_ignored(self: Any, op: core.Op) -> None:
    known = self.transactions.get(op.transaction_id)
    has_asked = known is not None and known.phase is Phase.PENDING and known.check_times >= self.rules.check_max
    if not has_asked or op.action is not LocalTransactionState.ROLLBACK:
        _on_op(self, op)


def _any_half_starts(self: Any, half: core.Half) -> None:
    self.transactions[half.transaction_id] = core.Transaction(Phase.PENDING, half, self.rules.first_check_ms(half))


def _other_group_is_duplicate(self: Any, half: core.Half) -> None:
    known = self.transactions.get(half.transaction_id)
    if known is None or known.half.producer_group == half.producer_group:
        _on_half(self, half)


def _duplicate_replaces(self: Any, half: core.Half) -> None:
    known = self.transactions.get(half.transaction_id)
    is_same = known is not None and known.phase is Phase.PENDING and known.half.incarnation == half.incarnation
    (_any_half_starts if is_same and known.half.producer_group == half.producer_group else _on_half)(self, half)  # type: ignore[union-attr]


def _refused_starts_afresh(half: core.Half, known: core.Transaction) -> bool:
    return half.producer_group == known.half.producer_group and half.incarnation > known.half.incarnation


def _any_group_settles(self: Any, op: core.Op) -> None:
    known = self.transactions.get(op.transaction_id)
    _on_op(self, op if known is None else op._replace(producer_group=known.half.producer_group))


def _orphans_vanish(self: Any, transaction_id: str, *_: Any) -> None:
    del self.waiting[transaction_id]


def _put_off_counts(self: Any, known: core.Transaction, horizon_ms: int, asked_ms: int, *, is_absent: bool) -> None:
    _on_due(self, known._replace(check_times=known.check_times + is_absent), horizon_ms, asked_ms, is_absent=is_absent)


def _no_put_off_counts(self: Any, known: core.Transaction, horizon_ms: int, asked_ms: int, *, is_absent: bool) -> None:
    _on_due(self, known._replace(late_put_offs=0) if is_absent else known, horizon_ms, asked_ms, is_absent=is_absent)


def _check_number_jumps(self: Any, known: core.Transaction, horizon_ms: int, asked_ms: int, *, is_absent: bool) -> None:
    _on_due(self, known._replace(check_times=known.check_times + (known.check_times == 1)), horizon_ms, asked_ms, is_absent=is_absent)


def _skips_after_messages(self: Any, packs: Any, batch_id: int) -> Any:
    """A repeated batch whose messages are in the table counts as written."""
    app_id = append_id(self._query_id, Table.MESSAGES)
    if self._may_be_repeat and self._job.storage.tables[Table.MESSAGES].txn.get(app_id, -1) >= batch_id:
        return BatchReport(batch_id, rows=packs.rows, buckets=packs.buckets)
    return _write(self, packs, batch_id)


def _id_of_the_run(self: Any, *arguments: Any) -> None:
    _simulated_init(self, *arguments)
    self._query_id = self._job.name


_simulated_init = writer.SimulatedWriter.__init__


def _ends_early(*arguments: Any) -> Any:
    manifest = _begin_checkpoint(*arguments)
    ends = {topic: {partition: end - 5 for partition, end in of_topic.items()} for topic, of_topic in manifest.taken_at.items()}
    return replace(manifest, taken_at=ends)


def _nothing_adopted(*arguments: Any) -> Any:
    return replace(_begin_checkpoint(*arguments), taken_at={})


_begin_checkpoint = job.begin_checkpoint


def _no_last_call(self: Any, known: core.Transaction, horizon_ms: int, asked_ms: int, *, is_absent: bool) -> None:
    _on_due(self, known._replace(checked_ms=horizon_ms), horizon_ms, asked_ms, is_absent=is_absent)


def _present_settings(_: Any, settings: Any) -> Any:
    return [(0, settings.resolution)]


def _same_incarnation(row: Any, *others: Any) -> Any:
    return _next_headers({**row, "incarnation": row["incarnation"] - 1} if row["incarnation"] else row, *others)


_next_headers = next_halves.next_headers


def _commits_what_it_has_read(self: Any, offset: int) -> None:
    _begin(self, offset)
    self.position = offset + 1


def _commits_the_newest_answer(self: Any, offset: int) -> None:
    self.position = max(self.position or 0, offset + 1)


_begin = open_checks.PartitionProgress.begin


def _remembers_answers(self: Any, task: Any) -> None:
    _finish(self, task)
    self._answered_until_ms[open_checks._identity(task.request)] = math.inf


_finish = open_checks.OpenChecks.finish


def _empty_checks(*arguments: Any) -> Iterator[Any]:
    return ((topic, key, b"", headers) for topic, key, _, headers in _check_requests(*arguments))


_check_requests = row_makers.check_requests


def _without_checks(*arguments: Any) -> core.BucketState:
    state = _to_state(*arguments)
    return replace(state, transactions={name: known._replace(check_times=0) for name, known in state.transactions.items()})


_to_state = bucket._to_state


def _rows_with(**others: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    make = writer._plain

    def rows(batch: Any) -> Any:
        return [{**row, **{name: value(row) for name, value in others.items() if name in row}} for row in make(batch)]

    return rows


def _ops_elsewhere(events: Any, buckets: int, secret: bytes) -> Any:
    return (_bucket_numbers(events, buckets, secret) + (events["event"].to_numpy() == EventKind.OP)) % buckets


_bucket_numbers = packing._bucket_numbers
_RULES = core.Rules
PLANTED = (
    Planted("R1 a waiting verdict is forgotten when its half comes", _Resolver, "take_waiting", lambda *_: []),
    Planted("R2 the last verdict wins", _Resolver, "on_op", _last_verdict_wins),
    Planted("R2 a ROLLBACK comes before the COMMITs of its batch", core, "_ORDER", _commits_come_last),
    Planted("R2 a contrary verdict is only counted", _Resolver, "on_op", _contrary_is_counted),
    Planted("R3 UNKNOWN rolls back", _Resolver, "on_op", _unknown_rolls_back),
    Planted("R4 the age may equal the timeout", core, "first_ms_after", lambda limit_ms: limit_ms),
    Planted("R4 immunity is ignored", _RULES, "first_check_ms", lambda self, half: half.at_ms + self.timeout_ms + 1),
    Planted("R5 the next check follows at once", _RULES, "next_check_ms", lambda _, horizon_ms: horizon_ms + 1),
    Planted("R6 a number is left out", _Resolver, "_on_due", _check_number_jumps),
    Planted("R9 time moves before the ops of its batch", core, "resolve", _horizon_before_ops),
    Planted("R9 the horizon is the latest tick", horizon.Clock, "horizon_ms", _largest_horizon),
    Planted("R9 the horizon does not wait for the op topic", horizon.Clock, "horizon_ms", _horizon_of_halves),
    Planted("R9 a ROLLBACK after the last check is ignored", _Resolver, "on_op", _last_rollback_is_ignored),
    Planted("R10 orphans vanish", _Resolver, "_quarantine_orphans", _orphans_vanish),
    Planted("R10 a verdict does not wait", _RULES, "orphan_ms", lambda _, op, __: op.at_ms),
    Planted("R11 a settled id is forgotten at once", _RULES, "forget_ms", lambda _, settled_ms, __: settled_ms),
    Planted("R11 a verdict after a discard counts", _Resolver, "on_op", _late_verdict_counts),
    Planted("R12 any half starts its id afresh", _Resolver, "on_half", _any_half_starts),
    Planted("R12 a half of another group is a duplicate", _Resolver, "on_half", _other_group_is_duplicate),
    Planted("R12 a duplicate takes the place of the first", _Resolver, "on_half", _duplicate_replaces),
    Planted("R12 a higher incarnation always starts afresh", core, "_starts_afresh", _refused_starts_afresh),
    Planted("R13 any group settles", _Resolver, "on_op", _any_group_settles),
    Planted("R14 a delay is not refused", h, "DELAY_HEADERS", ()),
    Planted("R14 any tick moves time", decoding, "_PROBLEMS", {**decoding._PROBLEMS, EventKind.TICK: lambda *_: iter(())}),
    Planted("R5 a check counts before it is sent", horizon.Clock, "asked_horizon_ms", lambda _: ALL_ASKED),
    Planted("R15 groups are never away", horizon.Clock, "absent_groups", lambda _: frozenset()),
    Planted("R15 what is put off counts", _Resolver, "_on_due", _put_off_counts),
    Planted("R16 committed_at is the half's time", writer, "_plain", _rows_with(committed_at=lambda row: row["half_at"]), is_full=True),
    Planted("R17 a half that is gone is in no table", writer.SimulatedWriter, "_quarantine_lost", lambda *_: None),
    Planted("rows: all bodies are empty", writer, "_plain", _rows_with(body=lambda _: b"")),
    Planted("writer: a repeated batch stops after messages", sinks.BatchWriter, "write", _skips_after_messages),
    Planted("writer: each run has a txnAppId of its own", writer.SimulatedWriter, "__init__", _id_of_the_run),
    Planted("writer: checks are not sent again", writer.SimulatedWriter, "_send_checks", lambda *_: None),
    Planted("checks: an empty body", row_makers, "check_requests", _empty_checks),
    Planted("R8 no put-off counts", _Resolver, "_on_due", _no_put_off_counts),
    Planted("R8 no last call", _Resolver, "_on_due", _no_last_call),
    Planted("R15 no group is behind", check_lag.CheckLag, "behind", lambda *_: {}),
    Planted("R16 a repeated batch runs under the present settings", job, "settings_of_batches", _present_settings),
    Planted("the source reads what is not committed", job, "source_options", lambda _: {}),
    Planted("adopt: nothing counts as held", job, "begin_checkpoint", _nothing_adopted),
    Planted("adopt: the last halves of the tables are written again", job, "begin_checkpoint", _ends_early),
    Planted("adopt: does not know what was discarded", FormerRecords, "mark", lambda _, events: events),
    Planted("adopt: the epoch stays", ownership.Ownership, "next_epoch", lambda *_: 0),
    Planted("adopt: the former owner is not fenced", storage.Storage, "_fence", lambda *_: None),
    Planted("adopt: a start takes what another one has taken meanwhile", delta_tables, "verify_unclaimed", lambda *_: None),
    Planted("restore: an older checkpoint is taken", job, "verify_lineage", lambda *_: ()),
    Planted("replay: does not look into the topic", replay, "_drop_sent", lambda *_, **__: set()),
    Planted("replay: the same incarnation", next_halves, "next_headers", _same_incarnation),
    Planted("client: commits what it has read", open_checks.PartitionProgress, "begin", _commits_what_it_has_read),
    Planted("client: commits the newest answer", open_checks.PartitionProgress, "finish", _commits_the_newest_answer),
    Planted("client: a check that was answered is not answered again", open_checks.OpenChecks, "finish", _remembers_answers),
    Planted("bucket: checks are not counted", bucket, "_to_state", _without_checks, is_full=True),
    Planted("bucket: ids are not looked up", bucket.Bucket, "_has_id_of", lambda self, _: pc.less(self.entries["offset"], 0), is_full=True),
    Planted("packing: ops go to another bucket than halves", packing, "_bucket_numbers", _ops_elsewhere, is_full=True),
)


def first_seed(planted: Planted, histories: int) -> Failure | None:
    """Return the first history that shows a planted defect; None if none of the first ones does."""
    with planted.in_place():
        found = (run_seed(seed, is_full=planted.is_full) for seed in range(1, histories + 1))
        return next(filter(None, found), None)


def run_planted(name: str, seed: int) -> Failure | None:
    """Run the history of a seed with a defect planted, also in a process of its own."""
    [planted] = (planted for planted in PLANTED if planted.name == name)
    with planted.in_place():
        return run_seed(seed, is_full=planted.is_full)


def main() -> int:
    missed = 0
    for planted in PLANTED:
        failure = first_seed(planted, 20_000)
        missed += failure is None
        sys.stdout.write(f"{planted.name}: {'not found' if failure is None else f'seed {failure.seed}: {failure.findings[0]}'}\n")
        sys.stdout.flush()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
