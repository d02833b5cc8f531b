"""Which checks are open, which offsets may be committed, and when reading should pause, without Kafka."""

import tracemalloc
from typing import cast

import pytest

from halfway import CheckRequest, LocalTransactionState
from halfway.clients.listener import Answer
from halfway.clients.open_checks import REMEMBERED_MS, OpenChecks
from halfway.clients.verdicts import KnownVerdicts
from halfway.schemas.headers import check_id

COMMIT, ROLLBACK, UNKNOWN = LocalTransactionState.COMMIT, LocalTransactionState.ROLLBACK, LocalTransactionState.UNKNOWN


def request(
    name: str = "t1", *, body: bytes = b"body", incarnation: int = 0, its_id: str | None = None, properties: int = 0
) -> CheckRequest:
    return CheckRequest(
        transaction_id=name,
        topic="orders",
        body=body,
        producer_group="shop",
        incarnation=incarnation,
        properties={str(number): "" for number in range(properties)},
        check_times=1,
        check_id=its_id or check_id(name, 0, 7, 1),
    )


def test_a_new_group_commits_where_it_begins_so_that_kafka_knows_it() -> None:
    checks = OpenChecks(max_open=10)
    checks.assign({0: None, 1: 17})
    assert checks.to_commit() == {0: 0}
    checks.commit_failed(0)
    assert checks.to_commit() == {0: 0}
    assert checks.to_commit() == {}


def test_a_check_of_a_lost_partition_is_dropped_and_read_again() -> None:
    checks = OpenChecks(max_open=10)
    checks.assign({0: 5})
    first = checks.add(0, 5, request())
    assert first is not None
    checks.revoke([0])
    assert not checks.keep_owned(first)
    checks.assign({0: 5})
    again = checks.add(0, 5, request())
    assert again is not None
    assert checks.keep_owned(again)
    checks.finish(again)
    assert checks.to_commit() == {0: 6}


def test_a_partition_that_comes_back_before_its_check_was_dropped_keeps_the_check() -> None:
    checks = OpenChecks(max_open=10)
    checks.assign({0: 5})
    first = checks.add(0, 5, request())
    assert first is not None
    checks.revoke([0])
    checks.assign({0: 5})
    assert checks.add(0, 5, request()) is None
    assert checks.keep_owned(first)
    checks.finish(first)
    assert checks.to_commit() == {0: 6}


@pytest.mark.parametrize("state", [COMMIT, ROLLBACK, UNKNOWN])
@pytest.mark.parametrize(("later_ms", "is_asked_again"), [(REMEMBERED_MS - 1, False), (REMEMBERED_MS, True)])
def test_a_check_comes_again_after_its_answer(state: LocalTransactionState, later_ms: int, is_asked_again: bool) -> None:
    """A job repeats one at once. One that has lost its checkpoint asks anew, and may have lost the verdict too."""
    checks = OpenChecks(max_open=10)
    task = checks.add(0, 0, request(), 1_000)
    assert task is not None
    task.answer = Answer(state)
    checks.finish(task)
    assert (checks.add(0, 1, request(), 1_000 + later_ms) is not None) == is_asked_again


def test_a_recreated_topic_begins_again() -> None:
    checks = OpenChecks(max_open=10)
    checks.assign({0: 100})
    old = checks.add(0, 100, request("old"))
    new = checks.add(0, 0, request("new"))
    assert old is not None
    assert new is not None
    assert checks.to_commit() == {0: 0}
    checks.finish(old)
    assert checks.to_commit() == {}, "an offset of the former topic"
    checks.finish(new)
    assert checks.to_commit() == {0: 1}


def test_a_forged_request_with_anothers_check_id_does_not_replace_it() -> None:
    checks = OpenChecks(max_open=10)
    real = request("t1")
    for offset, forged in enumerate((request("other", its_id=real.check_id), request("t1", incarnation=5))):
        task = checks.add(0, offset, forged)
        assert task is not None
        checks.finish(task)
    assert checks.add(0, 2, real) is not None
    assert checks.add(0, 3, real) is None


def test_reading_pauses_at_a_number_of_checks_or_of_bytes() -> None:
    checks = OpenChecks(max_open=4, max_bytes=1_000)
    tasks = [checks.add(0, number, request(f"t{number}", body=b"x" * 500)) for number in range(2)]
    assert checks.is_full()
    assert not checks.has_room()
    for task in tasks[:1]:
        assert task is not None
        checks.finish(task)
    assert not checks.is_full()
    assert checks.has_room()
    for number in range(2, 5):
        checks.add(0, number, request(f"t{number}", body=b""))
    assert checks.is_full()


def test_properties_take_room_too() -> None:
    """Those of Kafka take a few bytes each, and Python's more than a hundred."""
    checks = OpenChecks(max_open=256, max_bytes=100_000)
    task = checks.add(0, 0, request(body=b"", properties=1_000))
    assert task is not None
    assert checks.is_full()
    cast(dict[str, str], task.request.properties).clear()  # as a listener may
    checks.finish(task)
    assert checks._open_bytes == 0


def test_what_passes_by_while_a_check_is_open_costs_no_memory() -> None:
    """A listener may hang, while a shared topic brings the requests of all others, or somebody copies this one."""
    checks = OpenChecks(max_open=10)
    checks.assign({0: 0})
    stuck = checks.add(0, 0, request())
    assert stuck is not None
    tracemalloc.start()
    for offset in range(1, 20_000):
        assert checks.add(0, offset, request() if offset % 2 else None) is None
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 100_000
    assert checks.to_commit() == {}
    checks.finish(stuck)
    assert checks.to_commit() == {0: 20_000}


def test_the_latest_verdicts_are_known_by_id_and_incarnation() -> None:
    verdicts = KnownVerdicts(limit=2)
    for name, state in (("a", COMMIT), ("b", UNKNOWN), ("c", ROLLBACK)):
        verdicts.note(request(name), state)
    assert [verdicts.of(request(name)) for name in "abc"] == [COMMIT, None, ROLLBACK]
    assert verdicts.of(request("a", incarnation=1)) is None
    verdicts.note(request("d"), COMMIT)
    assert [verdicts.of(request(name)) for name in "acd"] == [None, ROLLBACK, COMMIT]
