"""What a run left behind, as outsiders see it: records, rows, decisions of services, acts of operators.

The checker judges this and nothing else. It has the contract's names alone of the product, so that a run on a real
Kafka and Delta can be told in the same words. `seq` orders everything in the order in which it happened.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

HALF, OP, CHECK = "half", "op", "check"
Headers = tuple[tuple[str, bytes | None], ...]
Place = tuple[str, int]
"""Topic and partition."""


class Fate(StrEnum):
    """How a local transaction ended. NEVER: the service never knows, and answers UNKNOWN."""

    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"
    NEVER = "UNKNOWN"


class KafkaState(StrEnum):
    """What became of the Kafka transaction that a record was sent in; records outside of one are COMMITTED."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    OPEN = "open"


@dataclass(slots=True, eq=False)
class Record:
    """A record of a topic."""

    topic: str
    partition: int
    offset: int
    at_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    seq: int
    state: KafkaState = KafkaState.COMMITTED
    flaw: str | None = None
    """The reason for which R14 refuses it, as whoever made the record knows."""
    is_stray: bool = False
    """No service stands behind it: it was forged, or sent by hand."""
    deleted_seq: int | None = None
    tx: int | None = None

    def header(self, name: str, default: str = "") -> str:
        """Return the text of a header; the default if it is missing."""
        for each, value in reversed(self.headers):
            if each == name:
                return default if value is None else value.decode()
        return default

    @property
    def text_key(self) -> str:
        """Return the key as text."""
        return (self.key or b"").decode(errors="replace")


@dataclass(slots=True, eq=False)
class Row:
    """A row of a table, as a reader sees it. Times are in ms."""

    table: str
    seq: int
    """The same for all rows of one append."""
    values: dict[str, Any]
    writer: str = ""
    """The job that wrote it."""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


class Decision(NamedTuple):
    """What a service's database holds of a transaction."""

    seq: int
    group: str
    transaction_id: str
    incarnation: int
    fate: Fate


class GroupCommit(NamedTuple):
    """A consumer group's committed offset in the check topic."""

    seq: int
    group: str
    partition: int
    offset: int


class Members(NamedTuple):
    """How many members a consumer group has from now on."""

    seq: int
    group: str
    members: int


CLOCK_SET = "clock set"
"""What was done to a broker's clock."""


class Act(NamedTuple):
    """What an operator did, or what became of a job."""

    seq: int
    name: str
    detail: str = ""


class Numbers(NamedTuple):
    """The settings that the rules depend on."""

    timeout_ms: int
    interval_ms: int
    check_max: int
    half_retention_ms: int
    resolved_retention_ms: int
    max_clock_skew_ms: int
    max_body_bytes: int


@dataclass
class History:
    """A run, told from outside."""

    records: list[Record] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    commits: list[GroupCommit] = field(default_factory=list)
    members: list[Members] = field(default_factory=list)
    acts: list[Act] = field(default_factory=list)
    numbers: list[Numbers] = field(default_factory=list)
    """All that were in force at some time."""
    still_pending: set[str] = field(default_factory=set)
    """The ids that the job holds as pending at the end."""
    overdue: set[str] = field(default_factory=set)
    """The ids of groups that stayed away for longer than R8 waits, and that were pending all the same."""
    clocks_jumped: bool = False
    """A broker's clock was set: times in a partition do not only grow."""
    publisher_set_back_ms: int = 0
    """How far the clock of the job's machine was set back at most, at a time."""
    is_at_rest: bool = True
    """Everything was given its time: nothing may be pending."""
