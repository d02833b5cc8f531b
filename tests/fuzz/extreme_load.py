"""Extreme loads: very many ops of one id, and very many halves without a verdict."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from halfway.schemas.outcomes import Count, Reason
from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table
from tests.fuzz.generator import BASE_MS, HOUR_MS, Generator, NewRecord
from tests.fuzz.job_driver import resolve, write
from tests.support.delta_rows import delta_rows

HOT, WITHOUT_HALF = "hot", "without-half"
_ACTIONS = (b"COMMIT", b"ROLLBACK", b"UNKNOWN", b"COMMIT")


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The outcome of a load."""

    counts: Counter[str]
    """What the job counted."""
    rows: Counter[str]
    """Rows of `messages` and `discarded` by table, and of `quarantine` by reason."""
    seconds: float
    batches: int


def hot_id(settings: Settings, session: Callable[[], SparkSession], ops: int, partitions: int) -> LoadResult:
    """Send `ops` ops of an id with a half, and as many of an id without.

    Of the first id the first verdict wins (R2). The verdicts of the second id are orphans (R10).
    """
    half = NewRecord(True, HOT.encode(), b"body", [("REAL_TOPIC", b"orders"), ("PGROUP", b"g")], BASE_MS)
    write(settings, [half, *_ops(HOT, ops)])
    write(settings, _ops(WITHOUT_HALF, ops))
    return _resolved(settings, session, partitions, [BASE_MS, BASE_MS + ops + HOUR_MS])


def _ops(key: str, count: int) -> Iterator[NewRecord]:
    for number in range(count):
        action = _ACTIONS[number % len(_ACTIONS)]
        yield NewRecord(False, key.encode(), None, [("ACTION", action), ("PGROUP", b"g")], BASE_MS + number)


def expected_of_hot_id(ops: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return what the job must count for `hot_id`, and the rows that it must write."""
    actions = Counter(_ACTIONS[number % len(_ACTIONS)] for number in range(ops))
    conflicts, unknown = actions[b"ROLLBACK"], actions[b"UNKNOWN"]
    counts = {
        Count.HALVES: 1,
        Count.OPS: 2 * ops,
        Count.COMMITTED: 1,
        Count.DUPLICATE_OP: actions[b"COMMIT"] - 1,
        Count.UNKNOWN: 2 * unknown,
        Reason.CONFLICTING_VERDICT: conflicts,
        Reason.ORPHAN_OP: ops - unknown,
    }
    rows = {Table.MESSAGES: 1, Reason.CONFLICTING_VERDICT: conflicts, Reason.ORPHAN_OP: ops - unknown}
    return {str(name): count for name, count in counts.items()}, {str(name): count for name, count in rows.items()}


def unanswered(settings: Settings, session: Callable[[], SparkSession], halves: int, partitions: int) -> tuple[LoadResult, float]:
    """Send halves without a verdict. Return the outcome, and the bytes of state of one pending transaction."""
    headers: list[tuple[str, bytes | None]] = [("REAL_TOPIC", b"orders"), ("PGROUP", b"g")]
    write(
        settings,
        (NewRecord(True, f"silent-{number:012}".encode(), b"b" * 200, headers, BASE_MS + number // 100) for number in range(halves)),
    )
    result = _resolved(settings, session, partitions, [BASE_MS])
    return result, state_bytes(session(), settings) / halves


def state_bytes(spark: SparkSession, settings: Settings) -> int:
    """Return the size of all buckets' payloads in the state store."""
    [row] = spark.read.format("statestore").load(settings.storage.checkpoint).select(F.sum(F.length("value.groupState.payload"))).collect()
    return int(row[0])


def settle_unanswered(settings: Settings, session: Callable[[], SparkSession], checks: int, partitions: int) -> LoadResult:
    """Move the horizon, so that every check and the discard fall due."""
    return _resolved(settings, session, partitions, [BASE_MS + (number + 1) * HOUR_MS for number in range(checks + 1)])


def _resolved(settings: Settings, session: Callable[[], SparkSession], partitions: int, rounds_ms: list[int]) -> LoadResult:
    ticks = Generator(0, partitions, 0).ticks
    run = resolve(settings, session, rounds_ms, ticks, limit_s=3_600)
    return LoadResult(run.counts, _rows(Path(settings.storage.warehouse)), run.seconds, run.batches)


def _rows(warehouse: Path) -> Counter[str]:
    rows: Counter[str] = Counter()
    for table in (Table.MESSAGES, Table.DISCARDED):
        rows[str(table)] = delta_rows(warehouse / table, "SELECT count(*) AS n FROM rows")[0]["n"]
    for row in delta_rows(warehouse / Table.QUARANTINE, "SELECT reason, count(*) AS n FROM rows GROUP BY reason"):
        rows[row["reason"]] = row["n"]
    return +rows
