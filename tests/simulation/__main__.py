"""`python -m tests.simulation` runs simulated histories, and prints the shortest history of each kind of defect."""

import argparse
import sys
from collections import Counter
from time import monotonic

from tests.simulation.known import KNOWN
from tests.simulation.run import describe, run_seed, shortest


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Run simulated histories and judge them.")
    parser.add_argument("--histories", type=int, default=10_000, help="number of histories (default 10000)")
    parser.add_argument("--seed", type=int, default=1, help="the first seed (default 1)")
    parser.add_argument("--all-rules", action="store_true", help="report what is known too (tests/simulation/known.py)")
    options = parser.parse_args()
    started, failing, shown = monotonic(), 0, Counter[str]()
    for seed in range(options.seed, options.seed + options.histories):
        failure = run_seed(seed, () if options.all_rules else tuple(KNOWN))
        if failure is None:
            continue
        failing += 1
        rule = failure.findings[0].rule
        shown[rule] += 1
        if shown[rule] == 1:
            say(describe(shortest(failure)))
    seconds = monotonic() - started
    say(f"{options.histories} histories in {seconds:.1f} s ({60 * options.histories / seconds:.0f} a minute): {failing} with findings")
    for rule, times in shown.most_common():
        say(f"  {rule}: {times}")
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
