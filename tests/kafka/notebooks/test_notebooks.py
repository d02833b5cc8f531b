"""Both notebooks run on the state, topics and tables of the real job, print the right figures and draw pictures."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image as mpimg
import pandas as pd
import pytest
from matplotlib.figure import Figure

from halfway.schemas.headers import Source
from tests.support.job_world import MakeWorld, World, op_headers

Run = Callable[..., str]


@pytest.fixture
def history(world: MakeWorld) -> World:
    """70 s of several groups, with every outcome and with every reason why a transaction is pending."""
    w = world(**{"resolution.transactionCheckMax": 2})
    for n in range(3):
        w.half(f"gone-{n}", 0, PGROUP=b"gone")
    for n in range(30):
        w.half(f"shop-{n}", n * 1000, PGROUP=b"shop")
        w.op(f"shop-{n}", b"COMMIT", n * 1000 + 100 * (n % 10 + 1), PGROUP=b"shop")
    w.op("shop-0", b"ROLLBACK", 5_000, PGROUP=b"shop")
    w.half("asked", 0, PGROUP=b"shop")
    w.half("undone", 0, PGROUP=b"shop")
    w.op("undone", b"ROLLBACK", 1, PGROUP=b"shop")
    w.tick(7_000)
    w.resolve()
    w.op("asked", b"COMMIT", 8_000, PGROUP=b"shop", FROM_CHECK=b"true", CHECK_TIMES=b"1")
    w.tick(37_000)
    w.resolve()
    for group, at_ms, count in (("mute", 40_000, 3), ("unsure", 40_000, 2), ("away", 41_000, 4), ("odd", 45_000, 1), ("shop", 66_000, 5)):
        for n in range(count):
            w.half(f"{group}-p{n}", at_ms + n, PGROUP=group.encode())
    w.tick(67_000, w.away("away"))
    w.resolve()
    for n in range(2):
        answer = {"FROM_CHECK": b"true", "CHECK_TIMES": b"1", "REMARK": b"database down"}
        w.op(f"unsure-p{n}", b"UNKNOWN", 68_000, PGROUP=b"unsure", **answer)
        w.produce(Source.OP, f"broken-{n}", b"", op_headers()[1:], 68_000)
    w.op("odd-p0", b"COMMIT", 68_000, PGROUP=b"even", FROM_CHECK=b"true", CHECK_TIMES=b"1")
    w.tick(70_500, w.away("away"))
    w.resolve()
    return w


@pytest.fixture
def run(history: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("audit_resolutions", "--hours", "1")` returns what the notebook prints."""
    settings = history.settings
    names = (
        "kafka.bootstrap_servers",
        "kafka.half_topic",
        "kafka.op_topic",
        "kafka.check_topic",
        "storage.warehouse",
        "storage.checkpoint",
    )
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.chdir(tmp_path)

    own = [f"{name}={getattr(getattr(settings, name.split('.')[0]), name.split('.')[1])}" for name in names]

    def run_notebook(name: str, *options: str, **databricks: object) -> str:
        sets = [part for text in own for part in ("--set", text)]
        monkeypatch.setattr(sys, "argv", [name, *sets, "--out", str(tmp_path / "out"), *options])
        if databricks:
            databricks = {**databricks, "dbutils": SimpleNamespace(widgets=Widgets(set=" ".join(own)))}
        runpy.run_module(f"notebooks.{name}", run_name="__main__", init_globals=databricks)
        return capsys.readouterr().out

    return run_notebook


class Widgets(dict[str, str]):
    """Databricks' `dbutils.widgets`, with the values that a user typed."""

    def text(self, name: str, default: str) -> None:
        self.setdefault(name, default)


def table(printed: str, title: str) -> list[list[str]]:
    """Return the words of each row below a title, without the heading."""
    block = printed.split(f"\n{title}\n", 1)[1].split("\n\n", 1)[0]
    return [line.split() for line in block.splitlines()[1:]]


def is_drawn(file: Path) -> bool:
    """Return True if the picture is large enough and has several colours."""
    picture = mpimg.imread(file)
    return picture.shape[0] > 300 and picture.shape[1] > 800 and len({tuple(pixel) for row in picture[::7, ::7] for pixel in row}) > 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_notebooks_show_what_the_job_did(run: Run, tmp_path: Path) -> None:
    explored = run("explore_pending")
    assert "Horizon: 2023-11-14 22:14:30.500 UTC" in explored
    assert "Pending: 15.\n" in explored
    assert "Groups away or behind: away.\n" in explored
    counted = dict(map(tuple, table(explored, "Counted since the checkpoint began")))
    assert {name: counted[name] for name in ("committed", "rolled_back", "discarded", "checked", "group_mismatch")} == {
        "committed": "31",
        "rolled_back": "1",
        "discarded": "3",
        "checked": "13",
        "group_mismatch": "1",
    }
    assert table(explored, "Ages") == [["from", "2", "s", "5"], ["from", "10", "s", "5"], ["from", "30", "s", "5"]]
    assert table(explored, "Checks") == [["0", "9"], ["1", "6"]]
    why = [" ".join(row) for row in table(explored, "Why it is pending")]
    assert why == [
        "mute asked, and nobody answers 3 30.5 s 1 mute-p0",
        "unsure the answer is UNKNOWN 2 30.5 s 1 database down unsure-p0",
        "away its group is away, or behind its check requests 4 29.5 s 0 away-p0",
        "odd a verdict came that does not settle it 1 25.5 s 1 odd-p0",
        "shop not asked yet 5 4.5 s 0 shop-p0",
    ]
    story = [" ".join(row[3:]) for row in table(explored, "The story of mute-p0")]
    assert [line.split(" ")[0] for line in story] == ["half", "check"]

    odd = run("explore_pending", "--transaction-id", "odd-p0")
    assert "odd-p0 is pending; checks so far: 1; due at the horizon 2023-11-14 22:14:57.000 UTC." in odd
    odd_story = [" ".join(row[3:]) for row in table(odd, "The story of odd-p0")]
    # The check request comes last, because its time is the broker's of today.
    expected = [
        "half REAL_TOPIC=orders, PGROUP=odd, 4 bytes",
        "op COMMIT answers check 1, PGROUP=even",
        "quarantined group_mismatch: COMMIT from group even on a half of group odd",
        "check 1 CHECK_ID=odd-p0:",
    ]
    assert len(odd_story) == len(expected)
    assert all(line.startswith(start) for line, start in zip(odd_story, expected, strict=True))
    assert table(odd, "What the job reads in its records") == [["HALF", "odd", "0"], ["OP", "even", "COMMIT", "0"]]

    audited = run("audit_resolutions")
    assert [" ".join(row) for row in table(audited, "Outcomes")] == [
        "committed 31",
        "discarded check_max 3",
        "quarantined conflicting_verdict 1",
        "quarantined group_mismatch 1",
        "quarantined missing_header 2",
    ]
    assert [" ".join(row) for row in table(audited, "By producer group, times in ms")] == [
        "shop 31 1 600 1000 8000 8000 0",
        "gone 0 0 3",
    ]
    assert "From 2023-11-14 22:13:20.100 UTC to 2023-11-14 22:14:28.000 UTC, in steps of 2 s." in audited
    half_a_minute = run("audit_resolutions", "--hours", str(30 / 3600))
    assert [" ".join(row) for row in table(half_a_minute, "Outcomes")] == [
        "discarded check_max 3",
        "quarantined group_mismatch 1",
        "quarantined missing_header 2",
    ]

    out = tmp_path / "out"
    pictures = {f"explore_pending_{name}" for name in ("by_group", "ages", "checks")}
    pictures |= {f"audit_resolutions_{name}" for name in ("rates", "latencies", "discarded", "quarantined")}
    assert {file.stem for file in out.glob("*.png")} == pictures
    assert all(is_drawn(file) for file in out.glob("*.png"))
    page = (out / "explore_pending.html").read_text()
    assert 'src="explore_pending_ages.png"' in page
    assert "nobody answers" in page

    shown: list[object] = []
    run("explore_pending", display=shown.append)
    run("audit_resolutions", display=shown.append)
    assert sum(isinstance(part, Figure) for part in shown) == len(pictures)
    assert [list(part["transactions"]) for part in shown if isinstance(part, pd.DataFrame) and "age" in part] == [[5, 5, 5]]
