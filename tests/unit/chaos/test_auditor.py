"""The fault harness' auditor finds what is lost, twice and wrong, and nothing where all is well."""

from dataclasses import replace

import pytest

from halfway.schemas.headers import check_id
from tests.chaos.plans import Entry, Fate, body_of, digest, plan_of
from tests.fuzz.auditor import Check, Evidence, Findings, Half, Refused, Row, Verdict, audit

GROUP = "alpha"
HORIZON_MS = 9_000


def body(name: str) -> str:
    return digest(body_of(name))


def half(name: str, offset: int) -> Half:
    return Half(name, 0, offset, 1_000, GROUP, body(name))


def verdict(name: str, at_ms: int, *, commit: bool = True, group: str = GROUP, stray: bool = False) -> Verdict:
    return Verdict(name, at_ms, 0, at_ms, group, commit, stray)


def row(name: str, offset: int, decided_ms: int, times: int = 0) -> Row:
    return Row(name, 0, offset, 1_000, decided_ms, times, GROUP, body(name))


def check(name: str, offset: int, times: int) -> Check:
    return Check(name, check_id(name, 0, offset, times), times, 8_000, body(name))


def noted(name: str, offset: int, times: int, horizon_ms: int) -> tuple[str, int]:
    return check_id(name, 0, offset, times), horizon_ms


# One of each: committed at once, committed when asked, rolled back, discarded, pending; and a record without headers.
GOOD = Evidence(
    half_topic="half",
    op_topic="op",
    check_max=2,
    ledger={
        "c": Entry(Fate.COMMIT, "COMMIT"),
        "a": Entry(Fate.COMMIT, "UNKNOWN"),
        "r": Entry(Fate.ROLLBACK, "ROLLBACK"),
        "d": Entry(Fate.NEVER, "UNKNOWN"),
        "p": Entry(Fate.NEVER, "UNKNOWN"),
    },
    halves=[half(name, offset) for offset, name in enumerate("cardp")],
    verdicts=[verdict("c", 1_100), verdict("a", 4_500), verdict("r", 1_100, commit=False)],
    checks=[check("a", 1, 1), check("a", 1, 1), check("d", 3, 1), check("d", 3, 2), check("p", 4, 1)],
    asked_at=[noted("a", 1, 1, 3_001), noted("d", 3, 1, 3_001), noted("d", 3, 2, 4_001), noted("p", 4, 1, 3_001)],
    messages=[row("c", 0, 1_100), row("a", 1, 4_500, 1)],
    discarded=[row("d", 3, 5_001, 2)],
    quarantine=[Refused(None, "half", 0, 5, "missing_header")],
    garbage=[(0, 5)],
    pending=frozenset({"p"}),
)


def found(**changes: object) -> Findings:
    return audit(replace(GOOD, **changes))  # type: ignore[arg-type]


def test_where_all_is_well_it_finds_nothing() -> None:
    assert audit(GOOD) == Findings()


LOST = {
    "a committed one without a row": {"messages": GOOD.messages[:1]},
    "a committed one that nobody answered for, and that was discarded": {
        "verdicts": [GOOD.verdicts[0], GOOD.verdicts[2]],
        "messages": GOOD.messages[:1],
        "discarded": [*GOOD.discarded, row("a", 1, 5_001, 2)],
    },
    "a committed one rolled back": {
        "verdicts": [GOOD.verdicts[0], verdict("a", 4_500, commit=False), GOOD.verdicts[2]],
        "messages": GOOD.messages[:1],
    },
    "an acknowledged half that is not in Kafka": {"halves": [*GOOD.halves[:2], *GOOD.halves[3:]]},
    "one without any fate": {"pending": frozenset()},
    "a discarded one without a row": {"discarded": []},
    "a bad record that is in no table": {"quarantine": []},
}
TWICE = {
    "two rows of one message": {"messages": [*GOOD.messages, GOOD.messages[0]]},
    "two rows of one discard": {"discarded": [*GOOD.discarded, row("d", 3, 6_001, 2)]},
    "committed and discarded": {"messages": [*GOOD.messages, row("d", 3, 6_000)], "verdicts": [*GOOD.verdicts, verdict("d", 6_000)]},
    "settled and pending": {"pending": frozenset({"p", "c"})},
}
WRONG = {
    "rolled back, and readable": {"messages": [*GOOD.messages, row("r", 2, 1_100)]},
    "undecided, and readable": {"messages": [*GOOD.messages, row("p", 4, 1_100)]},
    "another body": {"messages": [GOOD.messages[0]._replace(body_digest=digest(b"other")), GOOD.messages[1]]},
    "another group": {"messages": [GOOD.messages[0]._replace(group="beta"), GOOD.messages[1]]},
    "another pointer": {"messages": [GOOD.messages[0]._replace(offset=7), GOOD.messages[1]]},
    "another time of commit": {"messages": [GOOD.messages[0]._replace(decided_ms=1_101), GOOD.messages[1]]},
    "committed by a stranger alone": {"verdicts": [verdict("c", 1_100, group="stranger"), *GOOD.verdicts[1:]]},
    "discarded though the verdict was in Kafka by then": {"verdicts": [*GOOD.verdicts, verdict("d", 5_001, commit=False)]},
    "discarded after too few checks": {"discarded": [GOOD.discarded[0]._replace(check_times=1)]},
    "asked about though the verdict was in Kafka by then": {"asked_at": [*GOOD.asked_at, noted("c", 0, 1, 1_100)]},
    "a check that nobody decided": {"asked_at": GOOD.asked_at[1:]},
    "a check with another body": {"checks": [*GOOD.checks[:-1], GOOD.checks[-1]._replace(body_digest=digest(b"other"))]},
    "a gap in the numbers of checks": {"checks": [check("a", 1, 1), check("d", 3, 2), check("p", 4, 1)]},
    "more checks than allowed": {
        "checks": [*GOOD.checks, check("p", 4, 2), check("p", 4, 3)],
        "asked_at": [*GOOD.asked_at, noted("p", 4, 2, 4_001), noted("p", 4, 3, 5_001)],
    },
}


@pytest.mark.parametrize("changes", LOST.values(), ids=LOST)
def test_it_finds_what_is_lost(changes: dict[str, object]) -> None:
    assert found(**changes).lost


@pytest.mark.parametrize("changes", TWICE.values(), ids=TWICE)
def test_it_finds_what_is_there_twice(changes: dict[str, object]) -> None:
    assert found(**changes).twice


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG)
def test_it_finds_what_is_wrong(changes: dict[str, object]) -> None:
    assert found(**changes).wrong


def test_a_verdict_after_the_horizon_is_in_time_for_none() -> None:
    late = [*GOOD.verdicts, verdict("d", 5_002, commit=False), verdict("p", 3_002, commit=False)]
    assert found(verdicts=late, pending=frozenset()) == Findings()


def test_a_stray_verdict_that_comes_first_counts() -> None:
    stray = [verdict("c", 1_050, commit=False, stray=True), *GOOD.verdicts]
    assert found(verdicts=stray, messages=GOOD.messages[1:]) == Findings()


def test_what_a_fault_destroyed_is_nobodys_loss_and_what_the_job_names_lost_neither() -> None:
    gone = {"halves": [*GOOD.halves[:1], *GOOD.halves[2:]], "messages": GOOD.messages[:1], "verdicts": GOOD.verdicts[::2]}
    assert found(**gone).lost
    assert found(**gone, destroyed=frozenset({"a"})) == Findings()
    named = [*GOOD.quarantine, Refused("a", "half", 0, 1, "half_lost")]
    assert found(**gone, quarantine=named, low={0: 2}) == Findings()
    assert found(**gone, quarantine=[*named, named[1]], low={0: 2}).twice
    assert found(**gone, quarantine=named).wrong, "Kafka still has it"


def test_while_traffic_runs_only_what_must_be_settled_is_asked_for() -> None:
    running = replace(GOOD, pending=None, messages=GOOD.messages[:1])
    assert audit(running, settled=["c", "r"]) == Findings()
    assert audit(running, settled=["a"]).lost


def test_a_seed_plans_the_same_again() -> None:
    names = [f"alpha-r1-{number}" for number in range(300)]
    assert [plan_of(7, name) for name in names] == [plan_of(7, name) for name in names]
    assert {plan_of(7, name).fate for name in names} == set(Fate)
