"""A producer that librdkafka has declared dead is made anew, and until that works its instance is not in the group."""

from typing import Any

import pytest

from halfway import SendError, TransactionProducer
from halfway.clients.kafka.sender import Sender
from halfway.schemas.settings import KafkaSettings
from tests.support.client_world import GROUP, LIMIT_S, Gate, Listener, check_of, committed, members, ops, read, send_checks
from tests.support.dead_producer import declare_dead
from tests.support.waiting import until


def kill(producer: TransactionProducer) -> None:
    assert producer._sender is not None
    declare_dead(producer._sender._producer)


def gets_through(producer: TransactionProducer, name: str) -> bool:
    try:
        producer.send_in_transaction("orders", b"", transaction_id=name)
    except SendError:
        return False
    return True


def test_a_dead_producer_is_made_anew(kafka: KafkaSettings, caplog: pytest.LogCaptureFixture) -> None:
    with TransactionProducer(kafka, GROUP, Listener()) as producer:
        assert gets_through(producer, "before")
        for round_ in range(3):
            kill(producer)
            until(lambda number=round_: gets_through(producer, f"after{number}"), "the producer sends again", LIMIT_S)
            send_checks(kafka, check_of(f"asked{round_}"))
            until(lambda number=round_: committed(kafka) == {0: number + 1}, "the check is answered", LIMIT_S)
        assert producer.close() is True
    assert "event=producer_failed" in caplog.text
    stored = {name for name, headers in ops(kafka) if headers["ACTION"] == "COMMIT"}
    assert stored >= {"before", *(f"{kind}{number}" for number in range(3) for kind in ("after", "asked"))}


def test_an_instance_leaves_the_group_until_its_new_producer_works(kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    renew, gate = Sender._renew, Gate()

    def renew_at_the_gate(sender: Sender) -> None:
        if gate.opened.is_set():
            renew(sender)

    monkeypatch.setattr(Sender, "_renew", renew_at_the_gate)
    dead, healthy = Listener(), Listener()
    with TransactionProducer(kafka, GROUP, dead) as first:
        until(lambda: members(kafka) == [2], "the first instance is a member", LIMIT_S)
        with TransactionProducer(kafka, GROUP, healthy):
            until(lambda: members(kafka) == [1, 1], "both instances are members", LIMIT_S)
            kill(first)
            until(lambda: members(kafka) == [2], "the instance with the dead producer has left", LIMIT_S)
            send_checks(kafka, check_of("t0"), partition=0)
            send_checks(kafka, check_of("t1"), partition=1)
            assert {name for name, _ in ops(kafka, at_least=2)} == {"t0", "t1"}
            assert (len(dead.checked), len(healthy.checked)) == (0, 2)
            with pytest.raises(SendError, match="the test says so"):
                first.send_in_transaction("orders", b"")
            gate.opened.set()
            until(lambda: members(kafka) == [1, 1], "the instance is back", LIMIT_S)
        send_checks(kafka, check_of("t2"))
        ops(kafka, at_least=3)
    assert [request.transaction_id for request in dead.checked] == ["t2"]
    assert dead.executed == []
    assert read(kafka, kafka.half_topic) == []


def test_an_answer_that_died_with_the_producer_is_given_by_another_instance(kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sender, "_renew", lambda _: None)
    gate = Gate()

    def check(request: Any) -> Any:
        gate.pass_through(request.transaction_id)

    dying = TransactionProducer(kafka, GROUP, Listener(check=check))
    dying.start()
    send_checks(kafka, check_of("t1"))
    gate.entered.get(timeout=LIMIT_S)
    kill(dying)
    healthy = Listener()
    with TransactionProducer(kafka, GROUP, healthy):
        until(lambda: members(kafka) == [2], "only the healthy instance is a member", LIMIT_S)
        gate.opened.set()
        assert [name for name, _ in ops(kafka, at_least=1)] == ["t1"]
        dying.close()
    assert [request.transaction_id for request in healthy.checked] == ["t1"]
    assert committed(kafka) == {0: 1}
