"""R15's part that needs no Kafka: names of consumer groups, and what fits into a tick."""

import json

from halfway.pipelines.resolve.groups import MAX_BYTES, fit, producer_groups


def test_only_the_groups_that_answer_checks_count() -> None:
    assert producer_groups(["txn-check-shop", "shop", "txn-check-", "my-txn-check-x", "txn-check-txn-check-a"]) == ["shop", "txn-check-a"]


def test_what_does_not_fit_into_a_tick_is_left_out_from_the_end() -> None:
    assert fit(["a", "b"]) == ["a", "b"]
    for name in ("group-of-a-service-{:05}", "größe-{:05}", '"{:05}"'):
        groups = [name.format(number) for number in range(10_000)]
        fitting = fit(groups)
        assert fitting == groups[: len(fitting)]
        size = len(json.dumps({"absent_groups": sorted(fitting)}))
        assert MAX_BYTES - 100 < size < MAX_BYTES + 100
