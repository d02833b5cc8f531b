"""What services, operators and retention may do to a relay: it neither ends, nor leaves a message out."""

import re
import shutil
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import OFFSET_END, TopicPartition
from confluent_kafka.admin import OffsetSpec

from halfway.pipelines.kafka.admin import admin_client
from halfway.pipelines.local.broker import LocalBroker
from halfway.pipelines.operate.doctor.finding import Health
from halfway.pipelines.operate.doctor.relay_checks import relay_findings
from halfway.pipelines.relay import real_topics, relay_table
from halfway.pipelines.relay.relay_producer import RelayProducer
from halfway.schemas.errors import RelayError
from tests.support.kafka_topics import delete_records, set_topic_config
from tests.support.relay_world import EARLIEST, RelayWorld, RunningRelay, row
from tests.support.waiting import until

SHORT: dict[str, object] = {"relay.transaction_timeout": "2s"}


@pytest.mark.timeout(200)
def test_a_batch_of_the_job_may_take_longer_than_a_transaction(world: RelayWorld) -> None:
    """A job that has fallen behind commits hundreds of thousands of messages in one batch."""
    orders = world.make_topic("orders")
    rows = [row(f"{number}", orders) for number in range(40_000)]
    world.append(0, 0, rows)
    with RunningRelay(world.with_settings(**SHORT), EARLIEST) as relay:
        until(lambda: relay.report.relayed >= 10_000, "some of them", 100)
    second = world.relay(**SHORT)
    assert second.report.relayed == len(rows) - relay.report.relayed > 0, "it goes on within the batch"
    assert world.ids("orders") == [each["transaction_id"] for each in rows]


@pytest.mark.timeout(200)
def test_one_message_that_is_too_large_among_many_holds_up_no_other_topic(world: RelayWorld) -> None:
    """The messages of its topic are then sent one by one, which takes longer than a transaction may."""
    small, orders = world.make_topic("small", **{"max.message.bytes": "20000"}), world.make_topic("orders")
    rows = [row(f"s{number}", small) for number in range(8_000)]
    rows[7_500] = row("large", small, body=bytes(30_000))
    world.append(0, 0, [*rows, row("a", orders)])
    with RunningRelay(world.with_settings(**SHORT), EARLIEST) as relay:
        until(lambda: world.ids("orders") == ["a"], "the other topic", 100, progress=lambda: relay.report.relayed)
        assert relay.report.positions is not None
        assert relay.report.positions.stopped[small].transaction_id == "large"
        set_topic_config(world.settings, small, "max.message.bytes", 100_000)
        until(lambda: relay.report.positions is not None and not relay.report.positions.stopped, "the topic goes on", 100)
    assert world.ids("small") == [each["transaction_id"] for each in rows]


@pytest.mark.timeout(200)
def test_a_bookmark_without_its_stopped_topics_is_refused(world: RelayWorld) -> None:
    """Retention takes the older records of a topic that is not compacted: those of the topics that are stopped."""
    orders, late = world.make_topic("orders"), world.topic("late")
    world.append(0, 0, [row("a", orders), row("b", late)])
    world.relay(EARLIEST)
    client, place = admin_client(world.settings.kafka), TopicPartition(world.settings.kafka.relay_topic, 0, OFFSET_END)
    [ends] = client.list_offsets({place: OffsetSpec.latest()}, request_timeout=30).values()
    end = ends.result().offset
    world.append(0, 1, [row("c", orders)])
    world.relay()
    set_topic_config(world.settings, place.topic, "cleanup.policy", "delete")
    delete_records(world.settings.kafka, place.topic, {0: end})
    world.make_topic("late")
    with pytest.raises(RelayError, match=r"has lost 1 of the topics that relay .* has stopped"):
        world.relay()
    assert [each.text.split(":")[0] for each in relay_findings(client, world.settings)] == [
        f"topic {place.topic} is not compacted, so that it would lose the relay's bookmark",
        f"{place.topic} has lost 1 of the topics that {world.name} has stopped",
        f"no instance of {world.name} runs",
    ]


@pytest.mark.timeout(200)
def test_a_bookmark_that_is_lost_under_a_relay_does_not_let_it_begin_again(world: RelayWorld) -> None:
    """A week after its first start, which had `--begin earliest`, in a topic that is not compacted."""
    orders = world.make_topic("orders")
    world.append(0, 0, [row("a", orders)])
    running = RunningRelay(world.settings, EARLIEST)

    def run() -> None:
        with running:
            until(lambda: world.ids("orders") == ["a"], "the first message")
            set_topic_config(world.settings, world.settings.kafka.relay_topic, "cleanup.policy", "delete")
            delete_records(world.settings.kafka, world.settings.kafka.relay_topic, {0: OFFSET_END})
            RelayProducer(world.settings).close()  # fences it, as another relay does
            world.append(0, 1, [row("b", orders)])
            until(lambda: not running.is_alive() or len(world.ids("orders")) > 1, "its end, or more messages", 60)

    with pytest.raises(RelayError, match="Kafka holds no bookmark"):
        run()
    assert world.ids("orders") == ["a"]


@pytest.mark.timeout(200)
def test_a_table_that_is_made_anew_under_a_relay_ends_it(world: RelayWorld, tmp_path: Path) -> None:
    """Its batches begin at 0.0 again, below the bookmark."""
    orders = world.make_topic("orders")
    world.append(0, 5, [row("a", orders)])
    running = RunningRelay(world.settings, EARLIEST)

    def run() -> None:
        with running:
            until(lambda: world.ids("orders") == ["a"], "the first message")
            (tmp_path / "warehouse" / "messages").rename(tmp_path / "old")
            for batch in range(3):
                world.append(0, batch, [row(f"new{batch}", orders)])
            until(lambda: not running.is_alive(), "its end", 60)

    with pytest.raises(RelayError, match="is of another table"):
        run()


@pytest.mark.timeout(200)
def test_two_halfways_in_one_kafka_may_give_their_relays_one_name(broker: LocalBroker, tmp_path: Path) -> None:
    """Each team leaves relay.name as it is, and names its own topics."""
    name = uuid.uuid4().hex[:8]
    worlds = []
    for team in ("a", "b"):
        (tmp_path / team).mkdir()
        worlds.append(RelayWorld(str(broker.status()["bootstrap_servers"]), tmp_path / team, f"{name}-{team}", **{"relay.name": name}))
    topics = [world.make_topic("orders") for world in worlds]
    for world, topic in zip(worlds, topics, strict=True):
        world.append(0, 0, [row("0", topic)])
    with RunningRelay(worlds[0].settings, EARLIEST) as first, RunningRelay(worlds[1].settings, EARLIEST) as second:
        for batch in range(1, 20):
            for world, topic in zip(worlds, topics, strict=True):
                world.append(0, batch, [row(f"{batch}", topic)])
            until(lambda: [world.ids("orders")[-1:] for world in worlds] == [[f"{batch}"]] * 2, "both", 60)  # noqa: B023
        assert (first.report.interruptions, second.report.interruptions) == (0, 0)


@pytest.mark.timeout(200)
def test_any_number_of_stopped_topics_is_asked_for_at_once(world: RelayWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service chooses the names. A question for each would hold up the others."""
    asked: list[int] = []
    describe = real_topics.describe_each

    def spy(client: Any, names: Collection[str], **options: Any) -> Any:
        asked.append(len(names))
        return describe(client, names, **options)

    monkeypatch.setattr(real_topics, "describe_each", spy)
    orders = world.make_topic("orders")
    world.append(0, 0, [row("a", orders), *(row(f"{number}", world.topic(f"none{number}")) for number in range(300))])
    with RunningRelay(world.settings, EARLIEST):
        until(lambda: sum(asked) >= 5 * 300, "retries")
    assert len(asked) < 50


@pytest.mark.timeout(200)
def test_a_topic_that_is_mended_has_its_turn_in_a_long_backlog(world: RelayWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_table, "MESSAGES_AT_ONCE", 5)
    orders, late = world.make_topic("orders"), world.topic("late")
    world.append(0, 0, [row("a", orders), *(row(f"l{number}", late) for number in range(100))])
    world.relay(EARLIEST)
    world.append(0, 1, [row(f"{number}", orders) for number in range(2_000)])
    world.make_topic("late")
    with RunningRelay(world.settings) as relay:
        until(lambda: len(world.ids("late")) == 100, "the topic's messages", 60)
        sent = relay.report.relayed
    assert sent < 2_000, "before the others have got all theirs"
    assert world.relay().report.positions.stopped == {}  # type: ignore[union-attr]
    assert world.ids("orders") == ["a", *(f"{number}" for number in range(2_000))]


@pytest.mark.timeout(200)
def test_no_line_of_the_relays_log_is_a_services(world: RelayWorld) -> None:
    """A service chooses the topic and the id of its messages, of which the relay logs both."""
    topic, transaction_id = "x\n2026-11-24 20:00:00,000 level=INFO event=topic_resumed topic=y\x1b]0;owned\x07", "a\r\nlevel=ERROR event=b"
    world.append(0, 0, [row(transaction_id, topic)])
    assert world.start("--begin", "earliest", "--available-now").wait(120) == 1
    told = world.log(1)
    assert all(character.isprintable() for character in told.replace("\n", ""))
    assert f"event=topic_stopped topic={topic!r} transaction_id={transaction_id!r} refusal=no_topic" in told
    events = re.findall(r"^\S+ \S+ level=\w+ event=(\w+)", told, re.MULTILINE)
    assert events == ["relay_active", "topic_stopped", "relay_standing_by", "relay_stopped"]


@pytest.mark.timeout(200)
def test_the_doctor_names_a_topic_that_is_stopped_and_a_bookmark_that_is_ahead(world: RelayWorld, tmp_path: Path) -> None:
    def findings() -> list[tuple[Health, str]]:
        found = relay_findings(admin_client(world.settings.kafka), world.settings)
        return [(each.health, each.text.replace(world.name, "…")) for each in found]

    assert findings() == []
    world.append(0, 3, [row("a", world.topic("late"))])
    with RunningRelay(world.settings, EARLIEST):
        stopped = "… has stopped late-… at a: there is no topic late-…: `halfway topics create --real late-…` makes it"
        until(lambda: findings() == [(Health.PROBLEM, stopped)], "the stopped topic")
        world.make_topic("late")
        until(lambda: findings() == [(Health.OK, "… runs, and no topic is stopped (bookmark 0.3)")], "the topic goes on")
    idle = (Health.WARNING, "no instance of … runs: start `halfway relay`")
    assert findings() == [idle]
    table, backup = tmp_path / "warehouse" / "messages", tmp_path / "backup"
    shutil.copytree(table, backup)
    world.append(1, 0, [row("b", world.topic("late"))])
    world.relay()
    shutil.rmtree(table)
    backup.rename(table)
    [(health, text), last] = findings()
    assert (health, last) == (Health.PROBLEM, idle)
    assert text.startswith("the bookmark of … (1.0) is ahead of the table, whose last message is in 0.3: ")
    shutil.rmtree(table)
    for batch_id in range(5):
        world.append(1, batch_id, [row(f"c{batch_id}", world.topic("late"))])
    [(health, text), last] = findings()
    assert (health, last) == (Health.PROBLEM, idle)
    assert text.startswith("the bookmark of … (1.0) is of another table than the one in storage: this was recreated, and it does not start")
    renamed = world.settings.model_copy(update={"relay": world.settings.relay.model_copy(update={"name": "another"})})
    found = [(each.health, each.text.replace(world.name, "…")) for each in relay_findings(admin_client(renamed.kafka), renamed)]
    assert found == [idle], "it may be another job's"


@pytest.mark.timeout(200)
def test_a_single_run_sends_a_topic_that_goes_on_all_it_lacks(world: RelayWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_table, "MESSAGES_AT_ONCE", 5)
    late = world.topic("late")
    world.append(0, 0, [row(f"{number}", late) for number in range(100)])
    world.relay(EARLIEST)
    world.make_topic("late")
    world.relay()
    assert world.ids("late") == [f"{number}" for number in range(100)]
