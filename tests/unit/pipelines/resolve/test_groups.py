"""The part of R15 that needs no Kafka: names of consumer groups, and how many of them fit into a tick."""

from uuid import uuid4

from halfway.pipelines.resolve.groups import fit, producer_groups
from halfway.schemas.headers import MAX_TICK_BYTES
from halfway.schemas.tick_value import TickValue


def test_only_a_consumer_group_that_answers_checks_is_a_producer_group() -> None:
    assert producer_groups(["txn-check-shop", "shop", "txn-check-", "my-txn-check-x", "txn-check-txn-check-a"]) == ["shop", "txn-check-a"]


def test_the_last_groups_are_left_out_where_a_tick_is_full() -> None:
    assert fit(["a", "b"]) == ["a", "b"]
    assert fit(["x" * 40_000, "b"]) == ["b"], "a name that is too long hides no other"
    for name in ("group-of-a-service-{:05}", "größe-{:05}", '"{:05}"'):
        groups = [name.format(number) for number in range(10_000)]
        fitting = fit(groups)
        assert fitting == groups[: len(fitting)]
        size = len(TickValue(tuple(fitting), str(uuid4())).to_bytes())
        assert MAX_TICK_BYTES - 100 < size <= MAX_TICK_BYTES
