"""Simulated histories show no defect, neither random ones nor those that once did, and planted defects are seen."""

import pytest

from tests.simulation.found import FOUND, Found
from tests.simulation.known import KNOWN
from tests.simulation.planted import PLANTED, Planted, first_seed
from tests.simulation.run import describe, findings_of, run_seed, shortest

HISTORIES = 1_000


@pytest.mark.timeout(600)
def test_histories_show_nothing_that_the_rules_forbid() -> None:
    for seed in range(HISTORIES):
        failure = run_seed(seed)
        assert failure is None, describe(shortest(failure))


@pytest.mark.parametrize("found", FOUND, ids=lambda found: f"{found.line}-{found.rule}")
def test_what_once_showed_a_defect_shows_none(found: Found) -> None:
    assert [finding for finding in findings_of(found.actions) if finding.rule not in KNOWN] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_defect_is_seen(planted: Planted) -> None:
    assert first_seed(planted, 20_000) is not None
