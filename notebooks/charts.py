"""Draws aggregates with titles, units, readable labels, times in UTC and colours for any colour vision."""

from collections.abc import Sequence
from datetime import timedelta

import matplotlib.dates as mdates
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator, StrMethodFormatter

from halfway.transforms.views.durations import duration_text
from halfway.transforms.views.pending_frames import AGE_EDGES_MS

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
"""The palette of Okabe and Ito, which any colour vision can distinguish."""
_AGE_GROUPS_MS = (0, 10_000, 60_000, 600_000, 3_600_000, 86_400_000)
_SIZE = (10.0, 4.8)
_LONGEST_NAME = 40
_PERCENTILES = {"p99": 100, "p95": 20, "p50": 2}
"""How many messages a step needs for each percentile. Of fewer it is the slowest message."""
_ROUND_S = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1_800, 3_600, 7_200, 21_600, 43_200, 86_400, 172_800, 604_800)
_ROUND_MS = (*(1, 2, 5, 10, 20, 50, 100, 200, 500), *(1_000 * step_s for step_s in _ROUND_S))


def pending_by_group(rows: pd.DataFrame, horizon: str) -> Figure:
    """Draw pending transactions by producer group, stacked by age (producer_group, from_ms, transactions)."""
    labels = _age_labels()
    named = rows.assign(age=pd.cut(rows["from_ms"].fillna(0), [*_AGE_GROUPS_MS, float("inf")], right=False, labels=labels))
    table = named.pivot_table(index="producer_group", columns="age", values="transactions", aggfunc="sum", observed=False, fill_value=0)
    table = table.loc[table.sum(axis=1).sort_values().index]
    figure, axes = plt.subplots(figsize=(_SIZE[0], max(3.2, 1.6 + 0.4 * len(table))), layout="constrained")
    left = pd.Series(0, index=table.index)
    for label, colour in zip(labels, plt.get_cmap("cividis_r")([0.05, 0.25, 0.45, 0.65, 0.85, 1.0]), strict=True):
        if table[label].sum():
            axes.barh(range(len(table)), table[label], left=left, color=colour, label=label, edgecolor="white", linewidth=0.5)
        left = left + table[label]
    # Producers choose the names: `$` would begin a formula.
    axes.set_yticks(range(len(table)), [_short(name) for name in table.index], parse_math=False)
    for place, total in enumerate(left):
        axes.annotate(f" {total:,}", (total, place), va="center")
    axes.set_xlim(0, 1.08 * max(left))
    axes.legend(title="age of the half", loc="center left", bbox_to_anchor=(1.0, 0.5))
    _label(axes, f"Pending transactions by producer group, at {horizon}", "transactions", "producer group")
    _count_axis(axes.xaxis)
    axes.grid(visible=False, axis="y")
    return figure


def ages(rows: pd.DataFrame, horizon: str) -> Figure:
    """Draw the ages of pending transactions (from_ms, transactions). Each age class is about twice the one before."""
    counts = rows.dropna().set_index("from_ms")["transactions"]
    shown = [edge for edge in AGE_EDGES_MS if edge <= max([*counts.index, 10_000])]
    labels = [_from(edge) for edge in AGE_EDGES_MS[: len(shown) + 1]]
    figure = _bars(
        labels[: len(shown)],
        [int(counts.get(edge, 0)) for edge in shown],
        f"Ages of pending transactions, at {horizon}",
        "age of the half",
    )
    # A bar lies between two ages.
    figure.axes[0].set_xticks([place - 0.5 for place in range(len(labels))], labels)
    return figure


def checks(rows: pd.DataFrame, horizon: str) -> Figure:
    """Draw the number of checks of pending transactions (check_times, transactions)."""
    counts = rows.set_index("check_times")["transactions"]
    shown = range(max([*counts.index, 3]) + 1)
    return _bars(
        [str(times) for times in shown],
        [int(counts.get(times, 0)) for times in shown],
        f"Checks sent for pending transactions, at {horizon}",
        "check requests sent so far",
    )


def times(first_ms: int, last_ms: int, step_ms: int) -> pd.DatetimeIndex:
    """Return the beginnings of the steps from one time to another: the time axis of a page's pictures."""
    begin_ms = first_ms - first_ms % step_ms
    return pd.date_range(pd.Timestamp(begin_ms, unit="ms"), pd.Timestamp(last_ms, unit="ms"), freq=pd.Timedelta(milliseconds=step_ms))


def rates(rows: pd.DataFrame, axis: pd.DatetimeIndex, rolled_back: int | None) -> Figure:
    """Draw outcomes over time, each kind in a panel with its own scale (at, outcome, count).

    Args:
        rows: what happened.
        axis: see `times`.
        rolled_back: how many were rolled back since the checkpoint began; None if that is not known. A rollback leaves
            no row, and so no time.
    """
    kinds = ("committed", "discarded", "quarantined")
    figure, panels = plt.subplots(len(kinds), sharex=True, figsize=(_SIZE[0], 6.4), layout="constrained")
    for kind, axes, colour in zip(kinds, panels, COLOURS, strict=False):
        found = rows[rows["outcome"] == kind].groupby("at")["count"].sum()
        axes.bar(found.index, found, width=_width(axis), align="edge", color=colour)
        _label(axes, f"{kind}, {found.sum():,} in all", "", _per_step(axis))
        _count_axis(axes.yaxis, steps=4)
        axes.set_ylim(bottom=0, top=None if len(found) else 1)
    _time_axis(panels[-1], axis)
    known = "an unknown number" if rolled_back is None else f"{rolled_back:,} since the checkpoint began"
    figure.suptitle("Outcomes over time", fontweight="bold")
    figure.supxlabel(f"Not shown: rolled back, {known}. A rollback leaves no row in the tables.", fontsize=9)
    return figure


def latencies(rows: pd.DataFrame, axis: pd.DatetimeIndex) -> Figure:
    """Draw half → commit over time, on a logarithmic scale, and below it how many messages each step has.

    A percentile is drawn where a step has enough messages for it to differ from the worst. Lines end where a step has
    none.

    Args:
        rows: at, messages, and in ms p50, p95, p99, worst.
        axis: see `times`.
    """
    figure, (axes, below) = plt.subplots(2, sharex=True, figsize=(_SIZE[0], 6.4), height_ratios=(3, 1), layout="constrained")
    found = rows.set_index("at").reindex(axis)
    middle = axis + _step(axis) / 2
    axes.plot(middle, found["worst"].clip(lower=1), color=COLOURS[7], marker="_", markersize=9, linewidth=0, label="slowest")
    for (name, enough), (colour, marker) in zip(
        _PERCENTILES.items(), ((COLOURS[5], "^"), (COLOURS[1], "s"), (COLOURS[0], "o")), strict=True
    ):
        # The broker's clock has a resolution of 1 ms, and a logarithmic scale has no 0.
        shown = found[name].clip(lower=1).where(found["messages"] >= enough)
        if shown.notna().any():
            axes.plot(middle, shown, color=colour, marker=marker, markersize=4, linewidth=1.5, label=name)
    axes.set_yscale("log")
    drawn = found[[*_PERCENTILES, "worst"]].clip(lower=1).stack()
    if len(drawn):
        low, high = drawn.min(), drawn.max()
        above = next((ms for ms in _ROUND_MS if ms > high), 10 * high)
        axes.set_ylim(max(ms for ms in _ROUND_MS if ms <= low) * 0.9, above * 1.1)  # so that the axis has two of its numbers
    axes.yaxis.set_major_locator(FixedLocator(_ROUND_MS))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: duration_text(ms)))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    _label(axes, f"From half to commit, in steps of {duration_text(_step(axis).total_seconds() * 1000)}", "", "half to commit, logarithmic")
    below.bar(axis, found["messages"].fillna(0), width=_width(axis), align="edge", color=COLOURS[4])
    _label(below, "Messages, logarithmic from 1", "", _per_step(axis))
    # One late message is to be seen beside thousands.
    below.set_yscale("symlog", linthresh=1)
    below.yaxis.set_major_locator(FixedLocator([0, *(10**power for power in range(12))]))
    below.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    _time_axis(below, axis)
    return figure


def reasons(rows: pd.DataFrame, outcome: str, axis: pd.DatetimeIndex) -> Figure:
    """Draw one outcome over time, stacked by reason (at, outcome, reason, count). It must have at least one row.

    The seven most frequent reasons have their own names. The others are drawn together.

    Args:
        rows: what happened.
        outcome: what to draw.
        axis: see `times`.
    """
    found = rows[rows["outcome"] == outcome]
    totals = found.groupby("reason")["count"].sum().sort_values(ascending=False)
    kept = found.assign(reason=found["reason"].where(found["reason"].isin(totals.index[: len(COLOURS) - 1]), "others"))
    table = kept.pivot_table(index="at", columns="reason", values="count", aggfunc="sum", fill_value=0)
    figure, axes = plt.subplots(figsize=_SIZE, layout="constrained")
    bottom = pd.Series(0, index=table.index)
    order = [reason for reason in [*totals.index, "others"] if reason in table.columns]
    for reason, colour in zip(order, COLOURS, strict=False):
        label = f"{reason} ({table[reason].sum():,})"
        axes.bar(
            table.index,
            table[reason],
            bottom=bottom,
            width=_width(axis),
            align="edge",
            color=colour,
            label=label,
            edgecolor="white",
            linewidth=0.4,
        )
        bottom = bottom + table[reason]
    axes.legend(title="reason", loc="center left", bbox_to_anchor=(1.0, 0.5))
    _label(axes, f"{outcome.capitalize()} by reason", "", _per_step(axis))
    _count_axis(axes.yaxis)
    _time_axis(axes, axis)
    return figure


def _bars(labels: Sequence[str], counts: Sequence[int], title: str, x: str) -> Figure:
    figure, axes = plt.subplots(figsize=_SIZE, layout="constrained")
    bars = axes.bar(labels, counts, color=COLOURS[0], width=0.9)
    axes.bar_label(bars, [f"{count:,}" if count else "" for count in counts], fontsize=9)
    axes.margins(y=0.1)
    _label(axes, title, x, "transactions")
    _count_axis(axes.yaxis)
    if len(labels) > 12 and max(map(len, labels)) > 3:
        axes.tick_params(axis="x", labelrotation=45)
    return figure


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _count_axis(axis: Axis, steps: int = 8) -> None:
    axis.set_major_locator(MaxNLocator(nbins=steps, integer=True))
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _time_axis(axes: Axes, axis: pd.DatetimeIndex) -> None:
    """Show the whole of `axis`. Label times as finely as the span needs, with the date below."""
    start, end = axis[0], axis[-1] + _step(axis)
    axes.set_xlim(start, end)
    span = end - start
    text = "%H:%M:%S" if span < timedelta(minutes=20) else "%H:%M" if span < timedelta(days=2) else "%d %b"
    axes.xaxis.set_major_locator(mdates.AutoDateLocator(maxticks=9))
    axes.xaxis.set_major_formatter(mdates.DateFormatter(text))
    days = f"{start:%Y-%m-%d}" if start.date() == end.date() else f"{start:%Y-%m-%d} to {end:%Y-%m-%d}"
    axes.set_xlabel(f"time, UTC ({days})")


def _step(axis: pd.DatetimeIndex) -> pd.Timedelta:
    return pd.Timedelta(axis.freq).as_unit("ms")  # parts of a step of seconds would be cut to whole ones


def _width(axis: pd.DatetimeIndex) -> pd.Timedelta:
    return 0.95 * _step(axis)


def _per_step(axis: pd.DatetimeIndex) -> str:
    return f"count per {duration_text(_step(axis).total_seconds() * 1000)}"


def age_text(from_ms: float) -> str:
    """Return the name of an age class by its lower bound. The bound is NaN if there is no horizon yet."""
    return "not known" if pd.isna(from_ms) else f"from {_from(int(from_ms))}"


def _from(edge_ms: int) -> str:
    return "0" if edge_ms == 0 else duration_text(edge_ms)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _age_labels() -> list[str]:
    ends = [*_AGE_GROUPS_MS[1:], None]
    return [
        f"{_from(start)} to {duration_text(end)}" if end else f"over {duration_text(start)}"
        for start, end in zip(_AGE_GROUPS_MS, ends, strict=True)
    ]
