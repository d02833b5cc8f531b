"""What one batch of the job did: the source of the progress line, the metrics and the status file."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from halfway.schemas.outcomes import Count, Kind
from halfway.schemas.reports import BucketReport, common_horizon_ms


@dataclass(slots=True)
class BatchReport:
    """What one batch did."""

    batch_id: int
    seconds: float = 0.0
    rows: Counter[Kind] = field(default_factory=Counter)
    """Outcomes written, by kind."""
    buckets: Mapping[int, BucketReport] = field(default_factory=dict)
    """The reports of the buckets that had input in this batch."""
    known: Mapping[int, BucketReport] = field(default_factory=dict)
    """The last report of every bucket that had input since the start of the job."""
    unread: dict[str, int] | None = None
    """The backlog that the batch left: by topic, the records that Kafka had when the batch was planned and that are
    above its limit; None if they are not known."""

    @property
    def counts(self) -> Counter[str]:
        """Return what the batch counted: by `Count`, or by the reason of a quarantine."""
        return summed(bucket.counts for bucket in self.buckets.values())

    @property
    def horizon_ms(self) -> int | None:
        """Return the horizon over the buckets that had input; None while it is undefined."""
        return common_horizon_ms(bucket.horizon_ms for bucket in self.buckets.values())

    @property
    def read_digest(self) -> int:
        """Return the digest of what was read, which is the same in all buckets."""
        return max((bucket.read_digest for bucket in self.buckets.values()), default=0)

    @property
    def any_due(self) -> bool:
        """Return True if a check was sent or put off."""
        return bool(self.rows[Kind.CHECK] or self.counts[Count.PUT_OFF])

    @property
    def pending(self) -> int:
        """Return how many transactions are pending in the buckets known so far."""
        return sum(bucket.pending for bucket in self.known.values())


def summed(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Return the sum of several buckets' counts, with those that are 0."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total
