"""Draws what pending transactions cost: `python -m benchmarks.picture [build/bench.json [docs/pending.svg]]`."""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure


def draw(pending: dict[str, dict[str, float]], out: Path) -> None:
    """Draw batch time and backlog rate against the number of pending transactions."""
    counts = sorted(pending, key=int)
    # A logarithmic axis has no 0. Its point stands a decade before the first other one.
    places = [max(int(count), 1_000) for count in counts]
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    times, rates = figure.subplots(1, 2)
    for name, label in (("idle_batch_s", "idle"), ("busy_batch_s", "500 transactions/s")):
        times.plot(places, [pending[count][name] for count in counts], marker="o", label=label)
    times.set_ylabel("seconds a batch (median)")
    times.legend()
    rates.plot(places, [pending[count]["backlog_tx_per_s"] for count in counts], marker="o")
    rates.set_ylabel("transactions/s of a backlog")
    for axes in (times, rates):
        axes.set_xscale("log")
        axes.set_xticks(places, [f"{int(count):,}" for count in counts])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("pending")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    """Draw the figures of the last run of `pending`."""
    arguments = sys.argv[1:] + ["build/bench.json", "docs/pending.svg"][len(sys.argv) - 1 :]
    source, out = map(Path, arguments)
    draw(json.loads(source.read_text())["pending"], out)


if __name__ == "__main__":
    main()
