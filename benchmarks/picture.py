"""Draws a curve again from its figures: `python -m benchmarks.picture build/curves/NAME.json NAME.svg`."""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

Point = Mapping[str, Any]


class Panel(NamedTuple):
    """One of the pictures side by side: each line is a path into a point, with its label."""

    title: str
    axis: str
    lines: dict[tuple[str, ...], str]


_PANELS = (
    Panel("Batch time", "seconds, median", {("idle_batch_s",): "idle", ("busy_batch_s",): "500 transactions/s"}),
    Panel("Latency at 500 transactions/s", "seconds from half to readable", {("latency_ms", "p50"): "p50", ("latency_ms", "p99"): "p99"}),
    Panel("Backlog", "transactions/s", {("backlog_tx_per_s",): "after a restart"}),
)


def draw(unit: str, points: Mapping[str, Point], out: Path) -> None:
    """Draw batch time, latency and the rate of a backlog against the number of `unit`."""
    counts = sorted(map(int, points))
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    figure.suptitle(f"Batches, latency and backlog against the number of {unit}")
    for axes, panel in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        for path, label in panel.lines.items():
            _line(axes, counts, [_value(points[str(count)], path) for count in counts], label)
        axes.set_title(panel.title, fontsize="medium")
        axes.set_ylabel(panel.axis)
        axes.axhline(0, alpha=0)  # leaves room above the highest point when the axis starts at 0
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.10g}")
        axes.set_xscale("log")
        axes.set_xticks([_place(count, counts) for count in counts], [f"{count:,}" for count in counts], rotation=20, ha="right")
        axes.minorticks_off()
        axes.set_xlabel(unit)
        axes.grid(alpha=0.3)
        axes.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


def _line(axes: Any, counts: list[int], values: list[float], label: str) -> None:
    """Draw a line through neighbouring points that have a value.

    No line reaches the point at 0, because a logarithmic axis has no 0.
    """
    places: list[float] = []
    shown: list[float] = []
    for count, value in zip(counts, values, strict=True):
        places.append(_place(count, counts))
        shown.append(value)
        if count == 0:
            places.append(math.nan)
            shown.append(math.nan)
    axes.plot(places, shown, marker="o", label=label)


def _place(count: int, counts: list[int]) -> float:
    """Return where a count stands: 0 a decade before the next one."""
    return count or min((other for other in counts if other), default=10) / 10


def _value(point: Point, path: tuple[str, ...]) -> float:
    """Return a figure, in seconds if it is in ms; NaN if it is missing, which interrupts the line."""
    value: Any = point
    for name in path:
        value = None if value is None else value.get(name)
    if value is None:
        return math.nan
    return value / 1000 if path[0].endswith("_ms") else float(value)


def main() -> None:
    """Draw the curve of a file."""
    source, out = map(Path, sys.argv[1:])
    facts = json.loads(source.read_text())
    draw(facts["unit"], facts["points"], out)


if __name__ == "__main__":
    main()
