"""Says what it may mean that a running job has ended no batch lately."""

from typing import TYPE_CHECKING

from halfway.schemas.settings import Settings
from halfway.transforms.views.durations import duration_text

if TYPE_CHECKING:
    from halfway.schemas.batch_status import BatchStatus

_QUIET_MS = 10_000
"""Longer than a batch takes. It may begin an interval and a tick after the last one."""


def quiet_text(last_batch: "BatchStatus | None", settings: Settings, now_ms: int) -> str:
    """Return what it may mean that a running job has ended no batch lately; nothing if it has.

    Args:
        last_batch: None if the job has ended none.
        settings: the job's.
        now_ms: in ms since 1970 UTC.
    """
    if last_batch is None:
        return "it is starting, or waits for Kafka, and has ended no batch yet"
    quiet_ms = now_ms - last_batch.written_at_ms
    if quiet_ms < _QUIET_MS + settings.trigger.interval + settings.resolution.tick_interval:
        return ""
    return f"its last batch ended {duration_text(quiet_ms)} ago: it is starting, a batch takes long, or Kafka does not answer"
