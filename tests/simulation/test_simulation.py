"""Simulated histories show no defect, neither random ones nor those that once did."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from halfway.transforms import operator
from halfway.transforms.decoding import DecoderConfig
from halfway.transforms.horizon import Clock
from halfway.transforms.protocol import Batch
from tests.simulation import decoded, job
from tests.simulation.found import FOUND, Found
from tests.simulation.generator import generate
from tests.simulation.history import Record
from tests.simulation.planted import PLANTED, Planted, run_planted
from tests.simulation.run import describe, findings_of, run_seeds, shortest
from tests.simulation.world import World

TOGETHER = 250
"""Each such part is a test of its own, so that several workers share them."""
QUICK, ALL = 1000, 5000
"""`make test` plays the first, `make test-slow` the others."""
PARTS = [
    *range(0, QUICK, TOGETHER),
    *(pytest.param(first, marks=pytest.mark.slow) for first in range(QUICK, ALL, TOGETHER)),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", PARTS)
def test_histories_show_nothing_that_the_rules_forbid(first: int) -> None:
    for failure in run_seeds(range(first, first + TOGETHER)):
        pytest.fail(describe(shortest(failure)))


@pytest.mark.parametrize("found", FOUND, ids=lambda found: f"{found.line}-{found.rule}")
def test_what_once_showed_a_defect_shows_none(found: Found) -> None:
    assert findings_of(found.actions) == []


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_defect_still_fits_what_it_is_planted_in(planted: Planted) -> None:
    """With other arguments than it takes, it would be found in every history, for a wrong reason."""
    shown = (run_planted(planted.name, seed) for seed in range(1, 4))
    assert not [finding for failure in filter(None, shown) for finding in failure.findings if "TypeError" in str(finding)]


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
    for seed in (4, 7):
        World(generate(seed)).run()
    for quick, whole in batches:
        for name in ("halves", "ops", "lost", "broken"):
            assert sorted(getattr(quick, name), key=str) == sorted(getattr(whole, name), key=str)
        assert Clock().after(quick.ticks, quick.read_ms) == Clock().after(whole.ticks, whole.read_ms)
    assert any(half.discarded_ms for quick, _ in batches for half in quick.halves)
