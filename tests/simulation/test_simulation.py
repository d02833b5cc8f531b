"""Simulated histories show no defect, neither random ones nor those that once did."""

import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any
from zlib import crc32

import pytest

from halfway.pipelines.storage.manifest import MANIFEST_FILE
from halfway.schemas.headers import LocalTransactionState, Source
from halfway.schemas.outcomes import Phase, Reason
from halfway.schemas.tables import Table
from halfway.transforms import operator
from halfway.transforms import protocol as core
from halfway.transforms.decoding import DecoderConfig
from halfway.transforms.horizon import Clock
from halfway.transforms.protocol import Batch
from tests.simulation import decoded, job
from tests.simulation.checker import judge
from tests.simulation.found import FOUND, Found
from tests.simulation.generator import generate
from tests.simulation.history import HALF, OP, Fate, Record
from tests.simulation.planted import PLANTED, Planted, first_seed, run_planted
from tests.simulation.run import describe, findings_of, run_seeds, shortest
from tests.simulation.storage import in_place_of_spark
from tests.simulation.world import Action, World

TOGETHER = 250
"""Each such part is a test of its own, so that several workers share them."""
QUICK, SLOW, ALL = 1000, 3000, 5000
"""`make test` plays the first, `make test-slow` those up to 3,000, `make test-long` the others."""
PARTS = [
    *range(0, QUICK, TOGETHER),
    *(pytest.param(first, marks=pytest.mark.slow) for first in range(QUICK, SLOW, TOGETHER)),
    *(pytest.param(first, marks=pytest.mark.long) for first in range(SLOW, ALL, TOGETHER)),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", PARTS)
def test_histories_show_nothing_that_the_rules_forbid(first: int) -> None:
    for failure in run_seeds(range(first, first + TOGETHER)):
        pytest.fail(describe(shortest(failure)))


@pytest.mark.parametrize("found", FOUND, ids=lambda found: f"{found.about}-{found.rule}")
def test_what_once_showed_a_defect_shows_none(found: Found) -> None:
    assert findings_of(found.actions) == []


def test_the_checker_sees_a_discard_by_the_newest_tick_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which no random history showed: R15 was so once."""

    def newest_names(clock: Clock) -> frozenset[str]:
        _, source, partition = max((at_ms, source, n) for source in Source for n, at_ms in clock.tick_ms[source].items())
        return frozenset(clock.absent[source].get(partition, ()))

    monkeypatch.setattr(Clock, "absent_groups", newest_names)
    [actions] = [found.actions for found in FOUND if found.about.startswith("a group that is back before")]
    assert [finding.rule for finding in findings_of(actions)] == ["R15"]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_defect_still_fits_what_it_is_planted_in(planted: Planted) -> None:
    """With other arguments than it takes, or another name, it would be found in every history, for a wrong reason."""
    shown = (run_planted(planted.name, seed) for seed in range(1, 4))
    wrong = re.compile(r"\b(TypeError|AttributeError|NameError|ImportError)\b")
    assert not [finding for failure in filter(None, shown) for finding in failure.findings if wrong.search(str(finding))]


@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_the_checker_finds_each_planted_defect(planted: Planted) -> None:
    assert first_seed(planted, 1_000) is not None


def played(*actions: tuple[str, int, dict[str, Any]]) -> list[int]:
    """Play a history, and return the sizes of the bodies in `messages`."""
    history = World([Action(*action) for action in actions]).run()
    assert judge(history) == []
    return [len(row["body"]) for row in history.rows if row.table == Table.MESSAGES]


def service_sends(transaction_id: str) -> tuple[str, int, dict[str, Any]]:
    fate = {"fate": Fate.COMMIT, "way": "op", "delay_ms": 0, "immunity_s": 0, "size": 4}
    return "send", 1000, {"group": "g1", "transaction_id": transaction_id, **fate}


def half_and_commit(transaction_id: str) -> list[tuple[str, int, dict[str, Any]]]:
    sent = {"group": "g1", "transaction_id": transaction_id, "incarnation": 0}
    return [("half", 100, {**sent, "size": 7}), ("op", 1000, {**sent, "action": "COMMIT"})]


LOST_CHECKPOINT: list[tuple[str, int, dict[str, Any]]] = [("kill", 0, {}), ("new_checkpoint", 0, {}), ("start", 1000, {"adopt": True})]
RETENTION = "resolution.resolved_retention"


@pytest.mark.parametrize("adopted", [[], LOST_CHECKPOINT])
@pytest.mark.parametrize(
    "before",
    [
        [],
        [("broker_clock", 0, {"broker": broker, "ms": -100_000}) for broker in (0, 1)],
        [("kill", 0, {}), ("set", 0, {"name": RETENTION, "value": 600_000}), ("start", 1000, {})],
    ],
)
def test_r11_an_id_that_was_forgotten_is_free_also_after_an_adoption(adopted: list[Any], before: list[Any]) -> None:
    """Two minutes later its half is a new message, whatever clocks and settings are then."""
    start, forgotten, end = ("start", 1000, {}), ("wait", 0, {"ms": 120_000, "steps": 12}), ("wait", 0, {"ms": 60_000, "steps": 12})
    first = [start, service_sends("t0"), ("wait", 0, {"ms": 4000, "steps": 4})]
    assert played(*first, *adopted, forgotten, *before, *half_and_commit("t0"), end) == [4, 7]


@pytest.mark.parametrize("retention_ms", [60_000, 1_000])
def test_r16_a_repeated_batch_leaves_out_what_it_left_out_before_whatever_is_remembered_now(retention_ms: int) -> None:
    """A retry went into a new partition, which the batch reads before the one with the message."""
    moved = next(f"t{n}" for n in range(200) if crc32(b"t%d" % n) % 2 == 0 and crc32(b"t%d" % n) % 3 == 2)
    wait = ("wait", 1000, {"ms": 4000, "steps": 4})
    sizes = played(
        ("start", 1000, {}),
        service_sends(moved),
        wait,
        *(("add_partition", 0, {"topic": topic}) for topic in (HALF, OP)),
        wait,
        *half_and_commit(moved),
        wait,
        ("kill", 0, {}),
        ("new_checkpoint", 0, {}),
        *(("lag", 0, {"topic": topic, "partition": 0, "batches": 3}) for topic in (HALF, OP)),
        ("kill_at", 0, {"step": 11}),
        ("start", 1000, {"adopt": True}),
        wait,
        ("set", 0, {"name": RETENTION, "value": retention_ms}),
        ("start", 1000, {}),
        ("wait", 1000, {"ms": 9000, "steps": 9}),
    )
    assert sizes == [4]


def test_several_processes_find_what_one_finds() -> None:
    [name] = (planted.name for planted in PLANTED if planted.name.startswith("client: commits what"))
    play = partial(run_planted, name)
    alone = [*run_seeds(range(10), jobs=1, play=play)]
    assert [*run_seeds(range(10), jobs=2, play=play)] == alone != []


def test_what_is_remembered_of_records_is_what_the_product_says_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[tuple[Batch, Batch]] = []

    def both(records: Sequence[Record], config: DecoderConfig, former: Any, timestamp_type: int) -> Batch:
        packs = decoded.to_packs(decoded.to_arrow(records, timestamp_type), config, (0,), former)
        quick = decoded.to_batch(records, config, former, timestamp_type)
        batches.append((quick, operator.to_batch([packs])))
        return quick

    monkeypatch.setattr(job, "to_batch", both)
    for seed in (3, 25):
        World(generate(seed)).run()
    for quick, whole in batches:
        for name in ("halves", "ops", "lost", "broken"):
            assert sorted(getattr(quick, name), key=str) == sorted(getattr(whole, name), key=str)
        assert Clock().after(quick.ticks, quick.read_ms) == Clock().after(whole.ticks, whole.read_ms)
    assert any(half.discarded_ms for quick, _ in batches for half in quick.halves)


@pytest.mark.parametrize("step", range(1, 9))
def test_an_adoption_that_was_killed_anywhere_reads_from_the_earliest_record(step: int) -> None:
    """Also if the start that does it again has no `--adopt`, and `kafka.starting_offsets` is `latest` by then."""
    killed = [("kill_at", {"step": step}), ("start", {"adopt": True}), ("kill", {})]
    done_again = [("set", {"name": "kafka.starting_offsets", "value": "latest"}), ("start", {})]
    actions = [("start", {}), ("kill", {}), ("new_checkpoint", {}), *killed, *done_again]
    world = World([Action(name, 1_000, arguments) for name, arguments in actions])
    with in_place_of_spark():
        world._play()
    manifests = [json.loads(checkpoint.files.get(MANIFEST_FILE, "{}")) for checkpoint in world.storage.checkpoints.values()]
    assert [found["starting_offsets"] for found in manifests if found.get("epoch")] == (["earliest"] if step > 5 else [])  # refused


def test_a_job_that_hangs_stops_no_check_of_the_one_in_its_place() -> None:
    """Its ticks go on, right before each batch of the other one, and do not tell of that one's checks (R5)."""
    world = World([])
    with in_place_of_spark():
        world.do_start()
        world.pass_time(10_000, 10)
        world.hanging = [world.jobs.pop()]
        world.frozen.add(world.hanging[0].path)
        world.do_new_checkpoint()
        world.do_start(adopt=True)
        world.do_send("g1", "t0", Fate.NEVER, "unknown", 0, 0, 4)
        world.pass_time(1_200_000, 1_200)
    assert [row["transaction_id"] for row in world.storage.tables["discarded"].rows] == ["t0"]


@pytest.mark.parametrize("adopted", [[], LOST_CHECKPOINT])
def test_an_adoption_excuses_no_verdict_that_was_refused_before_what_it_should_have_decided(
    adopted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted job refuses the first verdict, a ROLLBACK, and takes the second."""
    on_op = core._Resolver.on_op

    def refuse_rollbacks(self: Any, op: core.Op) -> None:
        known = self.transactions.get(op.transaction_id)
        if known is not None and known.phase is Phase.PENDING and op.action is LocalTransactionState.ROLLBACK:
            self._quarantine(op, Reason.CONFLICTING_VERDICT, "planted")
        else:
            on_op(self, op)

    sent, wait = {"group": "g1", "transaction_id": "t0", "incarnation": 0}, ("wait", 0, {"ms": 60_000, "steps": 12})
    ops = [("op", 1_000, {**sent, "action": "ROLLBACK"}), ("op", 3_000, {**sent, "action": "COMMIT"})]
    actions = [("start", 1_000, {}), ("half", 100, {**sent, "size": 4}), *ops, wait, *adopted, wait]
    monkeypatch.setattr(core._Resolver, "on_op", refuse_rollbacks)
    assert {finding.rule for finding in findings_of([Action(*action) for action in actions])} == {"R2"}


def test_a_half_that_an_adoption_lets_in_is_no_fate_of_one_before_it() -> None:
    [planted] = (planted for planted in PLANTED if planted.name == "R12 a duplicate takes the place of the first")
    [found] = (found for found in FOUND if found.about == "a half beside one of its id that is too large, and that an adoption lets in")
    actions = [action for action in found.actions if action.arguments.get("transaction_id") != "t0"]
    place = next(number for number, action in enumerate(actions) if action.name == "broken")
    actions.insert(place, Action("half", 100, {"group": "g1", "transaction_id": "t0", "incarnation": 0, "size": 4}))
    assert findings_of(actions) == []
    with planted.in_place():
        assert "R1 no fate" in {finding.rule for finding in findings_of(actions)}


@pytest.mark.parametrize("is_after", [False, True])
def test_only_an_adoption_that_did_not_find_the_first_half_excuses_a_stale_one_without_a_row(is_after: bool) -> None:
    sent = {"group": "g1", "transaction_id": "t0"}
    first = [("half", 100, {**sent, "incarnation": 1, "size": 4}), ("op", 100, {**sent, "incarnation": 1, "action": "COMMIT"})]
    stale, wait = ("half", 100, {**sent, "incarnation": 0, "size": 4}), ("wait", 0, {"ms": 60_000, "steps": 12})
    adopted = LOST_CHECKPOINT if is_after else []
    actions = [("start", 1_000, {}), *LOST_CHECKPOINT, *first, stale, wait, *adopted]
    with in_place_of_spark():
        history = World([Action(*action) for action in actions]).run()
    history.rows = [row for row in history.rows if row.values.get("reason") != "stale_incarnation"]
    half = next(record for record in history.records if record.topic == HALF and record.text_key == "t0")
    half.deleted_seq = max(act.seq for act in history.acts if act.name == "started") - 1 if is_after else 2**60
    assert {finding.rule for finding in judge(history)} == (set() if is_after else {"R1 no fate"})
