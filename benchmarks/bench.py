"""Runs the benchmarks of `make bench`, prints a table and writes `build/bench.json` (docs/performance.md)."""

import argparse
import json
import os
import platform
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TypeGuard

from rich.console import Console
from rich.table import Table as TextTable

from benchmarks.backlog import bodies, drain, groups, skew
from benchmarks.client import client
from benchmarks.curves import CURVE_PARTS
from benchmarks.limits import limits
from benchmarks.live import checkback, latency, pending
from benchmarks.reading import reader
from benchmarks.relaying import relay
from benchmarks.rig import Figures, Rig, in_own_process, run_to_end
from benchmarks.scale import scale, stages
from benchmarks.steady import steady, steady_java
from tests.support.signals import end_at_sigterm

BENCHMARKS: dict[str, Callable[[Rig], Figures]] = {
    "drain": drain,
    "limits": limits,
    "pending": pending,
    "latency": latency,
    "checkback": checkback,
    "steady": steady,
    "steady_java": steady_java,
    "client": client,
    "bodies": bodies,
    "groups": groups,
    "skew": skew,
    "scale": scale,
    "relay": relay,
    "reader": reader,
}
PARTS: dict[str, Callable[[Rig], Figures]] = {"stages": stages, **CURVE_PARTS}
"""The parts that a benchmark runs in further processes."""
_PACKAGES = ("pyspark", "delta-spark", "confluent-kafka", "pyarrow")
_PEER_RATE = re.compile(r"tx +A?SYNC_FLUSH +\d+ threads: .* end to end (\d+)/s")
_PEER_CHECKBACK = re.compile(r"distinct resolved of .* = (\d+)/s")


def peer(script: Path) -> Figures:
    """Run RocketMQ's benchmark `run.sh` on this machine, and return its best rates.

    Raises:
        RuntimeError: it printed no rates.
    """
    with tempfile.TemporaryDirectory() as work:
        printed = run_to_end([str(script.resolve()), "bench", "pending"], {"WORK": work}, captured=True)
    rates, checkbacks = (pattern.findall(printed) for pattern in (_PEER_RATE, _PEER_CHECKBACK))
    if not rates or not checkbacks:
        raise RuntimeError(f"{script} printed no rates: {printed[-2000:]}")
    return {"tx_per_s": max(map(int, rates)), "checkback_per_s": max(map(int, checkbacks))}


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def merged(runs: list[Figures]) -> Figures:
    """Return the median of each figure over several runs."""
    figures: Figures = {}
    for name, value in runs[0].items():
        values = [run[name] for run in runs]
        if isinstance(value, dict):
            figures[name] = merged(values)
        elif _is_number(value):
            figures[name] = statistics.median(values)
        else:
            figures[name] = value if len(runs) == 1 else values
    return figures


def flat(figures: Figures, before: str = "") -> Iterator[tuple[str, object]]:
    """Yield each figure with its path, such as `drain.tx_per_s`."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def spread(runs: list[Figures]) -> dict[str, list[float]]:
    """Return the smallest and the largest value of each figure over several runs."""
    found: dict[str, list[float]] = {}
    for run in runs:
        for name, value in flat(run):
            if _is_number(value):
                found.setdefault(name, []).append(value)
    return {name: [min(values), max(values)] for name, values in found.items()}


def ratios(results: Figures) -> Figures:
    """Return the most important figures as ratios to each other."""
    known = dict(flat(results))
    pairs = {
        "drain_to_peer": ("drain.tx_per_s", "peer.tx_per_s"),
        "steady_to_peer": ("steady.tx_per_s", "peer.tx_per_s"),
        "steady_java_to_peer": ("steady_java.tx_per_s", "peer.tx_per_s"),
        "checkback_to_peer": ("checkback.tx_per_s", "peer.checkback_per_s"),
        "limits_to_drain": ("limits.tx_per_s", "drain.tx_per_s"),
    }
    found = ((name, known.get(over), known.get(under)) for name, (over, under) in pairs.items())
    return {name: round(over / under, 2) for name, over, under in found if _is_number(over) and _is_number(under)}


def wrong(runs: dict[str, list[Figures]]) -> list[str]:
    """Return the paths of the figures `right` that are False in any run, such as `relay.backlog.right`."""
    figures = (figure for name, found in runs.items() for run in found for figure in flat(run, f"{name}."))
    return sorted({name for name, value in figures if name.endswith(".right") and value is False})


def main() -> int:
    """Run the chosen benchmarks, each on its own topics and tables. Return 1 if the outcome of one is wrong."""
    text = "Run benchmarks, print a table of their figures and write them to a file."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=text)
    parser.add_argument("--only", default="", help=f"comma-separated names of {', '.join(BENCHMARKS)} (default all)")
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the usual amounts (default 1)")
    parser.add_argument("--runs", type=int, default=3, help="how often each benchmark runs; the table shows medians (default 3)")
    parser.add_argument("--peer", type=Path, metavar="SCRIPT", help="also run RocketMQ's benchmark with this run.sh, in turn with ours")
    parser.add_argument("--out", type=Path, default=Path("build/bench.json"), help="file for the figures (default build/bench.json)")
    options = parser.parse_args()
    end_at_sigterm()
    names = [name for name in options.only.split(",") if name] or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; choose from {', '.join(BENCHMARKS)}")
    if options.peer is not None and not options.peer.is_file():
        parser.error(f"{options.peer} is not a file")
    if options.runs < 1:
        parser.error("--runs must be at least 1")
    runs: dict[str, list[Figures]] = {}
    for number in range(options.runs):
        for name in ["peer", *names] if options.peer is not None else names:
            say(f"run {number + 1} of {options.runs}: {name}")
            found = peer(options.peer) if name == "peer" else in_own_process(name, options.scale)
            runs.setdefault(name, []).append(found)
            # The file is written after each benchmark, because a later one may fail after hours.
            facts = report_of(runs, options.scale)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(facts, indent=2) + "\n")
    Console().print(_table_of(facts))
    failed = wrong(runs)
    for name in failed:
        say(f"failed: {name} is False: the table or the topic does not hold exactly what it should")
    return 1 if failed else 0


def report_of(runs: dict[str, list[Figures]], fraction: float) -> Figures:
    """Return the content of `build/bench.json`: medians, ratios, spread, machine and versions."""
    results: Figures = {name: merged(found) for name, found in runs.items()}
    for steady_name, name in (("steady", "latency_half_load_ms"), ("steady_java", "latency_half_load_java_ms")):
        half_load = results.get(steady_name, {}).get("latency_ms", {}).get("50%")
        if half_load:
            results[name] = {quantile: half_load[quantile] for quantile in ("p50", "p99")}
    complete = min(map(len, runs.values()))
    return {
        "machine": {"cores": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()},
        "versions": {name: metadata.version(name) for name in _PACKAGES},
        "runs": complete,
        "fraction": fraction,
        **results,
        "ratios": ratios(results),
        "spread": spread([{name: found[number] for name, found in runs.items()} for number in range(complete)]),
    }


def say(line: str) -> None:
    """Print a line to stderr at once."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201  # a command's output


def _table_of(facts: Figures) -> TextTable:
    shown = TextTable("benchmark", "figure", "median", "smallest", "largest")
    for name in (*BENCHMARKS, "peer"):
        for figure, value in flat(facts.get(name, {})):
            low, high = facts["spread"].get(f"{name}.{figure}", ("", ""))
            shown.add_row(name, figure, str(value), str(low), str(high))
    for name, value in facts["ratios"].items():
        shown.add_row("ratio", name, str(value), "", "")
    return shown


if __name__ == "__main__":
    raise SystemExit(main())
