"""`python -m tests.fuzz` sends records of every shape through Kafka and the job, and reconciles each with the tables.

The exit code is 1 if a record is missing, doubled or changed, if it is refused for a reason that does not hold, or if
it is accepted although it breaks the contract.
"""

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table as TextTable

from halfway.conf.loader import load_settings
from halfway.pipelines.local.broker import LocalBroker
from halfway.pipelines.runtime.session import spark_session
from halfway.schemas.outcomes import Count
from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table
from tests.fuzz.extreme_load import expected_of_hot_id, hot_id, settle_unanswered, unanswered
from tests.fuzz.reconciliation import Reconciliation
from tests.fuzz.run import CHECK_MAX, PARTITIONS, SETTINGS, Result, fuzz
from tests.fuzz.signing import Signing
from tests.support.kafka_topics import make_create_time_topics, unique_topics
from tests.support.memory import PeakMemory
from tests.support.signals import end_at_sigterm


def main() -> int:
    text = "Send records of every shape through the job, and reconcile each with the tables."
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=text)
    parser.add_argument("--records", type=int, default=1_000_000, help="number of records (default 1,000,000)")
    parser.add_argument("--seed", type=int, default=7, help="the same seed writes the same records (default 7)")
    parser.add_argument("--signed", action="store_true", help="sign the records, and forge and copy some of them")
    parser.add_argument("--hot", type=int, default=0, metavar="OPS", help="instead, send OPS ops of one id with a half and of one without")
    parser.add_argument("--unanswered", type=int, default=0, metavar="HALVES", help="instead, send HALVES halves without a verdict")
    parser.add_argument("--limit", type=float, default=3_600, metavar="SECONDS", help="time limit of the job (default 3,600)")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz.json"), help="file for the figures (default build/fuzz.json)")
    options = parser.parse_args()
    end_at_sigterm()
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("tests.fuzz").setLevel(logging.INFO)
    console = Console(width=120)
    with _own_world(signed=options.signed) as (settings, signing, broker), PeakMemory(without=broker.pid()) as memory:
        if options.hot:
            facts = _hot_id(settings, options.hot)
        elif options.unanswered:
            facts = _unanswered(settings, options.unanswered)
        else:
            result = fuzz(settings, lambda: spark_session(settings), options.records, options.seed, options.limit, signing)
            facts = _facts_of(result)
            console.print(_table_of(result.account))
    facts["peak_mib"] = memory.peak_mib
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(facts, indent=2) + "\n")
    for name, fact in facts.items():
        console.print(f"{name}: {json.dumps(fact)}", markup=False)
    return 1 if facts["differences"] else 0


@contextmanager
def _own_world(*, signed: bool) -> Iterator[tuple[Settings, Signing | None, LocalBroker]]:
    """Start a broker with CreateTime topics, and delete it with the tables afterwards."""
    with tempfile.TemporaryDirectory(prefix="halfway-fuzz-") as folder:
        broker = LocalBroker(Path(folder) / "broker")
        broker.start()
        try:
            places = {f"storage.{name}": f"{folder}/{name}" for name in ("warehouse", "checkpoint")}
            topics = unique_topics(broker)
            signing = Signing.of(str(topics["kafka.half_topic"]), str(topics["kafka.op_topic"])) if signed else None
            keys = signing.settings() if signing else {}
            settings = load_settings(environ={}, overrides={**topics, **SETTINGS, **places, **keys})
            make_create_time_topics(settings, PARTITIONS)
            yield settings, signing, broker
        finally:
            broker.stop()


def _table_of(account: Reconciliation) -> TextTable:
    """Return the refused records by reason.

    The columns count the records for which the reason is the only one, those for which it is one of several, and the
    rows of `quarantine` that name it.
    """
    table = TextTable("reason", "the only one", "one of several", "found", title="Refused records")
    expected = {*account.refused_for_one, *account.refused_for_several}
    for reason in sorted({*expected, *account.quarantined}):
        counts = (account.refused_for_one, account.refused_for_several, account.quarantined)
        table.add_row(reason, *(f"{count[reason]:,}" for count in counts))
    for_one = sum(account.refused_for_one.values())
    broken = (for_one, account.refused - for_one, sum(account.quarantined[reason] for reason in expected))
    table.add_row("broken records", *(f"{count:,}" for count in broken), style="bold")
    return table


def _facts_of(result: Result) -> dict[str, object]:
    account, run = result.account, result.run
    return {
        "seed": result.seed,
        "records": account.records,
        "accepted": dict(account.accepted),
        "refused": account.refused,
        "control_transactions": len(result.control),
        "expected_alone": dict(account.refused_for_one),
        "expected_among_several": dict(account.refused_for_several),
        "found": dict(account.quarantined),
        "rows": dict(account.rows),
        "counts": dict(run.counts),
        "batches": run.batches,
        "seconds": {"write": round(result.write_s, 1), "job": round(run.seconds, 1), "account": round(result.account_s, 1)},
        "records_per_second": round(account.records / run.seconds),
        "differences": account.differences,
        "examples": account.examples,
    }


def _hot_id(settings: Settings, ops: int) -> dict[str, object]:
    result = hot_id(settings, lambda: spark_session(settings), ops, PARTITIONS)
    expected_counts, expected_rows = expected_of_hot_id(ops)
    differences = (dict(result.counts) != expected_counts) + (dict(result.rows) != expected_rows)
    figures = {"ops": 2 * ops, "seconds": round(result.seconds, 1), "ops_per_second": round(2 * ops / result.seconds)}
    return {**figures, "batches": result.batches, "rows": dict(result.rows), "differences": differences}


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
