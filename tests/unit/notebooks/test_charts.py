"""What the pictures of the notebooks show: gaps where nothing was, one time axis, counts, round units."""

from collections.abc import Iterator

import matplotlib as mpl
import matplotlib.dates as mdates
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from notebooks import charts

START_MS, STEP_MS = 1_700_000_003_000, 5_000
AXIS = charts.times(START_MS, START_MS + 200_000, STEP_MS)


@pytest.fixture(autouse=True)
def canvas() -> Iterator[None]:
    mpl.use("Agg")
    yield
    plt.close("all")


def outcomes() -> pd.DataFrame:
    rows = [(AXIS[0], "committed", None, 400), (AXIS[30], "discarded", "check_max", 2), (AXIS[35], "quarantined", "bad_header", 1)]
    return pd.DataFrame(rows, columns=["at", "outcome", "reason", "count"])


def late_one() -> pd.DataFrame:
    """250 messages in three steps, and one message much later."""
    rows = [(AXIS[n], messages, 60, 300, 900, 1_000) for n, messages in enumerate((200, 30, 20))]
    return pd.DataFrame(
        [*rows, (AXIS[30], 1, 240_000, 240_000, 240_000, 240_000)], columns=["at", "messages", "p50", "p95", "p99", "worst"]
    )


def line(figure: Figure, name: str) -> np.ndarray:
    [found] = [each for each in figure.axes[0].lines if each.get_label() == name]
    return np.asarray(found.get_ydata(), float)


def test_nothing_is_drawn_across_steps_without_messages() -> None:
    figure = charts.latencies(late_one(), AXIS)
    assert np.isfinite(line(figure, "p50")).sum() == 3
    assert np.isnan(line(figure, "slowest")[3:30]).all()
    assert line(figure, "slowest")[30] == 240_000


def test_a_percentile_needs_enough_messages() -> None:
    figure = charts.latencies(late_one(), AXIS)
    assert [int(np.isfinite(line(figure, name)).sum()) for name in ("p50", "p95", "p99", "slowest")] == [3, 3, 1, 4]
    few = charts.latencies(late_one().tail(1), AXIS)
    assert [each.get_label() for each in few.axes[0].lines] == ["slowest"], "a legend names only what is drawn"


def test_counts_stand_below_the_latencies() -> None:
    counts = charts.latencies(late_one(), AXIS).axes[1]
    assert sum(bar.get_height() for bar in counts.patches) == 251
    assert counts.get_ylabel() == "count per 5 s"


@pytest.mark.parametrize("step_ms", [1_000, 2_000, 60_000, 86_400_000])
def test_a_bar_is_nearly_as_wide_as_its_step_and_a_point_in_its_middle(step_ms: int) -> None:
    axis = charts.times(START_MS, START_MS + 40 * step_ms, step_ms)
    row = pd.DataFrame([(axis[3], 400, 60, 300, 900, 1_000)], columns=["at", "messages", "p50", "p95", "p99", "worst"])
    figure = charts.latencies(row, axis)
    bar, line = figure.axes[1].patches[3], figure.axes[0].lines[0]
    assert bar.get_width() == pytest.approx(0.95 * step_ms / 86_400_000)
    assert pd.Timestamp(np.asarray(line.get_xdata())[3]) == axis[3] + pd.Timedelta(milliseconds=step_ms / 2)


def test_units_are_round() -> None:
    figure = charts.latencies(late_one(), AXIS)
    figure.canvas.draw()
    low, high = figure.axes[0].get_ylim()
    shown = [text.get_text() for text in figure.axes[0].get_yticklabels() if low <= text.get_position()[1] <= high]
    assert shown == ["50 ms", "100 ms", "200 ms", "500 ms", "1 s", "2 s", "5 s", "10 s", "30 s", "1 min", "2 min", "5 min"][: len(shown)]
    assert len(shown) >= 10


@pytest.mark.parametrize("ms", [0.4, 3, 30, 5_000, 10_000_000_000])
def test_the_axis_of_one_message_has_numbers(ms: float) -> None:
    row = pd.DataFrame([(AXIS[3], 1, ms, ms, ms, ms)], columns=["at", "messages", "p50", "p95", "p99", "worst"])
    axes = charts.latencies(row, AXIS).axes[0]
    low, high = axes.get_ylim()
    assert sum(low <= tick <= high for tick in axes.get_yticks()) >= (2 if ms < 10_000 else 1)
    assert low < max(ms, 1) < high


def pictures() -> list[Figure]:
    found = outcomes()
    reasons = [charts.reasons(found, outcome, AXIS) for outcome in ("discarded", "quarantined")]
    return [charts.rates(found, AXIS, 7), charts.latencies(late_one(), AXIS), *reasons]


def test_all_pictures_have_one_time_axis() -> None:
    limits = {figure.axes[-1].get_xlim() for figure in pictures()}
    [(start, end)] = limits
    assert mdates.num2date(start).replace(tzinfo=None) == AXIS[0]
    assert mdates.num2date(end).replace(tzinfo=None) == AXIS[-1] + pd.Timedelta(milliseconds=STEP_MS)


@pytest.mark.parametrize(("known", "text"), [(1_234, "1,234 since the checkpoint began"), (None, "an unknown number")])
def test_what_leaves_no_row_is_not_left_out_without_a_word(known: int | None, text: str) -> None:
    assert f"rolled back, {text}" in str(charts.rates(outcomes(), AXIS, known).get_supxlabel())


def is_beside(axes: Axes) -> bool:
    legend = axes.get_legend()
    assert legend is not None
    return legend.get_window_extent().x0 >= axes.get_window_extent().x1


def test_a_legend_is_on_nothing() -> None:
    rows = pd.DataFrame([("shop", 5_000.0, 900), ("mail", 90_000.0, 1)], columns=["producer_group", "from_ms", "transactions"])
    for figure in [charts.pending_by_group(rows, "12:00:00 UTC"), *pictures()[1:]]:
        figure.canvas.draw()
        assert is_beside(figure.axes[0])


def test_the_names_of_groups_are_drawn_as_they_are_and_not_too_long() -> None:
    """Any producer chooses one. As a formula the first would end the page; the last would leave no room for bars."""
    names = [r"a$\frac$b", "pay$x_1$", "g" * 200]
    rows = pd.DataFrame([(name, 0, 1) for name in names], columns=["producer_group", "from_ms", "transactions"])
    figure = charts.pending_by_group(rows, "now")
    figure.canvas.draw()
    axes = figure.axes[0]
    assert sorted(label.get_text() for label in axes.get_yticklabels()) == sorted([*names[:2], "g" * 39 + "…"])
    assert axes.get_window_extent().width > 300
