"""`python -m tests.simulation` runs simulated histories, and prints the shortest history of each kind of defect."""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from time import monotonic

from tests.simulation.checker import judge
from tests.simulation.run import describe, run_seeds, shortest
from tests.simulation.saved import load
from tests.support.signals import end_at_sigterm


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Run simulated histories and judge them.")
    parser.add_argument("--histories", type=int, default=10_000, help="number of histories (default 10000)")
    parser.add_argument("--seed", type=int, default=1, help="the first seed (default 1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="number of processes (default: one for each core)")
    parser.add_argument("--real", type=int, default=0, metavar="N", help="instead, run N histories on a real Kafka, Spark and Delta too")
    parser.add_argument("--judge", type=Path, metavar="FILE", help="instead, judge a saved history, such as one of `make chaos`")
    options = parser.parse_args()
    end_at_sigterm()
    if options.judge:
        return judge_again(options.judge)
    return compare(options.seed, options.real) if options.real else simulate(options.seed, options.histories, options.jobs)


def simulate(first_seed: int, histories: int, jobs: int) -> int:
    started, failing, shown = monotonic(), 0, Counter[str]()
    for failure in run_seeds(range(first_seed, first_seed + histories), jobs):
        failing += 1
        rule = failure.findings[0].rule
        shown[rule] += 1
        if shown[rule] == 1:
            say(describe(shortest(failure)))
    seconds = monotonic() - started
    per_minute = 60 * histories / seconds
    say(f"{histories} histories in {seconds:.1f} s ({per_minute:.0f} a minute, {jobs} processes): {failing} with findings")
    for rule, times in shown.most_common():
        say(f"  {rule}: {times}")
    return 1 if failing else 0


def judge_again(path: Path) -> int:
    """Judge a saved history, and print what the rules forbid."""
    history = load(path)
    found = judge(history)
    say("\n".join([f"{len(history.records)} records, {len(history.rows)} rows: {len(found)} findings", *map(str, found)]))
    return 1 if found else 0


def compare(first_seed: int, histories: int) -> int:
    """Run histories on a real Kafka, Spark and Delta, and say what is not as it was simulated."""
    # Spark takes seconds to import.
    from tests.simulation.real import on_this_machine

    started, different = monotonic(), 0
    for taped, found in on_this_machine(first_seed, histories):
        say("\n  ".join([f"seed {taped.seed}: {taped}: {len(found)} differences", *found]))
        different += bool(found)
    say(f"{histories} histories on a real Kafka, Spark and Delta in {monotonic() - started:.0f} s: {different} with differences")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
