"""The relay on a real Kafka and a real Delta table: each topic gets its messages once, in the order of the table."""

from collections.abc import Callable
from pathlib import Path

import pytest

from halfway.pipelines.relay.positions import Refusal, TablePosition
from halfway.schemas.errors import RelayError, TopicError
from tests.support.kafka_topics import set_topic_config
from tests.support.relay_world import EARLIEST, RelayWorld, RunningRelay, row
from tests.support.waiting import until

MakeWorld = Callable[..., RelayWorld]


def test_each_topic_gets_its_messages_once_and_in_order(world: RelayWorld) -> None:
    orders, stock = world.make_topic("orders"), world.make_topic("stock")
    for batch in range(5):
        world.append(0, batch, [row(f"{batch}-{number}", orders if number % 2 else stock) for number in range(10)])
    first = world.relay(EARLIEST)
    world.append(0, 5, [row("5-1", orders)])
    world.append(1, 0, [row("adopted", orders)])
    second = world.relay()
    assert world.ids("orders") == [f"{batch}-{number}" for batch in range(5) for number in range(1, 10, 2)] + ["5-1", "adopted"]
    assert world.ids("stock") == [f"{batch}-{number}" for batch in range(5) for number in range(0, 10, 2)]
    assert (first.report.relayed, second.report.relayed) == (50, 2)
    assert second.report.positions is not None
    assert second.report.positions.after == TablePosition(1, 0)


def test_a_record_has_the_message_and_what_is_known_of_it(world: RelayWorld) -> None:
    topic = world.make_topic("orders", partitions=4)
    properties = [("traceparent", "00-1-2-01"), ("TRANSACTION_ID", "forged")]
    message = row("t1", topic, body=b"\x00\xff", tags="paid", keys="order-7", queue_id=2, properties=properties)
    others = [row("t2", topic, queue_id=9), row("t3", topic, keys="order-7", body=b""), row("t4", topic, keys="order-7")]
    world.append(0, 0, [message, *others])
    world.relay(EARLIEST)
    sent = {each.transaction_id: each for each in world.sent("orders")}
    assert sent["t1"][:4] == (2, "t1", "order-7", b"\x00\xff")
    assert sent["t1"].headers == [
        *properties,
        ("TAGS", "paid"),
        ("KEYS", "order-7"),
        ("PGROUP", "shop"),
        ("BORN_TIMESTAMP", "1767323045678"),
        ("TRANSACTION_ID", "t1"),
    ]
    assert sent["t2"].key == "t2", "without keys the id is the key"
    assert sent["t3"].partition == sent["t4"].partition, "one key, one partition"


def test_only_allowed_topics_get_messages_under_their_own_names(world: RelayWorld) -> None:
    orders, mapped = world.make_topic("orders"), world.make_topic("mapped")
    world.append(0, 0, [row("a", orders), row("b", "renamed"), row("c", "secret")])
    relay = world.relay(EARLIEST, **{"relay.allow": f'["{orders}", "ren*"]', "relay.topics": f'{{"renamed": "{mapped}"}}'})
    assert (world.ids("orders"), world.ids("mapped"), relay.report.refusals) == (["a"], ["b"], 0)


def test_a_missing_topic_stops_alone_and_goes_on_when_it_is_made(world: RelayWorld) -> None:
    orders = world.make_topic("orders")
    late = world.topic("late")
    world.append(0, 0, [row("a", orders), row("b", late), row("c", late), row("d", orders)])
    with RunningRelay(world.settings, EARLIEST) as relay:
        until(lambda: world.ids("orders") == ["a", "d"], "the others")
        assert relay.report.positions is not None
        [(named, stop)] = relay.report.positions.stopped.items()
        assert (named, stop.transaction_id, stop.refusal, stop.after) == (late, "b", Refusal.NO_TOPIC, None)
        world.append(0, 1, [row("e", late), row("f", orders)])
        until(lambda: world.ids("orders") == ["a", "d", "f"], "the next batch of the others")
        world.make_topic("late")
        until(lambda: world.ids("late") == ["b", "c", "e"], "the topic's messages")
        world.append(0, 2, [row("g", late)])
        until(lambda: world.ids("late") == ["b", "c", "e", "g"], "the topic goes on with the others")
        until(lambda: relay.report.positions is not None and not relay.report.positions.stopped, "no topic stopped")
    assert world.relay().report.relayed == 0


def test_a_message_that_is_too_large_stops_its_topic_and_is_named(world: RelayWorld) -> None:
    orders, small = world.make_topic("orders"), world.make_topic("small", **{"max.message.bytes": "20000"})
    rows = [row(f"s{number}", small, body=bytes(5_000)) for number in range(20)]
    world.append(0, 0, [row("a", orders), *rows, row("b", orders)])
    world.append(0, 1, [row("fits", small), row("large", small, body=bytes(30_000)), row("after", small)])
    positions = world.relay(EARLIEST).report.positions
    assert positions is not None
    stop = positions.stopped[small]
    assert (stop.transaction_id, stop.refusal) == ("large", Refusal.TOO_LARGE), "batches of small messages are none of its business"
    assert f"--alter --topic {small} --add-config max.message.bytes=" in stop.cause
    assert world.ids("orders") == ["a", "b"]
    set_topic_config(world.settings, small, "max.message.bytes", 100_000)
    world.append(0, 2, [row("last", small)])
    with RunningRelay(world.settings):
        until(lambda: world.ids("small")[-1:] == ["last"], "the topic goes on")
    assert world.ids("small") == [*(f"s{number}" for number in range(20)), "fits", "large", "after", "last"]


@pytest.mark.parametrize("named", ["half", "relay", "kafkas", "no name"])
def test_what_must_get_no_message_stops_alone(named: str, world: RelayWorld) -> None:
    orders = world.make_topic("orders")
    topic = {"half": world.settings.kafka.half_topic, "relay": world.settings.kafka.relay_topic}.get(named, named)
    topic = "__consumer_offsets" if named == "kafkas" else topic
    world.append(0, 0, [row("a", topic), row("b", orders)])
    positions = world.relay(EARLIEST).report.positions
    assert world.ids("orders") == ["b"]
    assert positions is not None
    assert positions.stopped[topic].refusal is (Refusal.NO_TOPIC if named == "no name" else Refusal.OWN_TOPIC)


def test_a_relay_without_a_bookmark_begins_only_when_told(world: RelayWorld) -> None:
    world.append(0, 0, [row("a", world.make_topic("orders"))])
    with pytest.raises(RelayError, match="--begin earliest"):
        world.relay()
    world.relay(EARLIEST)
    with pytest.raises(RelayError, match="start it without --begin"):
        world.relay(EARLIEST)


def test_a_bookmark_of_another_table_is_refused(world: RelayWorld, tmp_path: Path) -> None:
    world.append(0, 0, [row("a", world.make_topic("orders"))])
    world.relay(EARLIEST)
    (tmp_path / "warehouse" / "messages").rename(tmp_path / "old")
    world.append(0, 0, [row("b", world.topic("orders"))])
    with pytest.raises(RelayError, match="is of another table"):
        world.relay()


def test_without_its_own_topic_the_relay_says_what_to_do(world: RelayWorld) -> None:
    world.append(0, 0, [row("a")])
    with pytest.raises(TopicError, match="halfway topics create --relay"):
        world.relay(EARLIEST, **{"kafka.relay_topic": "nowhere"})
