"""Orders what was counted since the checkpoint began, for people: reasons stand below what they are the reasons of."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from halfway.schemas.outcomes import COUNTED_QUARANTINE, DISCARD_REASONS, Count, Reason

QUARANTINED = "quarantined"


class Counted(NamedTuple):
    """One line of a table of counts."""

    name: str
    total: int
    is_reason: bool = False
    """True if it is part of the line above."""


def quarantined_in(totals: Mapping[str, int]) -> int:
    """Return how many records were quarantined, for whatever reason."""
    return sum(totals.get(name, 0) for name in COUNTED_QUARANTINE.values())


def counted(totals: Mapping[str, int]) -> Iterator[Counted]:
    """Yield each count that is not 0, without the parts of histograms.

    Args:
        totals: by `Count` or the name of a reason, as in `BucketReport`.
    """

    def reasons(counted_as: Mapping[Reason, str]) -> Iterator[Counted]:
        yield from (Counted(reason, totals[name], is_reason=True) for reason, name in counted_as.items() if totals.get(name))

    for count in Count:
        # It is the reason `half_lost` of a quarantine.
        if totals.get(count) and count is not Count.LOST:
            yield Counted(count, totals[count])
        if count is Count.DISCARDED:
            yield from reasons({reason: str(reason) for reason in DISCARD_REASONS})
    quarantined = quarantined_in(totals)
    if quarantined:
        yield Counted(QUARANTINED, quarantined)
        yield from reasons(COUNTED_QUARANTINE)
