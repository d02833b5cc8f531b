"""The auditor of the chaos run finds what is lost, twice and wrong, and reports nothing if all is well."""

from dataclasses import replace

import pytest

from halfway.schemas.headers import check_id
from tests.chaos.auditor import Check, Evidence, Findings, Half, Refused, Row, Verdict, audit
from tests.chaos.plans import Decision, Fate, body_of, digest, plan_of
from tests.chaos.reading import Tick

GROUP = "alpha"


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


def decided(name: str, offset: int, times: int, horizon_ms: int) -> tuple[str, int]:
    return check_id(name, 0, offset, times), horizon_ms


# One transaction of each kind (committed at once, committed by a check, rolled back, discarded, pending) and one
# record without headers.
GOOD = Evidence(
    half_topic="half",
    check_max=2,
    decisions={
        "c": Decision(Fate.COMMIT, "COMMIT"),
        "a": Decision(Fate.COMMIT, "UNKNOWN"),
        "r": Decision(Fate.ROLLBACK, "ROLLBACK"),
        "d": Decision(Fate.NEVER, "UNKNOWN"),
        "p": Decision(Fate.NEVER, "UNKNOWN"),
    },
    halves=[half(name, offset) for offset, name in enumerate("cardp")],
    verdicts=[verdict("c", 1_100), verdict("a", 4_500), verdict("r", 1_100, commit=False)],
    checks=[check("a", 1, 1), check("a", 1, 1), check("d", 3, 1), check("d", 3, 2), check("p", 4, 1)],
    asked_at=[decided("a", 1, 1, 3_001), decided("d", 3, 1, 3_001), decided("d", 3, 2, 4_001), decided("p", 4, 1, 3_001)],
    messages=[row("c", 0, 1_100), row("a", 1, 4_500, 1)],
    discarded=[row("d", 3, 5_001, 2)],
    quarantine=[Refused(None, "half", 0, 5, "missing_header")],
    garbage=[(0, 5)],
    pending=frozenset({"p"}),
)


def found(**changes: object) -> Findings:
    return audit(replace(GOOD, **changes))  # type: ignore[arg-type]


def test_it_finds_nothing_if_all_is_well() -> None:
    assert audit(GOOD) == Findings()


@pytest.mark.parametrize("clock_was_wrong", [False, True])
def test_an_orphan_is_not_the_first_verdict_where_a_clock_was_wrong(*, clock_was_wrong: bool) -> None:
    """An earlier COMMIT of `a` was refused, and the answer to its check counts."""
    early = verdict("a", 1_100)._replace(offset=77)
    refused = [*GOOD.quarantine, Refused("a", "op", early.partition, early.offset, "orphan_op")]
    refused += [Refused(None, "op", 0, 78, "bad_tick")] if clock_was_wrong else []
    findings = found(verdicts=[*GOOD.verdicts, early], quarantine=refused)
    assert findings.ok == clock_was_wrong, findings


LOST = {
    "a committed message without a row": {"messages": GOOD.messages[:1]},
    "a committed message that was discarded for want of an answer": {
        "verdicts": [GOOD.verdicts[0], GOOD.verdicts[2]],
        "messages": GOOD.messages[:1],
        "discarded": [*GOOD.discarded, row("a", 1, 5_001, 2)],
    },
    "a committed message that was rolled back": {
        "verdicts": [GOOD.verdicts[0], verdict("a", 4_500, commit=False), GOOD.verdicts[2]],
        "messages": GOOD.messages[:1],
    },
    "an acknowledged half that is not in Kafka": {"halves": [*GOOD.halves[:2], *GOOD.halves[3:]]},
    "a half without any fate": {"pending": frozenset()},
    "a discarded message without a row": {"discarded": []},
    "a bad record that is in no table": {"quarantine": []},
}
TWICE = {
    "two rows of one message": {"messages": [*GOOD.messages, GOOD.messages[0]]},
    "two rows of one discard": {"discarded": [*GOOD.discarded, row("d", 3, 6_001, 2)]},
    "committed and discarded": {"messages": [*GOOD.messages, row("d", 3, 6_000)], "verdicts": [*GOOD.verdicts, verdict("d", 6_000)]},
    "settled and pending": {"pending": frozenset({"p", "c"})},
}
WRONG = {
    "rolled back but readable": {"messages": [*GOOD.messages, row("r", 2, 1_100)]},
    "undecided but readable": {"messages": [*GOOD.messages, row("p", 4, 1_100)]},
    "another body": {"messages": [GOOD.messages[0]._replace(body_digest=digest(b"other")), GOOD.messages[1]]},
    "another group": {"messages": [GOOD.messages[0]._replace(group="beta"), GOOD.messages[1]]},
    "another pointer": {"messages": [GOOD.messages[0]._replace(offset=7), GOOD.messages[1]]},
    "another time of commit": {"messages": [GOOD.messages[0]._replace(decided_ms=1_101), GOOD.messages[1]]},
    "committed by a stranger alone": {"verdicts": [verdict("c", 1_100, group="stranger"), *GOOD.verdicts[1:]]},
    "discarded though the verdict was in Kafka by then": {"verdicts": [*GOOD.verdicts, verdict("d", 5_001, commit=False)]},
    "discarded though the verdict, of a leader with a fast clock, had been read": {
        "verdicts": [*GOOD.verdicts, verdict("d", 99_000, commit=False)._replace(offset=7)],
        "op_ticks": [Tick(0, 6, 1_500), Tick(0, 8, 5_001)],
    },
    "discarded after too few checks": {"discarded": [GOOD.discarded[0]._replace(check_times=1)]},
    "checked though the verdict was in Kafka by then": {"asked_at": [*GOOD.asked_at, decided("c", 0, 1, 1_100)]},
    "a check that the job did not decide": {"asked_at": GOOD.asked_at[1:]},
    "a check of no half": {"checks": [*GOOD.checks, check("x", 9, 1)], "asked_at": [*GOOD.asked_at, decided("x", 9, 1, 3_001)]},
    "a check with another body": {"checks": [*GOOD.checks[:-1], GOOD.checks[-1]._replace(body_digest=digest(b"other"))]},
    "a gap in the numbers of checks": {"checks": [check("a", 1, 1), check("d", 3, 2), check("p", 4, 1)]},
    "more checks than allowed": {
        "checks": [*GOOD.checks, check("p", 4, 2), check("p", 4, 3)],
        "asked_at": [*GOOD.asked_at, decided("p", 4, 2, 4_001), decided("p", 4, 3, 5_001)],
    },
}


@pytest.mark.parametrize("changes", LOST.values(), ids=LOST)
def test_it_finds_what_is_lost(changes: dict[str, object]) -> None:
    assert found(**changes).lost


@pytest.mark.parametrize("changes", TWICE.values(), ids=TWICE)
def test_it_finds_what_exists_twice(changes: dict[str, object]) -> None:
    assert found(**changes).twice


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG)
def test_it_finds_what_is_wrong(changes: dict[str, object]) -> None:
    assert found(**changes).wrong


def test_a_verdict_after_the_horizon_excludes_no_check_and_no_discard() -> None:
    late = [*GOOD.verdicts, verdict("d", 5_002, commit=False), verdict("p", 3_002, commit=False)]
    assert found(verdicts=late, pending=frozenset()) == Findings()


def test_a_verdict_of_a_leader_with_a_slow_clock_excludes_no_check_that_was_decided_before_it_was_read() -> None:
    slow = [*GOOD.verdicts, verdict("p", 500, commit=False)._replace(offset=7)]
    assert found(verdicts=slow, pending=frozenset()).wrong
    assert found(verdicts=slow, pending=frozenset(), op_ticks=[Tick(0, 6, 3_001), Tick(0, 8, 9_000)]) == Findings()
    assert found(verdicts=slow, pending=frozenset(), op_ticks=[Tick(0, 6, 3_000), Tick(0, 8, 9_000)]).wrong


def test_a_half_with_a_time_to_come_may_wait_and_is_not_gone() -> None:
    waiting = {"verdicts": GOOD.verdicts[::2], "messages": GOOD.messages[:1], "not_due": frozenset({"a"})}
    assert found(**waiting, pending=frozenset({"p", "a"})) == Findings()
    assert found(**waiting).lost


def test_a_stray_verdict_that_comes_first_counts() -> None:
    stray = [verdict("c", 1_050, commit=False, stray=True), *GOOD.verdicts]
    assert found(verdicts=stray, messages=GOOD.messages[1:]) == Findings()


def test_a_half_that_a_fault_destroyed_or_the_job_reported_lost_is_no_loss() -> None:
    gone = {"halves": [*GOOD.halves[:1], *GOOD.halves[2:]], "messages": GOOD.messages[:1], "verdicts": GOOD.verdicts[::2]}
    assert found(**gone).lost
    assert found(**gone, destroyed=frozenset({"a"})) == Findings()
    reported = [*GOOD.quarantine, Refused("a", "half", 0, 1, "half_lost")]
    assert found(**gone, quarantine=reported, start_offsets={0: 2}) == Findings()
    assert found(**gone, quarantine=[*reported, reported[1]], start_offsets={0: 2}).twice
    assert found(**gone, quarantine=reported).wrong, "Kafka still has the half"


def test_while_traffic_runs_only_the_given_ids_must_be_settled() -> None:
    running = replace(GOOD, pending=None, messages=GOOD.messages[:1])
    assert audit(running, settled=["c", "r"]) == Findings()
    assert audit(running, settled=["a"]).lost


def test_the_same_seed_makes_the_same_plans() -> None:
    names = [f"alpha-r1-{number}" for number in range(300)]
    assert [plan_of(7, name) for name in names] == [plan_of(7, name) for name in names]
    assert {plan_of(7, name).fate for name in names} == set(Fate)
