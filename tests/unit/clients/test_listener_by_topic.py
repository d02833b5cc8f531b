"""Several listeners of one producer, by topic; and a listener that sends."""

from halfway import HalfMessage, ListenerByTopic, LocalTransactionState, TransactionProducer
from halfway.testing import in_memory_halfway
from tests.support.client_world import COMMIT, ROLLBACK, UNKNOWN, Listener


def test_each_message_goes_to_the_listener_of_its_topic() -> None:
    orders, payments = Listener(lambda *_: COMMIT), Listener(lambda *_: None, lambda _: ROLLBACK)
    with in_memory_halfway() as halfway:
        producer = halfway.producer(ListenerByTopic({"orders": orders, "payments": payments}))
        assert producer.send_in_transaction("orders", b"1").state is COMMIT
        assert producer.send_in_transaction("payments", b"2").state is UNKNOWN
        halfway.advance("7s")
        assert [message.body for message in halfway.messages()] == [b"1"]
        assert halfway.pending() == []
    assert [message.body for message in orders.executed] == [b"1"]
    assert [message.body for message in payments.checked] == [b"2"]
    assert orders.checked == []


def test_a_topic_without_a_listener_is_unknown_and_says_so() -> None:
    with in_memory_halfway() as halfway:
        producer = halfway.producer(ListenerByTopic({"orders": Listener()}))
        assert producer.send_in_transaction("refunds", b"").state is UNKNOWN
        assert len(halfway.pending()) == 1


def test_a_tag_may_have_a_listener_of_its_own() -> None:
    placed, others = Listener(lambda *_: UNKNOWN, lambda _: COMMIT), Listener()
    with in_memory_halfway() as halfway:
        producer = halfway.producer(ListenerByTopic({"orders:placed": placed, "orders": others}))
        for tags in ("placed", "cancelled", None):
            producer.send_in_transaction("orders", str(tags).encode(), tags=tags)
        halfway.advance("7s")
        assert len(halfway.messages()) == 3
    assert [message.tags for message in [*placed.executed, *placed.checked]] == ["placed", "placed"]
    assert [message.tags for message in others.executed] == ["cancelled", None]


def test_a_listener_may_send() -> None:
    sent: list[TransactionProducer] = []

    def execute(message: HalfMessage, _: object) -> LocalTransactionState:
        if message.topic == "orders":
            assert sent[0].send_in_transaction("invoices", message.body).state is COMMIT
        return COMMIT

    with in_memory_halfway() as halfway:
        sent.append(halfway.producer(Listener(execute)))
        sent[0].send_in_transaction("orders", b"apples")
        assert [message.topic for message in halfway.messages()] == ["invoices", "orders"]


def test_a_message_without_a_tag_has_no_listener_of_a_tag() -> None:
    with in_memory_halfway() as halfway:
        producer = halfway.producer(ListenerByTopic({"orders:None": Listener(), "orders": Listener(lambda *_: ROLLBACK)}))
        assert producer.send_in_transaction("orders", b"").state is ROLLBACK
