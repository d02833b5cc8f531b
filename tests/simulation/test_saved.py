"""A saved history is judged as the one that was saved."""

from pathlib import Path

from tests.simulation.checker import judge
from tests.simulation.generator import generate
from tests.simulation.history import History
from tests.simulation.planted import PLANTED, first_seed
from tests.simulation.saved import load, save
from tests.simulation.world import World


def test_a_history_is_read_as_it_was_saved(tmp_path: Path) -> None:
    history = World(generate(4)).run()
    history.publisher_set_back_ms = 7
    save(history, tmp_path / "history.json")
    again = load(tmp_path / "history.json")
    assert judge(again) == []
    assert [each.text_key for each in again.records] == [each.text_key for each in history.records]
    assert [row.values.keys() for row in again.rows] == [row.values.keys() for row in history.rows]
    assert (again.decisions, again.commits, again.acts) == (history.decisions, history.commits, history.acts)
    assert again.publisher_set_back_ms == 7


def test_a_saved_history_shows_the_same_defect(tmp_path: Path) -> None:
    planted = next(each for each in PLANTED if each.name.startswith("R2 the last verdict"))
    failure = first_seed(planted, 100)
    assert failure is not None
    with planted.in_place():
        history: History = World(failure.actions).run()
    save(history, tmp_path / "history.json")
    assert judge(load(tmp_path / "history.json")) == judge(history) != []
