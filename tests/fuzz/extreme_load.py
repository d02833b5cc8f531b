"""Too much of one thing: ops of one id, and halves that nobody answers for. What must come out, in what time and memory."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from halfway.schemas.outcomes import Count, Reason
from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table
from tests.chaos.drive import resolve, write
from tests.fuzz.generator import BASE_MS, HOUR_MS, Generator, Made

HOT, ALONE = "hot", "alone"
_ACTIONS = (b"COMMIT", b"ROLLBACK", b"UNKNOWN", b"COMMIT")


@dataclass(frozen=True, slots=True)
class Crowd:
    """What came of it. `counts` are the job's; `rows` those of the tables, of `quarantine` by reason."""

    counts: Counter[str]
    rows: Counter[str]
    seconds: float
    batches: int


def hot_id(settings: Settings, session: Callable[[], SparkSession], ops: int, partitions: int) -> Crowd:
    """Send so many ops of one id that has a half, and as many of one that has none: the first wins (R2), the others are orphans (R10)."""
    half = Made(True, HOT.encode(), b"body", [("REAL_TOPIC", b"orders"), ("PGROUP", b"g")], BASE_MS)
    write(settings, [half, *_ops(HOT, ops)])
    write(settings, _ops(ALONE, ops))
    return _resolved(settings, session, partitions, [BASE_MS, BASE_MS + ops + HOUR_MS])


def _ops(key: str, count: int) -> Iterator[Made]:
    for number in range(count):
        action = _ACTIONS[number % len(_ACTIONS)]
        yield Made(False, key.encode(), None, [("ACTION", action), ("PGROUP", b"g")], BASE_MS + number)


def expected_of_hot(ops: int) -> tuple[dict[str, int], dict[str, int]]:
    """What `hot_id` must count, and the rows that it must make."""
    said = Counter(_ACTIONS[number % len(_ACTIONS)] for number in range(ops))
    conflicts, unknown = said[b"ROLLBACK"], said[b"UNKNOWN"]
    counts = {
        Count.HALVES: 1,
        Count.OPS: 2 * ops,
        Count.COMMITTED: 1,
        Count.DUPLICATE_OP: said[b"COMMIT"] - 1,
        Count.UNKNOWN: 2 * unknown,
        Reason.CONFLICTING_VERDICT: conflicts,
        Reason.ORPHAN_OP: ops - unknown,
    }
    rows = {Table.MESSAGES: 1, Reason.CONFLICTING_VERDICT: conflicts, Reason.ORPHAN_OP: ops - unknown}
    return {str(name): count for name, count in counts.items()}, {str(name): count for name, count in rows.items()}


def unanswered(settings: Settings, session: Callable[[], SparkSession], halves: int, partitions: int) -> tuple[Crowd, float]:
    """Send so many halves and no verdict; return what came of it, and the bytes of state that one takes while it is pending."""
    headers: list[tuple[str, bytes | None]] = [("REAL_TOPIC", b"orders"), ("PGROUP", b"g")]
    write(settings, (Made(True, f"silent-{number:012}".encode(), b"b" * 200, headers, BASE_MS + number // 100) for number in range(halves)))
    crowd = _resolved(settings, session, partitions, [BASE_MS])
    return crowd, state_bytes(session(), settings) / halves


def state_bytes(spark: SparkSession, settings: Settings) -> int:
    """Bytes of all buckets' payloads in the state store."""
    [row] = spark.read.format("statestore").load(settings.storage.checkpoint).select(F.sum(F.length("value.groupState.payload"))).collect()
    return int(row[0])


def settle_unanswered(settings: Settings, session: Callable[[], SparkSession], checks: int, partitions: int) -> Crowd:
    """Let the time come for every check and the discard."""
    return _resolved(settings, session, partitions, [BASE_MS + (number + 1) * HOUR_MS for number in range(checks + 1)])


def _resolved(settings: Settings, session: Callable[[], SparkSession], partitions: int, rounds_ms: list[int]) -> Crowd:
    ticks = Generator(0, partitions, 0).ticks
    run = resolve(settings, session, rounds_ms, ticks, limit_s=3_600)
    return Crowd(run.counts, _rows(Path(settings.storage.warehouse)), run.seconds, run.batches)


def _rows(warehouse: Path) -> Counter[str]:
    rows: Counter[str] = Counter()
    for table in (Table.MESSAGES, Table.DISCARDED):
        rows[str(table)] = _query(warehouse, table, "SELECT count(*) AS n FROM rows")[0]["n"]
    for row in _query(warehouse, Table.QUARANTINE, "SELECT reason, count(*) AS n FROM rows GROUP BY reason"):
        rows[row["reason"]] = row["n"]
    return +rows


def _query(warehouse: Path, table: Table, query: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pyarrow.table(
        QueryBuilder().register("rows", DeltaTable(str(warehouse / table))).execute(query)
    ).to_pylist()
    return found
