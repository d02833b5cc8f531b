"""Draws throughput and latency beside RocketMQ's, from the table of docs/performance.md."""

import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

PAGE = "docs/performance.md"
_HEADING = "## Beside RocketMQ"
_COLOURS = ("#E69F00", "#0072B2")
_NUMBER = re.compile(r"[\d,.]+")
_ROUND_MS = (1, 10, 100, 1_000, 10_000)


def table(page: str) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Return the table below the heading: the names of the two systems, and each row's name and cells."""
    rows = [line for line in page.split(_HEADING, 1)[1].partition("\n## ")[0].splitlines() if line.startswith("|")]
    (_, *names), _, *values = ([cell.strip() for cell in row.strip("|").split("|")] for row in rows)
    return names, [(what, cells) for what, *cells in values]


def in_ms(text: str) -> float | None:
    """Return a time such as `2.2 ms` or `1.5 s` in ms; None for another text."""
    number, _, unit = text.partition(" ")
    scale = {"ms": 1, "s": 1_000}.get(unit)
    return None if scale is None else float(number) * scale


def draw(page: str, out: Path) -> None:
    """Draw the rows with times as latencies, and the others as throughput."""
    names, rows = table(page)
    latencies = [(what, [in_ms(cell) for cell in cells]) for what, cells in rows if in_ms(cells[-1]) is not None]
    rates = [(what, [_rate(cell) for cell in cells]) for what, cells in rows if in_ms(cells[-1]) is None]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _bars(left, rates, names, "{:,.0f}")
    left.set_title("Throughput: more is better", loc="left", fontweight="bold")
    left.set_xlabel("transactions/s, 1 KiB bodies, two cores")
    left.xaxis.set_major_formatter("{x:,.0f}")
    _bars(right, latencies, names, "")
    right.set_title("Latency: less is better", loc="left", fontweight="bold")
    right.set_xscale("log")
    right.set_xlim(0.5, 20_000)
    right.xaxis.set_major_locator(FixedLocator(_ROUND_MS))
    right.xaxis.set_minor_locator(NullLocator())
    right.xaxis.set_major_formatter(FuncFormatter(lambda ms, _: _time(ms)))
    right.set_xlabel("from half to readable, logarithmic scale")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    # Text stays text, which a test compares with the page.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": out.stem}):
        figure.savefig(out, metadata={"Date": None})


def _bars(axes: Any, rows: list[tuple[str, list[float | None]]], names: list[str], form: str) -> None:
    places = range(len(rows))
    for number, (name, colour) in enumerate(zip(names, _COLOURS, strict=True)):
        values = [cells[number] or 0 for _, cells in rows]
        bars = axes.barh([place + 0.4 * number for place in places], values, height=0.38, color=colour, label=name)
        axes.bar_label(bars, [(form.format(value) if form else _time(value)) if value else "–" for value in values], padding=4, fontsize=9)
    axes.set_yticks([place + 0.2 for place in places], [what for what, _ in rows])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _rate(text: str) -> float | None:
    found = _NUMBER.match(text)
    return None if found is None else float(found.group().replace(",", ""))


def _time(ms: float) -> str:
    return f"{ms:g} ms" if ms < 1_000 else f"{ms / 1_000:g} s"
