"""What `halfway status` shows to a person, and what to a program."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from halfway.pipelines.cli.app import app
from halfway.pipelines.operate import status as operate
from halfway.pipelines.operate.status import Status
from halfway.schemas.batch_status import BatchStatus
from halfway.transforms.views.pending import GroupPending

pytestmark = pytest.mark.usefixtures("empty_directory")

TOTALS = {"halves": 1_200, "ops": 1_190, "committed": 1_000, "discarded": 3, "check_max": 2, "expired": 1, "lost": 1}
TOTALS |= {"bad_header": 4, "late_verdict": 1, "latency_le_50_ms": 900, "latency_more": 2, "latency_sum_ms": 123_456}


def shown(monkeypatch: pytest.MonkeyPatch, *options: str, **facts: Any) -> str:
    known: dict[str, Any] = dict.fromkeys(Status.__dataclass_fields__)
    known |= {"pending": 0, "waiting": 0, "totals": {}, "open_transactions": [], "pending_by_group": [], "absent_groups": []}
    known |= {"is_running": True, "unread": {"half": 0, "op": 0}, **facts}
    monkeypatch.setattr(operate, "job_status", lambda *_: Status(**known))
    done = CliRunner().invoke(app, ["status", *options])
    assert done.exit_code == 0
    return done.stdout


def test_reasons_follow_what_they_are_the_reasons_of(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, totals=TOTALS, rates={"halves": 1.512, "ops": 0.017, "committed": 0.0}, rates_over_s=30.0).splitlines()
    counted = [line.split() for line in lines[next(n for n, line in enumerate(lines) if "since the checkpoint began" in line) + 2 :]]
    assert [row for row in counted if row] == [
        ["halves", "1,200", "1.5"],
        ["ops", "1,190", "0.017"],
        ["committed", "1,000", "0"],
        ["discarded", "3"],
        ["check_max", "2"],
        ["expired", "1"],
        ["quarantined", "6"],
        ["late_verdict", "1"],
        ["half_lost", "1"],
        ["bad_header", "4"],
    ]


@pytest.mark.parametrize(
    ("is_running", "of"), [(True, "per second, last 30 s"), (False, "per second, its last 30 s"), (None, ", last 30 s")]
)
def test_rates_of_a_job_that_has_ended_are_not_of_now(is_running: bool | None, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of in shown(monkeypatch, totals=TOTALS, rates={"halves": 1.5}, rates_over_s=30.0, is_running=is_running)


@pytest.mark.parametrize(
    ("last_batch", "text"),
    [
        (None, "it is starting, or waits for Kafka, and has ended no batch yet"),
        (BatchStatus(batch_id=7, seconds=1.0, written_at_ms=1_700_000_000_000), "its last batch ended"),
    ],
)
def test_a_job_that_ends_no_batch_is_not_simply_running(last_batch: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start takes half a minute, in which nothing is read."""
    assert f"yes, but {text}" in " ".join(shown(monkeypatch, last_batch=last_batch).split())
    assert "but" not in shown(monkeypatch, last_batch=last_batch, is_running=False)


def test_a_histogram_is_for_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "latency" not in shown(monkeypatch, totals=TOTALS)
    assert json.loads(shown(monkeypatch, "--json", totals=TOTALS))["totals"] == {**TOTALS, "quarantined": 6}
    assert json.loads(shown(monkeypatch, "--json", totals={"halves": 1}))["totals"] == {"halves": 1}


@pytest.mark.parametrize(("unread", "text"), [({"half": 0, "op": 0}, "none"), ({"half": 1_234, "op": 0}, "half 1,234")])
def test_only_a_backlog_is_named(unread: dict[str, int], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [line] = [line for line in shown(monkeypatch, unread=unread).splitlines() if "not read yet" in line]
    assert line.split(maxsplit=3)[3].strip() == text


def test_why_kafka_does_not_tell_is_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    told = shown(monkeypatch, unread=None, kafka_error="Kafka cannot be reached: " + "x" * 200)
    assert "unknown, as Kafka does not tell" in told
    assert max(map(len, told.splitlines())) < 120


def test_groups_that_are_away_and_have_nothing_pending_are_only_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts that have ended, say: nobody has to start them again."""
    pending = [GroupPending("shop", 2, 1_000, 1, is_absent=True), GroupPending("billing", 1, 1_000, 0, is_absent=False)]
    for absent, pending_by_group, text in (
        (["old", "shop", "script"], pending, "shop, 2 with nothing pending"),
        (["shop"], pending, "shop"),
        (["old"], [], "1 with nothing pending"),
        ([], [], "none"),
    ):
        told = shown(monkeypatch, absent_groups=absent, pending_by_group=pending_by_group)
        [line] = [line for line in told.splitlines() if "groups away or behind" in line]
        assert line.split("groups away or behind")[1].strip() == text
