"""R5: a check counts when it has been in the check topic for half an interval."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from halfway.conf.loader import load_settings
from halfway.pipelines.resolve.job import ResolveJob
from halfway.pipelines.resolve.report import BatchReport
from halfway.pipelines.resolve.sent_checks import SentChecks
from halfway.schemas.outcomes import Count, Kind
from halfway.schemas.reports import BucketReport


class Clock:
    """Seconds."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_checks_count_after_half_an_interval(clock: Clock) -> None:
    sent = SentChecks(60_000, clock)
    assert sent.asked_ms() == 0, "nothing was sent"
    sent.add(5_000)
    clock.now_s = 129.9
    sent.add(6_000)
    assert sent.asked_ms() == 0
    clock.now_s = 130.0
    assert sent.asked_ms() == 5_000
    sent.add(4_000, any_due=False)
    clock.now_s = 160.0
    assert sent.asked_ms() == 6_000, "never less than it was"


def test_a_check_that_is_sent_while_the_horizon_stands_waits_too(clock: Clock) -> None:
    sent = SentChecks(60_000, clock)
    sent.add(5_000)
    clock.now_s = 140.0
    assert sent.asked_ms() == 5_000
    sent.add(5_000, any_due=False)
    assert sent.asked_ms() == 5_000
    sent.add(5_000)
    clock.now_s = 169.0
    assert sent.asked_ms() == 4_999
    clock.now_s = 170.0
    assert sent.asked_ms() == 5_000


@pytest.mark.parametrize(
    ("rows", "counts", "asked_ms"),
    [({}, {}, 5_000), ({Kind.COMMIT: 1}, {}, 5_000), ({Kind.CHECK: 1}, {}, 4_999), ({}, {Count.PUT_OFF: 1}, 4_999)],
)
def test_what_a_batch_checks_or_puts_off_at_a_horizon_that_stands_waits_too(
    rows: dict[Kind, int], counts: dict[str, int], asked_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R8: a put-off counts when a check sent then would count."""
    job = ResolveJob(load_settings(environ={}, overrides={"kafka.bootstrap_servers": "none:1"}))
    monkeypatch.setattr(job, "_write_status", lambda *_: None)
    clock = Clock()
    job._sent = SentChecks(60_000, clock)
    job._sent.add(5_000)
    clock.now_s = 140.0
    assert job._sent.asked_ms() == 5_000
    of_bucket = BucketReport(0, 5_000, 1, 0, None, 1, 0, counts, {})
    report = BatchReport(7, rows=Counter(rows), buckets={0: of_bucket}, known={0: of_bucket})
    writer: Any = SimpleNamespace(write=lambda *_: report, use_pause=lambda _: None, appended={}, appended_before={})
    frame: Any = SimpleNamespace(sparkSession=None)
    job._write_batch(writer, frame, 7)
    assert job._sent.asked_ms() == asked_ms


def test_no_check_counts_that_is_newer_than_what_is_known_of_its_group(clock: Clock) -> None:
    sent = SentChecks(60_000, clock)
    sent.add(5_000)
    clock.now_s = 1_000.0
    assert [sent.asked_ms(as_of_s) for as_of_s in (float("-inf"), 129.0, 130.0)] == [0, 0, 5_000]


def test_many_batches_take_little_room_and_count_in_time(clock: Clock) -> None:
    sent = SentChecks(60_000, clock)
    for number in range(1_000):
        clock.now_s = 100.0 + number / 2
        sent.add(number)
        late_s = 30 + 30 / 8
        assert clock.now_s - 100 - late_s <= sent.asked_ms() / 2 <= max(0, clock.now_s - 130)
    assert len(sent.status().ms_ago) < 12


def restarted(sent: SentChecks, clock: Clock, after_s: float) -> SentChecks:
    """Return what the next run knows: the clock is another one."""
    status = sent.status()
    clock.now_s = 7.0
    found = SentChecks(60_000, clock)
    found.take_up(status, round(after_s * 1000))
    return found


@pytest.mark.parametrize(("after_s", "asked_ms"), [(-3_600.0, 0), (0.0, 0), (24.9, 0), (25.0, 5_000), (30.0, 6_000)])
def test_what_a_former_run_sent_counts_from_then(after_s: float, asked_ms: int, clock: Clock) -> None:
    sent = SentChecks(60_000, clock)
    sent.add(5_000)
    clock.now_s += 5
    sent.add(6_000)
    assert restarted(sent, clock, after_s).asked_ms() == asked_ms, "a clock that was set back holds up nothing for ever"


def test_runs_nearer_than_half_an_interval_let_checks_count_too(clock: Clock) -> None:
    sent = SentChecks(60_000, clock)
    asked = []
    for number in range(1, 30):
        sent.add(number)
        sent = restarted(sent, clock, 7.0)
        asked.append(sent.asked_ms())
    assert asked == [max(0, number - 4) for number in range(1, 30)]


def test_while_it_is_not_known_for_days_who_is_absent_the_list_stays_short(clock: Clock) -> None:
    sent = SentChecks(60_000, clock)
    for number in range(1, 20_000):
        clock.now_s = 100.0 + 10 * number
        sent.add(number)
        assert sent.asked_ms(as_of_s=100.0) == 0
    assert len(sent.status().ms_ago) <= 101
    assert sent.asked_ms() >= 20_000 - 4, "the newest are kept"
