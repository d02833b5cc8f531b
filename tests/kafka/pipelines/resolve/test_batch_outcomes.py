"""A batch is written the same by the driver and by the executors."""

from typing import Any

import pytest

from halfway.pipelines.resolve import batch_outcomes, read_back
from halfway.pipelines.resolve.batch_outcomes import BatchOutcomes
from halfway.schemas.tables import Table
from tests.support.job_world import MakeWorld, World


@pytest.fixture
def on_executors(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Receives the kinds that the executors write."""
    kinds: list[Any] = []
    original = BatchOutcomes._rows_on_executors

    def spied(self: BatchOutcomes, kind: Any, *rest: Any) -> Any:
        kinds.append(kind)
        return original(self, kind, *rest)

    monkeypatch.setattr(BatchOutcomes, "_rows_on_executors", spied)
    return kinds


def send_one_of_each(w: World) -> None:
    w.half("committed", 0, b"body", own=b"kept", TAGS=b"t")
    w.op("committed", b"COMMIT", 5)
    w.half("rolled back", 0)
    w.op("rolled back", b"ROLLBACK", 5)
    w.half("silent", 0, b"asked")
    w.half("broken", 0, b"kept", PGROUP=None)
    w.tick(6_001)


@pytest.mark.parametrize("rows_on_driver", [4_096, pytest.param(0, marks=pytest.mark.long)])
def test_one_of_each_kind(rows_on_driver: int, world: MakeWorld, on_executors: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_outcomes, "ROWS_ON_DRIVER", rows_on_driver)
    w = world(**{"resolution.transactionCheckMax": 1})
    send_one_of_each(w)
    w.resolve()
    w.tick(36_001)
    w.resolve()
    [message] = w.rows(Table.MESSAGES)
    assert (message.transaction_id, message.body, message.properties, message.tags) == ("committed", b"body", {"own": "kept"}, "t")
    [discarded] = w.rows(Table.DISCARDED)
    assert (discarded.transaction_id, discarded.body, discarded.check_times) == ("silent", b"asked", 1)
    [refused] = w.rows(Table.QUARANTINE)
    assert (refused.transaction_id, refused.value, refused.reason) == ("broken", b"kept", "missing_header")
    assert [(key, body, headers["CHECK_ID"]) for key, body, headers in w.checks()] == [
        ("silent", b"asked", f"silent:{discarded.half_partition}.{discarded.half_offset}:1".encode())
    ]
    assert len(on_executors) == (0 if rows_on_driver else 4)


@pytest.mark.long
@pytest.mark.parametrize("sizes", [{"a": 600, "b": 600, "c": 600}, {"a": 1_000}])
def test_large_bodies_are_left_to_the_executors(
    sizes: dict[str, int], world: MakeWorld, on_executors: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the driver sends to a task of a cluster is at most 128 MiB (`spark.rpc.message.maxSize`)."""
    monkeypatch.setattr(read_back, "FLUSH_BYTES", 1_000)
    w = world()
    for name, size in sizes.items():
        w.half(name, 0, name.encode() * size)
        w.op(name, b"COMMIT", 5)
    w.tick(100)
    w.resolve()
    assert {name: len(row.body) for name, row in w.by_id(Table.MESSAGES).items()} == sizes
    assert len(on_executors) == 1
