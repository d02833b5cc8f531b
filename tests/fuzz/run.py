"""One run of the fuzzer: writes records, runs the job over them, and reconciles each record with the tables."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pyspark.sql import SparkSession

from halfway.schemas.settings import Settings
from tests.fuzz.generator import BASE_MS, FAR_MS, HOUR_MS, Control, Generator, NewRecord
from tests.fuzz.job_driver import JobRun, resolve, write
from tests.fuzz.reconciliation import Reconciliation, reconcile
from tests.fuzz.signing import Forger, Signing

PARTITIONS = 4
CHECK_MAX = 2
_DAY_MS = 24 * HOUR_MS
_ROUNDS_MS = (
    # Two checks of all open control transactions, and then their discard.
    *(BASE_MS + 2 * HOUR_MS + n * 600_000 for n in range(CHECK_MAX + 1)),
    # The same for the records with a time in the far future.
    *(FAR_MS + 1_000 * 365 * _DAY_MS // 10 + n * _DAY_MS for n in range(CHECK_MAX + 2)),
)
SETTINGS: dict[str, object] = {
    "kafka.max_offsets_per_trigger": 200_000,
    "resolution.max_body_bytes": 2_000,
    "resolution.transactionCheckMax": CHECK_MAX,
    "resolution.tick_interval": 0,
    "trigger.interval": 0,
}


@dataclass
class Result:
    """The outcome of one run."""

    seed: int
    written: int
    write_s: float
    run: JobRun
    account: Reconciliation
    account_s: float
    control: Mapping[str, Control]


def fuzz(
    settings: Settings, session: Callable[[], SparkSession], records: int, seed: int, limit_s: float, signing: Signing | None = None
) -> Result:
    """Write records, let the job resolve them, and reconcile them with the tables.

    Args:
        settings: SETTINGS with CreateTime topics of PARTITIONS partitions and an empty warehouse.
        session: returns the Spark session.
        records: the number of records, without ticks and the last records of control transactions.
        seed: the same seed writes the same records.
        limit_s: the time limit of the job.
        signing: the keys of `settings`, to sign and forge records; None for records without signatures.
    """
    generator = Generator(seed, PARTITIONS, settings.resolution.max_body_bytes)
    source = generator if signing is None else Forger(generator, signing, seed)
    began_s = time.monotonic()
    written = write(settings, _with_ticks(source, records))
    write_s = time.monotonic() - began_s
    run = resolve(settings, session, _ROUNDS_MS, source.ticks, limit_s)
    began_s = time.monotonic()
    account = reconcile(settings, run.counts, generator.control, CHECK_MAX, signing)
    account.expect("records in the topics", account.records, written + len(_ROUNDS_MS) * 2 * PARTITIONS)
    account.expect("transactions pending at the end", sum(run.pending.values()), 0)
    account.expect("entries of state at the end", sum(run.remembered.values()), 0)
    return Result(seed, written, write_s, run, account, time.monotonic() - began_s, generator.control)


def _with_ticks(source: Generator | Forger, count: int) -> Iterator[NewRecord]:
    """Yield records with ten rounds of ticks in between.

    The ticks are older than any control transaction. Other records fall due at them.
    """
    due = max(1, count // 10)
    for number, record in enumerate(source.records(count)):
        if number % due == 0 and number < count:
            yield from source.ticks(BASE_MS - HOUR_MS // 2 + number // due * 60_000)
        yield record
