"""`python -m tests.fuzz.fuzz`: records of every shape through a real Kafka and the real job, and an account of every one of them.

Exit code 1 if one is missing, doubled, refused for a reason that does not hold, accepted though it breaks the contract, or changed.
"""

import argparse
import json
import logging
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession
from rich.console import Console
from rich.table import Table as TextTable

from halfway.conf.loader import load_settings
from halfway.pipelines.local.broker import LocalBroker
from halfway.pipelines.runtime.session import spark_session
from halfway.schemas.outcomes import Count
from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table
from tests.chaos.accountant import Books, keep_books
from tests.chaos.drive import Run, resolve, write
from tests.chaos.footprint import Footprint
from tests.conftest import make_create_time_topics, unique_topics
from tests.fuzz.crowds import expected_of_hot, hot_id, settle_unanswered, unanswered
from tests.fuzz.generator import BASE_MS, FAR_MS, HOUR_MS, Control, Generator, Made

PARTITIONS = 4
CHECK_MAX = 2
_DAY_MS = 24 * HOUR_MS
_ROUNDS_MS = (
    # Two checks of all that control left open, then its discard; then the same for what says that it is from the far future.
    *(BASE_MS + 2 * HOUR_MS + n * 600_000 for n in range(CHECK_MAX + 1)),
    *(FAR_MS + 1_000 * 365 * _DAY_MS // 10 + n * _DAY_MS for n in range(CHECK_MAX + 2)),
)
SETTINGS: dict[str, object] = {
    "kafka.max_offsets_per_trigger": 200_000,
    "resolution.max_body_bytes": 2_000,
    "resolution.transactionCheckMax": CHECK_MAX,
    "resolution.tick_interval": 0,
    "trigger.interval": 0,
}


def with_ticks(generator: Generator, count: int) -> Iterator[Made]:
    """Records, and among them ten rounds of ticks before the time of any control transaction: of the others some fall due."""
    due = max(1, count // 10)
    for number, made in enumerate(generator.records(count)):
        if number % due == 0:
            yield from generator.ticks(BASE_MS - HOUR_MS // 2 + number // due * 60_000)
        yield made


@dataclass
class Result:
    """One run of the fuzzer."""

    seed: int
    written: int
    write_s: float
    run: Run
    books: Books
    account_s: float
    control: Mapping[str, Control]


def fuzz(settings: Settings, session: Callable[[], SparkSession], records: int, seed: int, limit_s: float) -> Result:
    """Write so many records, let the job resolve them, and go over the books.

    Args:
        settings: with topics of PARTITIONS partitions and CreateTime, an empty warehouse, and SETTINGS.
        session: makes the Spark session.
        records: how many; some more go with them, ticks and what is left to say of control transactions.
        seed: the same one writes the same records.
        limit_s: for the job.
    """
    generator = Generator(seed, PARTITIONS, settings.resolution.max_body_bytes)
    began_s = time.monotonic()
    written = write(settings, with_ticks(generator, records))
    write_s = time.monotonic() - began_s
    run = resolve(settings, session, _ROUNDS_MS, generator.ticks, limit_s)
    began_s = time.monotonic()
    books = keep_books(settings, run.counts, generator.control, CHECK_MAX)
    books.expect("records in the topics", books.records, written + len(_ROUNDS_MS) * 2 * PARTITIONS)
    books.expect("transactions pending at the end", sum(run.pending.values()), 0)
    books.expect("entries of state at the end", sum(run.remembered.values()), 0)
    return Result(seed, written, write_s, run, books, time.monotonic() - began_s, generator.control)


def table_of(books: Books) -> TextTable:
    """By reason: for how many records it is the only one that holds, for how many one of several, and how many rows name it."""
    table = TextTable("reason", "the only one", "one of several", "found", title="Refused records")
    for reason in sorted({*books.only, *books.among, *books.found}):
        table.add_row(reason, *(f"{counts[reason]:,}" for counts in (books.only, books.among, books.found)))
    broken = sum(books.found[reason] for reason in {*books.only, *books.among})
    table.add_row(
        "broken records", f"{sum(books.only.values()):,}", f"{books.refused - sum(books.only.values()):,}", f"{broken:,}", style="bold"
    )
    return table


def facts_of(result: Result) -> dict[str, object]:
    books, run = result.books, result.run
    return {
        "seed": result.seed,
        "records": books.records,
        "accepted": dict(books.sorts),
        "refused": books.refused,
        "control_transactions": len(result.control),
        "expected_alone": dict(books.only),
        "expected_among_several": dict(books.among),
        "found": dict(books.found),
        "rows": dict(books.rows),
        "counts": dict(run.counts),
        "batches": run.batches,
        "seconds": {"write": round(result.write_s, 1), "job": round(run.seconds, 1), "account": round(result.account_s, 1)},
        "records_per_second": round(books.records / run.seconds),
        "differences": books.differences,
        "examples": books.examples,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.fuzz", description="Records of every shape, and an account of each.")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=7, help="writes the same records again")
    parser.add_argument("--hot", type=int, default=0, help="instead: so many ops of one id that has a half, and of one that has none")
    parser.add_argument("--unanswered", type=int, default=0, help="instead: so many halves without a verdict")
    parser.add_argument("--limit", type=float, default=3_600, help="seconds that the job may take")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz.json"))
    options = parser.parse_args()
    # Told to end, it ends its broker too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("tests.chaos").setLevel(logging.INFO)
    console = Console(width=120)
    with own_world() as (settings, broker), Footprint(without=broker.pid()) as footprint:
        if options.hot:
            facts = _hot(settings, options.hot)
        elif options.unanswered:
            facts = _unanswered(settings, options.unanswered)
        else:
            result = fuzz(settings, lambda: spark_session(settings), options.records, options.seed, options.limit)
            facts = facts_of(result)
            console.print(table_of(result.books))
    facts["peak_mib"] = footprint.peak_mib
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(facts, indent=2) + "\n")
    for name, fact in facts.items():
        console.print(f"{name}: {fact}", markup=False)
    return 1 if facts["differences"] else 0


@contextmanager
def own_world() -> Iterator[tuple[Settings, LocalBroker]]:
    """A broker, CreateTime topics, a warehouse and a checkpoint that are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="halfway-fuzz-") as folder:
        broker = LocalBroker(Path(folder) / "broker")
        broker.start()
        try:
            places = {f"storage.{name}": f"{folder}/{name}" for name in ("warehouse", "checkpoint")}
            settings = load_settings(environ={}, overrides={**unique_topics(broker), **SETTINGS, **places})
            make_create_time_topics(settings, PARTITIONS)
            yield settings, broker
        finally:
            broker.stop()


def _hot(settings: Settings, ops: int) -> dict[str, object]:
    crowd = hot_id(settings, lambda: spark_session(settings), ops, PARTITIONS)
    expected_counts, expected_rows = expected_of_hot(ops)
    differences = (dict(crowd.counts) != expected_counts) + (dict(crowd.rows) != expected_rows)
    figures = {"ops": 2 * ops, "seconds": round(crowd.seconds, 1), "ops_per_second": round(2 * ops / crowd.seconds)}
    return {**figures, "batches": crowd.batches, "rows": dict(crowd.rows), "differences": differences}


def _unanswered(settings: Settings, halves: int) -> dict[str, object]:
    pending, state_bytes = unanswered(settings, lambda: spark_session(settings), halves, PARTITIONS)
    settled = settle_unanswered(settings, lambda: spark_session(settings), CHECK_MAX, PARTITIONS)
    differences = (pending.counts[Count.HALVES] != halves) + (settled.rows[Table.DISCARDED] != halves)
    differences += settled.counts[Count.CHECKED] != halves * CHECK_MAX
    seconds = {"read": round(pending.seconds, 1), "check_and_discard": round(settled.seconds, 1)}
    figures = {"halves": halves, "seconds": seconds, "state_bytes_each": round(state_bytes, 1)}
    return {**figures, "differences": differences}


if __name__ == "__main__":
    sys.exit(main())
