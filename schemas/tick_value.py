"""What the value of a tick says, as JSON: which groups cannot answer (R15), and which checks count (R5)."""

import json
from typing import NamedTuple, Self

ALL_ASKED = 2**63 - 1
"""What a tick stands for that does not say which checks were sent."""


class TickValue(NamedTuple):
    """What a tick says. An empty value says nothing."""

    absent_groups: tuple[str, ...] = ()
    job: str = ""
    """The query of the job; empty if no job says anything."""
    asked_ms: int = ALL_ASKED
    """The horizon up to which the job's checks had been in the check topic for half an interval."""

    def to_bytes(self) -> bytes:
        """Return the value of the record."""
        return json.dumps({"absent_groups": sorted(self.absent_groups), "job": self.job, "asked_ms": self.asked_ms}).encode()

    @classmethod
    def parse(cls, value: bytes | None) -> Self | None:
        """Return what a tick says; None if it says something else than the contract has."""
        try:
            said = json.loads((value or b"{}").decode())
            if not isinstance(said, dict):
                return None
            groups, job, asked_ms = said.get("absent_groups", []), said.get("job", ""), said.get("asked_ms", ALL_ASKED)
            # Fails for other things than text, and for half a character (`"\ud800"`), which no column can hold.
            "".join(groups).encode()
        except (ValueError, TypeError, RecursionError):
            return None
        if not isinstance(groups, list) or not isinstance(job, str) or type(asked_ms) is not int or not 0 <= asked_ms <= ALL_ASKED:
            return None
        return cls(tuple(filter(None, groups)), job, asked_ms)

    def asked_of(self, job: str) -> int:
        """Return up to which horizon a job's checks count. The tick of another one says nothing of them."""
        return self.asked_ms if self.job in ("", job) or self.asked_ms == ALL_ASKED else 0
