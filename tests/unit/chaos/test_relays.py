"""The judge of the relays finds what is lost, twice, changed or out of order."""

import pytest

from tests.chaos.relays import Relayed, relay_findings

ROWS = [Relayed(name, 0, f"body of {name}") for name in "abcd"]


def record(name: str, partition: int = 0, body: str | None = None) -> Relayed:
    return Relayed(name, partition, f"body of {name}" if body is None else body)


def test_partitions_are_each_in_order() -> None:
    assert relay_findings(ROWS, [record("a"), record("d"), record("b", 1), record("c", 1)]).ok


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([record("a"), record("b"), record("c")], ["lost: d is in messages, and was not relayed"]),
        ([record("a"), record("a"), record("b"), record("c"), record("d")], ["twice: a was relayed 2 times"]),
        ([record("b"), record("a"), record("c"), record("d")], ["wrong: a was relayed out of order"]),
        ([record("a"), record("b"), record("c", body="x"), record("d")], ["wrong: c was relayed with another body"]),
        ([*map(record, "abcde")], ["wrong: e was relayed, and is not in messages"]),
    ],
)
def test_what_is_wrong_is_found(records: list[Relayed], expected: list[str]) -> None:
    assert relay_findings(ROWS, records).lines() == expected
