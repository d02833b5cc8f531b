"""When stopped topics have their turns."""

from halfway.pipelines.relay.retries import Retries


def test_a_topic_has_its_turn_when_it_has_waited() -> None:
    now = [100.0]
    retries = Retries(10.0, lambda: now[0])
    retries.later("a")
    now[0] = 101.0
    retries.later("b")
    for at, taken in ((109.9, []), (110.0, ["a"]), (110.1, []), (111.0, ["b"])):
        now[0] = at
        assert retries.is_due() is bool(taken)
        assert retries.take(5) == taken
        assert not retries.is_due()


def test_neither_those_that_have_waited_nor_those_that_need_not_hold_the_others_up() -> None:
    now = [0.0]
    retries = Retries(10.0, lambda: now[0])
    for number in range(5):
        retries.later(f"later{number}")
        retries.soon(f"once{number}")
    assert retries.take(2) == ["once0", "once1"]
    assert retries.has_soon()
    now[0] = 10.0
    retries.soon("once0")
    assert retries.take(2) == ["later0", "later1", "once2", "once3"]
    assert retries.take(9) == ["later2", "later3", "later4", "once4", "once0"]
    assert not retries.is_due()
    assert not retries.has_soon()
