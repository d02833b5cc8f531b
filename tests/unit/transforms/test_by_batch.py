"""Values by batch."""

from halfway.transforms.by_batch import ByBatch


def test_a_batch_has_the_last_value_that_began_before_it() -> None:
    values = ByBatch([(3, "a"), (8, "b")])
    assert [values.of(batch_id) for batch_id in (0, 3, 7, 8, 1_000)] == ["a", "a", "a", "b", "b"]


def test_outside_of_a_batch_the_last_value_counts() -> None:
    assert ByBatch([(3, "a"), (8, "b")]).here() == "b"
