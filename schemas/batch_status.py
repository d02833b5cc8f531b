"""What the job writes to `status.json` in its checkpoint after each batch, for the commands and for its next start."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from halfway.schemas.tables import Table


@dataclass(frozen=True, slots=True)
class SentStatus:
    """Which checks were sent, and when (R5)."""

    asked_ms: int = 0
    """The horizon up to which checks count; 0 if none do."""
    ms_ago: tuple[tuple[int, int], ...] = ()
    """How long ago all checks up to a later horizon had been sent, and this horizon."""


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """What is known after a batch. Times are in ms since 1970 UTC."""

    batch_id: int
    seconds: float
    """How long the batch took."""
    written_at_ms: int
    """By the clock of the job's machine."""
    horizon_ms: int | None = None
    pending: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    """What the batch counted: `Count`, and quarantined records by their `Reason`."""
    appended: Mapping[Table, int] = field(default_factory=dict)
    """The last batch that the job has appended to each table."""
    appended_before: Mapping[Table, int] = field(default_factory=dict)
    """The same before this batch, which runs again if the job is killed now."""
    sent_checks: SentStatus = SentStatus()
    groups_listed_ms_ago: Mapping[str, int] = field(default_factory=dict)
    """How long ago Kafka listed each producer group."""

    def to_json(self) -> str:
        """Return the status as JSON, in ASCII: a part that a power cut leaves is text too."""
        return json.dumps(_STATUS.dump_python(self, mode="json"))

    @classmethod
    def parse(cls, text: str | None) -> "BatchStatus | None":
        """Return what a file says; None if there is none, or a power cut has left a part of it: it is not synced."""
        try:
            return _STATUS.validate_json(text or "null")
        except ValidationError:
            return None


_STATUS = TypeAdapter(BatchStatus)
