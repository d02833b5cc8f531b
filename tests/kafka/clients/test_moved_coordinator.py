"""A producer goes on answering checks if its group's coordinator moves when it has just joined (librdkafka #5586)."""

from collections.abc import Iterator

import pytest

from halfway import TransactionProducer
from tests.support.client_world import GROUP, Listener, check_of, committed, members, ops, own_topics, send_checks
from tests.support.moved_coordinator import MovedCoordinatorBroker
from tests.support.waiting import until


@pytest.fixture
def moved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MovedCoordinatorBroker]:
    with MovedCoordinatorBroker(tmp_path_factory.mktemp("moved")) as broker:
        yield broker


def test_partitions_are_read_though_the_first_look_ups_of_their_offsets_were_refused(moved: MovedCoordinatorBroker) -> None:
    kafka, listener = own_topics(moved), Listener()
    send_checks(kafka, check_of("t1"))
    moved.refuse_after_join(times=3)
    with TransactionProducer(kafka, GROUP, listener):
        until(moved.has_refused, "the look-ups are refused")
        until(lambda: len(listener.checked) == 1, "the check is answered", limit_s=30)
        ops(kafka, at_least=1)
    assert committed(kafka) == {0: 1}


def test_the_partitions_that_an_instance_has_are_served_while_look_ups_for_others_are_refused(moved: MovedCoordinatorBroker) -> None:
    kafka, listener = own_topics(moved), Listener()
    with TransactionProducer(kafka, GROUP, listener):
        with TransactionProducer(kafka, GROUP, Listener()):
            until(lambda: members(kafka) == [1, 1], "each instance has a partition")
            moved.refuse_after_join(times=20)
        until(moved.refuses_now, "the look-ups for what the second instance had are refused")
        for partition in range(2):
            send_checks(kafka, check_of(f"t{partition}"), partition=partition)
        until(lambda: len(listener.checked) == 1, "the check in its own partition is answered", limit_s=10)
        assert moved.refuses_now()
        until(lambda: len(listener.checked) == 2, "the other one is answered")
