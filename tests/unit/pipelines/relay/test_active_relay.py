"""The active relay against a Kafka in memory, which loses transactions and refuses messages."""

import itertools
import random
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from halfway.pipelines.relay import active_relay as module
from halfway.pipelines.relay import relay_table
from halfway.pipelines.relay.active_relay import ActiveRelay, RelayReport
from halfway.pipelines.relay.positions import PositionRecord, Refusal, RelayPositions, positions_of
from halfway.pipelines.relay.relay_producer import RefusedError, TransactionLostError
from halfway.pipelines.relay.relay_table import RelayTable
from halfway.pipelines.relay.route import RelayedRecord
from halfway.schemas.errors import TableError
from halfway.schemas.settings import Settings
from tests.support.fake_relay_kafka import LARGE, fake_kafka, settings_for
from tests.support.relay_world import append_rows, row

TOPICS = ("a", "b", "c", "late")


def relay(settings: Settings, chance: random.Random, clock: Callable[[], float] = time.monotonic) -> None:
    """Relay what there is now, by as many active relays as it takes."""
    report: Any = RelayReport()
    table = RelayTable(settings.storage)
    for _ in range(1000):
        active = ActiveRelay(settings, table, None, report, clock)  # type: ignore[arg-type]
        try:
            stored = active.stored()
            assert stored is None or not stored.lost
            active.take_over(stored, stored or RelayPositions(table.id))
            has_more = True
            while has_more:
                has_more = active.read_on(lambda: chance.random() < 0.9)
                has_more = active.try_stopped(lambda: chance.random() < 0.9) or has_more
        except TransactionLostError:
            continue
        return
    raise AssertionError("it gets nowhere")


@pytest.mark.parametrize("seed", range(12))
def test_each_topic_gets_each_message_once_and_in_order(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    kafka = fake_kafka(chance, monkeypatch)
    monkeypatch.setattr(module, "_ALONE_AT_ONCE", 2)
    monkeypatch.setattr(module, "_ALONE_FOR", 20)
    monkeypatch.setattr(relay_table, "MESSAGES_AT_ONCE", 4)
    settings = settings_for(tmp_path, **{"relay.retry_interval": 1, "relay.topics": {"c": "mapped"}})
    expected: dict[str, list[str]] = defaultdict(list)
    for batch in range(12):
        rows = []
        for number in range(chance.choice((1, 2, 30))):
            named = chance.choice(TOPICS)
            expected["mapped" if named == "c" else named].append(f"{batch}-{number}")
            rows.append(row(f"{batch}-{number}", named, body=LARGE if chance.random() < 0.02 else b"small"))
        append_rows(tmp_path, chance.randint(0, 1) if batch == 11 else 0, batch, rows)
        if batch % 3 == 2:
            relay(settings, chance)
            kafka.missing = set(chance.sample(TOPICS, 1))
            kafka.takes_large = batch == 8
    kafka.missing, kafka.takes_large, kafka.losses = set(), True, 0.0
    while True:
        relay(settings, chance)
        if not positions_of(kafka.positions)["relay"].stopped:
            break
    assert kafka.sent == expected
    assert max(kafka.sizes) <= 4


# Any number of stopped topics.

MANY, RETRY_S = 10_000, 10


class Scene:
    """A relay of which a service's messages have stopped many topics, in a time that only Kafka's answers take."""

    def __init__(self, warehouse: Path, monkeypatch: pytest.MonkeyPatch, many: int = MANY) -> None:
        self._warehouse, self._batch = warehouse, 0
        self.kafka = fake_kafka(random.Random(0), monkeypatch)
        monkeypatch.setattr(module.log, "disabled", True)
        self.kafka.losses, self.kafka.missing = 0.0, {f"none{number}" for number in range(many)}
        self.append(*((f"t{number}", f"none{number}") for number in range(many)))
        settings = settings_for(warehouse, **{"relay.retry_interval": f"{RETRY_S}s"})
        table, client, report = RelayTable(settings.storage), None, RelayReport()
        self.relay = ActiveRelay(settings, table, client, report, self.kafka.clock)  # type: ignore[arg-type]
        self.relay.take_over(None, RelayPositions(table.id))

    def append(self, *messages: tuple[str, str]) -> None:
        """Append a batch of messages, each an id and a topic. One whose id is `large` is."""
        rows = [row(each, named, body=LARGE if each == "large" else b"small") for each, named in messages]
        append_rows(self._warehouse, 0, self._batch, rows)
        self._batch += 1

    def stopped(self) -> set[str]:
        return set(positions_of(self.kafka.positions)["relay"].stopped)


@contextmanager
def at_most(limit: int) -> Iterator[None]:
    """Fail as soon as the block has taken more than `limit` steps of Python's interpreter."""
    taken = [0]

    def trace(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        taken[0] += event == "opcode"
        if taken[0] > limit:
            raise AssertionError(f"more than {limit} steps")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def on() -> bool:
    return True


@pytest.mark.timeout(200)
def test_any_number_of_stopped_topics_costs_a_few_steps_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service chooses the names, and how many: each step that looked at all of them would take the square of that."""
    scene = Scene(tmp_path, monkeypatch)
    with at_most(2_000 * MANY):
        scene.relay.read_on(on)
    assert scene.stopped() == scene.kafka.missing
    scene.append(("again", "none0"), ("a", "orders"))
    scene.kafka.asked.clear()
    with at_most(2 * MANY):
        scene.relay.read_on(on)
    assert scene.kafka.sent == {"orders": ["a"]}, "it does not matter to the others how many are stopped"
    assert scene.kafka.asked == [["orders"]]
    written = len(scene.kafka.sizes)
    scene.kafka.asked.clear()
    scene.kafka.clock.now_s += RETRY_S
    with at_most(1_000 * MANY):
        scene.relay.try_stopped(on)
    assert {len(names) for names in scene.kafka.asked} == {500}
    assert sorted(itertools.chain(*scene.kafka.asked)) == sorted(scene.kafka.missing)
    assert len(scene.kafka.sizes) == written, "nothing has changed, so nothing is written"
    scene.kafka.clock.now_s += RETRY_S
    scene.kafka.cause = "still missing"
    with at_most(1_000 * MANY):
        scene.relay.try_stopped(on)
    assert len(scene.kafka.sizes) == written + MANY / 500, "a transaction for each question"
    with at_most(1_000 * MANY):
        found = positions_of(scene.kafka.positions)["relay"].stopped
    assert Counter(stop.cause for stop in found.values()) == {"still missing": MANY}


def test_stopped_topics_and_the_others_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, monkeypatch)
    kafka, tried, took_s, asked_s = scene.kafka, Counter[str](), list[float](), list[float]()

    def may_go_on() -> bool:
        asked_s.append(kafka.clock.now_s)
        return True

    scene.relay.read_on(on)
    kafka.clock.now_s += RETRY_S
    kafka.takes_s = 0.2
    for turn in range(1, 8):
        kafka.asked.clear()
        began_s = kafka.clock.now_s
        assert not scene.relay.try_stopped(may_go_on)
        took_s.append(round(kafka.clock.now_s - began_s, 1))
        tried.update(itertools.chain(*kafka.asked))
        scene.append((f"{turn}", "orders"))
        scene.relay.read_on(may_go_on)
        assert kafka.sent["orders"][-1] == f"{turn}"
        assert asked_s[-1] == kafka.clock.now_s
    assert took_s == [0.6] * 6 + [0.4], "half a second, and what was begun"
    assert tried == Counter(kafka.missing), "each has had its turn"
    assert max(later - sooner for sooner, later in itertools.pairwise(asked_s)) < 0.5, "also whether this relay is to go on"


def test_a_relay_that_is_to_stop_ends_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, monkeypatch)
    scene.relay.read_on(on)
    scene.kafka.clock.now_s += RETRY_S
    scene.kafka.asked.clear()
    scene.relay.try_stopped(lambda: False)
    assert [len(names) for names in scene.kafka.asked] == [500]
    scene.relay.try_stopped(on)
    assert len(set(itertools.chain(*scene.kafka.asked))) == MANY, "the others are tried later"


@pytest.mark.parametrize("transactions", range(1, 6))
def test_a_relay_may_be_stopped_between_any_two_transactions(transactions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that are sent one by one take long. Another relay may take over meanwhile, and give up at once."""
    monkeypatch.setattr(module, "_ALONE_AT_ONCE", 2)
    monkeypatch.setattr(relay_table, "MESSAGES_AT_ONCE", 4)
    scene = Scene(tmp_path, monkeypatch, many=1)
    kafka = scene.kafka
    before, after = ["large", *(f"b{number}" for number in range(11))], [f"a{number}" for number in range(12)]
    scene.append(*((each, "late") for each in before))
    kafka.missing = {"none0"}
    while scene.relay.read_on(on):
        pass
    assert scene.stopped() == {"none0", "late"}
    kafka.takes_large = True
    kafka.clock.now_s += RETRY_S
    for messages, step in ((before, scene.relay.try_stopped), (after, scene.relay.read_on)):
        if messages == after:
            scene.append(*((each, "late") for each in after))
        answers = iter([*[True] * (transactions - 1), False])
        kafka.sizes.clear()
        assert step(lambda: next(answers, True))  # noqa: B023
        assert len(kafka.sizes) == transactions
        assert 1 <= min(kafka.sizes) <= max(kafka.sizes) <= 2
        while step(on):
            pass
    assert kafka.sent == {"late": [*before, *after]}


def test_a_topic_that_is_stopped_at_a_message_divides_no_transaction_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any service can send a message that its topic refuses."""
    scene = Scene(tmp_path, monkeypatch, many=1)
    scene.append(("b", "late"), ("large", "late"))
    while scene.relay.read_on(on):
        pass
    assert scene.stopped() == {"none0", "late"}
    orders = [f"o{number}" for number in range(300)]
    for _ in range(2):
        scene.kafka.sizes.clear()
        scene.append(*((each, "orders") for each in orders), ("more", "late"))
        assert not scene.relay.read_on(on)
        assert scene.kafka.sizes == [300]
        scene.kafka.clock.now_s += RETRY_S
        scene.relay.try_stopped(on)
    assert scene.kafka.sent == {"late": ["b"], "orders": [*orders, *orders]}


def test_topics_that_go_on_and_the_others_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have much to send, and the stopped ones are more than a turn can ask for."""
    monkeypatch.setattr(relay_table, "MESSAGES_AT_ONCE", 4)
    scene = Scene(tmp_path, monkeypatch, many=2_000)
    kafka = scene.kafka
    late, orders = [f"l{number}" for number in range(100)], [f"o{number}" for number in range(100)]
    others = [f"other{number}" for number in range(10)]
    kafka.missing |= {"late", *others}
    scene.append(*((each, "late") for each in late), *((each, each) for each in others))
    while scene.relay.read_on(on):
        pass
    kafka.missing -= {"late", *others}
    scene.append(*((each, "orders") for each in orders))
    kafka.takes_s = 0.2
    kafka.clock.now_s += RETRY_S
    while len(kafka.sent["late"]) < 100:
        had, began_s = {name: len(kafka.sent[name]) for name in ("late", "orders")}, kafka.clock.now_s
        scene.relay.try_stopped(on)
        assert kafka.clock.now_s - began_s < 1.1
        scene.relay.read_on(on)
        assert len(kafka.sent["late"]) - had["late"] <= 12
        assert had["orders"] == 100 or 4 <= len(kafka.sent["orders"]) - had["orders"] <= 12
        kafka.clock.now_s += RETRY_S
    while scene.relay.read_on(on):
        pass
    assert kafka.sent == {"late": late, "orders": orders, **{each: [each] for each in others}}


def test_a_stopped_topic_is_not_tried_with_the_messages_of_another_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table was recreated, with fewer commits, so that a look at the next one shows nothing."""
    kafka = fake_kafka(random.Random(0), monkeypatch)
    kafka.losses, kafka.missing = 0.0, {"late"}
    settings = settings_for(tmp_path, **{"relay.retry_interval": 1})
    for batch in range(4):
        append_rows(tmp_path, 0, batch, [row(f"a{batch}", "a"), row(f"late{batch}", "late")])
    table = RelayTable(settings.storage)
    table.look()
    active = ActiveRelay(settings, table, None, RelayReport(), kafka.clock)
    active.take_over(None, RelayPositions(table.id))
    active.read_on(lambda: True)
    before = {topic: [*sent] for topic, sent in kafka.sent.items()}
    shutil.rmtree(tmp_path / "messages")
    for batch in range(3):
        append_rows(tmp_path, 0, batch, [row(f"other{batch}", "a"), row(f"other late{batch}", "late")])
    kafka.missing = set()
    kafka.clock.now_s += 100
    assert not table.has_news()
    with pytest.raises(TableError, match="recreated"):
        active.try_stopped(lambda: True)
    assert kafka.sent == before


def test_messages_that_are_sent_one_by_one_fit_into_a_transaction_of_a_slow_kafka(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a quota, after one message that is too large: a hundred of them take longer than a transaction may."""
    kafka = fake_kafka(random.Random(0), monkeypatch)
    kafka.losses, write, sizes = 0.0, kafka.write, []

    def write_slowly(records: Iterable[RelayedRecord], alone: Collection[str], topic: str, positions: Iterable[PositionRecord]) -> None:
        records = list(records)
        one_by_one = [record for record in records if record.topic in alone]
        kafka.clock.now_s += 0.7 * len(one_by_one)
        if 0.7 * len(one_by_one) > 60:
            raise TransactionLostError("Kafka has aborted it")
        sizes.append(len(one_by_one))
        write(records, alone, topic, positions)

    monkeypatch.setattr(kafka, "write", write_slowly)
    many = [row(f"o{number}", "orders") for number in range(150)]
    append_rows(tmp_path, 0, 0, [*many, row("large", "orders", body=LARGE), row("a0", "a")])
    relay(settings_for(tmp_path), random.Random(1), kafka.clock)
    assert kafka.sent == {"orders": [f"o{number}" for number in range(150)], "a": ["a0"]}
    assert 8 <= max(sizes) <= 32


def test_quick_transactions_of_others_do_not_hurry_what_is_sent_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, monkeypatch, many=0)
    kafka = scene.kafka
    scene.append(("b", "late"), ("large", "late"))
    while scene.relay.read_on(on):
        pass
    kafka.takes_large = True
    kafka.clock.now_s += RETRY_S
    scene.relay.try_stopped(on)
    for number in range(10):
        scene.append((f"o{number}", "orders"))
        scene.relay.read_on(on)
    kafka.sizes.clear()
    scene.append(*((f"l{number}", "late") for number in range(150)))
    scene.relay.read_on(on)
    assert kafka.sizes[0] <= 4
    assert sum(kafka.sizes) == 150


def test_a_message_that_librdkafka_itself_refuses_stops_its_topic_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so when it is given the message, so that the refusal is of that message and of no batch."""
    kafka = fake_kafka(random.Random(0), monkeypatch)
    kafka.losses, write = 0.0, kafka.write

    def refuse(records: Iterable[RelayedRecord], alone: Collection[str], topic: str, positions: Iterable[PositionRecord]) -> None:
        records = list(records)
        for record in records:
            if record.topic == "orders":
                raise RefusedError(record, Refusal.NO_TOPIC, "no topic", is_alone=True)
        write(records, alone, topic, positions)

    monkeypatch.setattr(kafka, "write", refuse)
    append_rows(tmp_path, 0, 0, [row("o0", "orders"), row("o1", "orders"), row("a0", "a"), row("a1", "a")])
    relay(settings_for(tmp_path), random.Random(1), kafka.clock)
    assert kafka.sent == {"a": ["a0", "a1"]}
