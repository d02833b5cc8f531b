"""Where a message goes."""

from datetime import UTC, datetime

import pytest

from halfway.clients.reading.committed import CommittedMessage
from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.writer import ANY_PARTITION
from halfway.pipelines.relay.positions import Refusal
from halfway.pipelines.relay.route import Router
from halfway.schemas.bookmark import Bookmark
from halfway.schemas.errors import SettingsError

AT = datetime(2026, 1, 2, tzinfo=UTC)


def router(**relay: object) -> Router:
    return Router(load_settings(environ={}, overrides={f"relay.{name}": value for name, value in relay.items()}))


def message(**changes: object) -> CommittedMessage:
    known: dict[str, object] = {"transaction_id": "t", "incarnation": 0, "topic": "orders", "queue_id": 0, "tags": None, "keys": None}
    known |= {"body": b"", "properties": {}, "producer_group": "g", "born_at": AT, "half_at": AT, "committed_at": AT, "check_times": 0}
    known |= {"half_partition": 0, "half_offset": 0, "op_partition": 0, "op_offset": 0, "bookmark": Bookmark(0, 0)}
    return CommittedMessage(**{**known, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("allow", "named", "expected"),
    [
        (["*"], "orders", True),
        (["orders"], "orders", True),
        (["orders"], "orders2", False),
        (["shop.*", "stock"], "shop.eu", True),
        (["Orders"], "orders", False),
        ([], "orders", False),
    ],
)
def test_the_allow_list_has_patterns(allow: list[str], named: str, *, expected: bool) -> None:
    assert router(allow=allow).is_allowed(named) is expected


def test_a_topic_may_have_another_name_in_kafka() -> None:
    mapped = router(topics={"orders": "shop.orders"})
    assert (mapped.topic_of("orders"), mapped.topic_of("stock")) == ("shop.orders", "stock")
    assert mapped.record_of(message(), 1).topic == "shop.orders"


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("orders", None),
        ("transactions.half", Refusal.OWN_TOPIC),
        ("transactions.op", Refusal.OWN_TOPIC),
        ("transactions.check", Refusal.OWN_TOPIC),
        ("transactions.relay", Refusal.OWN_TOPIC),
        ("__consumer_offsets", Refusal.OWN_TOPIC),
        ("..", Refusal.NO_TOPIC),
        ("a b", Refusal.NO_TOPIC),
        ("x" * 250, Refusal.NO_TOPIC),
    ],
)
def test_some_topics_get_no_message(topic: str, expected: Refusal | None) -> None:
    found = router().refusal(topic)
    assert (found and found[0]) == expected


def test_a_check_topic_of_one_group_gets_no_message() -> None:
    settings = load_settings(environ={}, overrides={"kafka.check_topics": '{"shop": "checks.shop"}'})
    refusal = Router(settings).refusal("checks.shop")
    assert refusal is not None
    assert refusal[0] is Refusal.OWN_TOPIC


def test_a_mapping_to_one_of_our_topics_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"transactions\.op, which is one of Halfway's own topics"):
        router(topics={"orders": "transactions.op"})


@pytest.mark.parametrize(("queue_id", "partition"), [(0, ANY_PARTITION), (1, 1), (3, 3), (4, ANY_PARTITION), (-1, ANY_PARTITION)])
def test_the_queue_is_the_partition_where_that_exists(queue_id: int, partition: int) -> None:
    assert router().record_of(message(queue_id=queue_id), 4).partition == partition


def test_the_key_is_what_the_service_calls_its_keys_or_else_the_id() -> None:
    assert [router().record_of(message(keys=keys), 1).key for keys in ("order-7", "", None)] == [b"order-7", b"t", b"t"]


def test_a_time_before_1970_is_left_out() -> None:
    headers = dict(router().record_of(message(born_at=datetime(1969, 12, 31, tzinfo=UTC)), 1).headers)
    assert "BORN_TIMESTAMP" not in headers


def test_a_property_without_a_value_stays_one() -> None:
    assert router().record_of(message(properties={"note": None}), 1).headers[0] == ("note", None)
