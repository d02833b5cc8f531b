"""How often a job publishes ticks whose batches do not end."""

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.admin import admin_client
from halfway.pipelines.resolve.sent_checks import SentChecks
from halfway.pipelines.resolve.ticks import HANGS_MS, TickPace, TickPublisher


def ticks_of(pace: TickPace, seconds: range) -> int:
    count = 0
    for now_s in seconds:
        if pace.is_due(now_s * 1_000):
            pace.note_tick(now_s * 1_000)
            count += 1
    return count


def test_a_job_whose_batches_do_not_end_ticks_once_a_minute() -> None:
    pace = TickPace(1_000, HANGS_MS)
    assert ticks_of(pace, range(600)) == 600
    assert ticks_of(pace, range(600, 1_200)) == 10
    pace.note_batch()
    assert ticks_of(pace, range(1_200, 1_300)) == 100


def test_ticks_that_kafka_does_not_take_slow_nothing_down() -> None:
    """A batch ends only when one is read."""
    pace = TickPace(1_000, HANGS_MS)
    assert all(pace.is_due(now_s * 1_000) for now_s in range(2_000))


def test_a_job_whose_batches_begin_seldom_does_not_hang() -> None:
    settings = load_settings(environ={}, overrides={"kafka.bootstrap_servers": "127.0.0.1:1", "trigger.interval": "1h"})
    pace = TickPublisher(settings, admin_client(settings.kafka), SentChecks(30_000)).pace
    for first in range(0, 36_000, 3_600):
        assert ticks_of(pace, range(first, first + 3_600)) == 3_600
        pace.note_batch()
